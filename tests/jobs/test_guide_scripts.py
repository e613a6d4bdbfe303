"""The guide's scripts as whole jobs: two workers under fleetrun, real files of the guide's formats, reduced sizes.

Each must get below a loss that no model reaches whose weights stay where they are, and end with equal weights on both
workers. The fast tests run the programs eagerly; the full ones compile them, as the scripts do by themselves.
"""

import math
import os
import re
import subprocess
import sys

import pytest
import torch

from fleetx.data import make_digital, make_imagenet
from fleetx.data.vocabulary import SPECIAL
from tests.jobs.starting import ROOT

GUIDE = ROOT / "examples" / "guide"
CLASSES = 6

# Workers write beside each other into one pipe, so each gets a file of its own, as the guide's workers do.
BEFORE = """
import os, sys
sys.stdout = open(os.path.join(os.environ["OUT"], "log" + os.environ["RANK"]), "w")
"""
AFTER = """
import torch
torch.save(dict(model.named_parameters()), os.path.join(os.environ["OUT"], "weights" + os.environ["RANK"]))
sys.stdout.close()
"""
EAGER = (
    "optimizer.minimize(model.loss)",
    "optimizer.minimize(model.loss)\npaddle.default_main_program().compile = False",
)

SPEED = r"total time cost = [\d.]+, step per second: [\d.]+, speed: [\d.]+"
ACCURACY = r"\[Epoch (\d+), batch (\d+)\] loss: (\d+\.\d{5}), acc1: ([01]\.\d{5}), acc5: ([01]\.\d{5})"

tiers = pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["eager", "compiled"],
)


class Job:
    """A finished job: what fleetrun printed, what each worker printed, and the weights they ended with."""

    def __init__(self, folder, stdout):
        self.stdout = stdout
        self.logs = [(folder / f"log{rank}").read_text() for rank in range(2)]
        self.weights = [torch.load(folder / f"weights{rank}") for rank in range(2)]

    def check_workers_agree(self):
        first, second = self.weights
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert "Configuration Arguments" in self.stdout
        assert "PADDLE_TRAINERS_NUM" in self.stdout


def run(name, folder, replacing, *arguments, after="", **environment):
    """Start a script on two workers, with pieces of its text replaced; each piece must be there."""
    text = (GUIDE / name).read_text(encoding="utf-8")
    for old, new in replacing:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / name
    script.write_text(BEFORE + text + after + AFTER, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fleetx.launch", "--devices", "cpu,cpu", "--log_dir", str(folder / "log")),
            *(str(script), *arguments),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OUT": str(folder), **environment},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return Job(folder, done.stdout)


def small_resnet(depths="(1, 1, 1, 1)"):
    return ("Resnet50()", f"Resnet50(classes={CLASSES}, depths={depths}, width=8, image_size=32)")


def images(folder, count):
    return str(make_imagenet(folder / "images", classes=CLASSES, images=count, size=40))


def mean(values):
    return sum(values) / len(values)


def check_learned(losses):
    """Classes are equally frequent: weights that stay where they are cost about ln(classes), first and last."""
    assert losses[0] > 0.9 * math.log(CLASSES)
    assert mean(losses[-5:]) < 0.6 * math.log(CLASSES)


@pytest.mark.middle
@tiers
def test_bert(tmp_path, compiled):
    vocab, length, batch, steps = 24, 16, 8, 240
    data, vocabulary = make_digital(tmp_path / "text", samples=2 * batch * steps, vocab=vocab, seq_len=length)
    small = f"Bert_large(layers=2, width=32, heads=2, vocab_size={vocab}, max_positions={length})\n#"
    replacing = [
        ("Bert_large()\n#", small),
        ("max_seq_len=512", f"max_seq_len={length}"),
        ("batch_size=12", f"batch_size={batch}"),
        ('scope.var("encoder_layer_16_', 'scope.var("encoder_layer_1_'),
        *([] if compiled else [EAGER]),
    ]
    job = run("bert.py", tmp_path, replacing, "--lr", "3e-3", DATA_DIR=str(data), VOCAB_PATH=str(vocabulary))
    job.check_workers_agree()
    for rank, log in enumerate(job.logs):
        lines = re.findall(rf"^worker_index: {rank}, step(\d+) cost = ([\d.]+), {SPEED}$", log, re.MULTILINE)
        assert [int(step) for step, _ in lines] == list(range(10, steps))
        # The best answer that does not depend on the text: all ordinary tokens alike, and a coin for the sentences.
        topics = min(8, (vocab - len(SPECIAL)) // 2)
        tokens = topics * ((vocab - len(SPECIAL)) // topics)
        assert mean([float(cost) for _, cost in lines[-20:]]) < 0.75 * (math.log(tokens) + math.log(2))
    shown = [re.split(r"^step: \d+, encoder_layer_16_ffn_fc_1.w_0: ", log, flags=re.MULTILINE) for log in job.logs]
    arrays = [[re.sub(r"worker_index.*\n", "", text) for text in texts[1:]] for texts in shown]
    assert len(set(arrays[0])) == steps  # the weight moved in every step
    assert arrays[0] == arrays[1]


@pytest.mark.full
@tiers
def test_resnet_lars(tmp_path, compiled):
    steps = 40
    replacing = [
        small_resnet(),
        ("learning_rate=0.01", "learning_rate=0.1"),
        ('"lars_coeff": 0.001', '"lars_coeff": 0.01'),
        *([] if compiled else [EAGER]),
    ]
    job = run("resnet_lars.py", tmp_path, replacing, IMAGENET_LIST=images(tmp_path, 2 * 32 * steps))
    job.check_workers_agree()
    for rank, log in enumerate(job.logs):
        lines = re.findall(rf"^worker_index: {rank}, step(\d+) cost = ([\d.]+), {SPEED}$", log, re.MULTILINE)
        # Half of the images each, although the script makes its loader before it joins the job.
        assert [int(step) for step, _ in lines] == list(range(steps))
        check_learned([float(cost) for _, cost in lines])


@pytest.mark.middle
@tiers
def test_train_fleet_gradient_merge(tmp_path, compiled):
    epochs, batches = 2, 31
    replacing = [small_resnet(), ("epochs = 90", f"epochs = {epochs}"), *([] if compiled else [EAGER])]
    job = run(
        "train_fleet_gradient_merge.py",
        tmp_path,
        replacing,
        "--batch_size",
        "16",
        after="print('windows', exe.optimizer().engine.window.reductions)\n",
        IMAGENET_LIST=images(tmp_path, 2 * 16 * batches),
    )
    job.check_workers_agree()
    check_log(job, epochs, batches)
    assert re.search(r"gradient_merge=True <-> gradient_merge_configs.*k_steps +4 ", job.logs[0], re.DOTALL)
    # 62 batches: 15 windows of four, and the last one flushed.
    assert all(re.search(r"^windows 16$", log, re.MULTILINE) for log in job.logs)


@pytest.mark.full
@tiers
def test_train_fleet_recompute(tmp_path, compiled):
    epochs, batches = 2, 21
    replacing = [
        small_resnet(depths="(3, 4, 6, 3)"),
        ("epochs = 90", f"epochs = {epochs}"),
        # The guide's scale overflows in so narrow a network, and half of this short run would pass lowering it.
        ("strategy.amp = True", 'strategy.amp = True\nstrategy.amp_configs = {"init_loss_scaling": 1024.0}'),
        *([] if compiled else [EAGER]),
    ]
    list_path = images(tmp_path, 2 * 16 * batches)
    flags = ["--batch_size", "16", "--lr", "0.01"]
    job = run("train_fleet_recompute.py", tmp_path, replacing, *flags, IMAGENET_LIST=list_path)
    job.check_workers_agree()
    check_log(job, epochs, batches)
    assert "recompute=True <-> recompute_configs" in job.logs[0]
    assert "res5c.add.output.5.tmp_0" in job.logs[0]


def check_log(job, epochs, batches):
    """The guide's lines: every fifth batch of each epoch, on the first worker."""
    lines = re.findall(rf"^{ACCURACY}$", job.logs[0], re.MULTILINE)
    assert [(int(e), int(b)) for e, b, *_ in lines] == [(e, b) for e in range(epochs) for b in range(0, batches, 5)]
    losses, top1, top5 = ([float(line[column]) for line in lines] for column in (2, 3, 4))
    check_learned(losses)
    assert mean(top1[-5:]) > 2 / CLASSES
    assert all(one <= five <= 1 for one, five in zip(top1, top5, strict=True))
    assert not re.search(ACCURACY, job.logs[1])


@pytest.mark.full
def test_dynamic_gradient_merge(tmp_path):
    batches = 62
    list_path = images(tmp_path, 2 * 16 * batches)
    job = run("dynamic_gradient_merge.py", tmp_path, [small_resnet()], "--batch_size", "16", IMAGENET_LIST=list_path)
    job.check_workers_agree()
    lines = re.findall(r"^\[batch (\d+)\] loss: (\d+\.\d{5})$", job.logs[0], re.MULTILINE)
    # The first update sees four batches; the guide's recipe would update after batch 0.
    assert [int(batch) for batch, _ in lines] == list(range(3, batches - 2, 4))
    check_learned([float(loss) for _, loss in lines])
