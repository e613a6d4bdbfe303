"""Training speed through the static door, beside other people's models compiled as a user would, and our own by hand.

All rivals of a case do the same arithmetic: bf16 autocast over fp32 weights, the same batch, a fused optimizer; BERT
with an attention mask and both losses. Each case is measured in one process, rivals in turns.
"""

import gc
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.timing import interleaved, ratio
from fleetx import fleet, static
from fleetx.applications import Bert_base, Bert_large, Resnet50

OURS, BY_HAND = "FleetX, static door", "our module, compiled by hand"
OURS_PADDED, PADDED_BY_HAND = "FleetX, static door, padding computed", "our module with padding, compiled by hand"
WHAT = (
    "One training update in bf16 autocast over fp32 weights with a fused optimizer; BERT at sequence 512 with mask and "
    "both losses, 80 masked words per sequence, sequences 3/4 to fully filled; ResNet-50 at 224 pixels, channels last"
)
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One model at one batch size."""

    model: str
    batch: int
    sequence: int = 512
    masked: int = 80
    image: int = 224
    sizes: tuple[tuple[str, int], ...] = ()
    unpad: bool = False

    @property
    def name(self) -> str:
        """How results call it."""
        return f"{self.model}, batch {self.batch}"


H200_CASES = [Case("bert_large", 64, unpad=True), Case("resnet50", 256), Case("resnet50", 1024)]


def measure(case: Case, device: str = "cuda", *, rounds: int = 5, calls: int = 5) -> dict[str, Any]:
    """Seconds per update of each rival, in turns."""
    torch.manual_seed(0)
    bert = case.model.startswith("bert")
    batch = synthetic_batch(case, device)
    # As a loader gives it: the mask is on the host, where a model without padding reads it.
    ours = batch | {"attention_mask": batch["attention_mask"].cpu()} if bert else batch
    rivals: dict[str, Run] = {OURS: _static_door(case, ours, device), BY_HAND: _by_hand(case, ours, device)}
    if case.unpad:
        padded = replace(case, unpad=False)
        rivals |= {OURS_PADDED: _static_door(padded, batch, device), PADDED_BY_HAND: _by_hand(padded, batch, device)}
    if bert and importlib.util.find_spec("transformers"):
        rivals["transformers, compiled"] = _transformers(case, batch, device)
    if not bert and importlib.util.find_spec("timm"):
        rivals["timm, compiled"] = _timm(case, batch, device)
    synchronised = {name: _synchronised(run, device) for name, run in rivals.items()}
    seconds = interleaved(synchronised, rounds=rounds, calls=calls)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "batch": case.batch,
        "samples_per_s": {name: case.batch / median for name, median in medians.items()},
        "speed_of_ours": _ratios(seconds, OURS),
        **({"speed_of_ours_padded": _ratios(seconds, OURS_PADDED)} if case.unpad else {}),
        "seconds": seconds,
    }


def _ratios(seconds: Mapping[str, list[float]], ours: str) -> dict[str, float]:
    return {name: ratio(seconds, ours, name) for name in seconds if name != ours}


def model_flops(case: Case) -> int:
    """Floating point operations of one sample, forward and backward."""
    model = make(case)
    return model.flops_per_sample()


def free() -> None:
    """Give back what the last case held, compiled code included."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make(case: Case) -> Any:
    """The case's model, on the host."""
    kinds: dict[str, Any] = {"bert_base": Bert_base, "bert_large": Bert_large, "resnet50": Resnet50}
    return kinds[case.model](**dict(case.sizes), **({"unpad": True} if case.unpad else {}))


def synthetic_batch(case: Case, device: str, size: int | None = None) -> dict[str, Tensor]:
    """A batch of made-up data, of the case's size or another one."""
    case = case if size is None else replace(case, batch=size)
    return _tokens(case, device) if case.model.startswith("bert") else _images(case, device)


def _tokens(case: Case, device: str) -> dict[str, Tensor]:
    n, length, masked = case.batch, case.sequence, case.masked
    vocabulary = dict(case.sizes).get("vocab_size", 30522)
    lengths = torch.randint(length * 3 // 4, length + 1, (n, 1))
    positions = torch.stack([torch.randperm(length * 3 // 4)[:masked] for _ in range(n)])
    batch = {
        "input_ids": torch.randint(0, vocabulary, (n, length)),
        "token_type_ids": (torch.arange(length).expand(n, length) >= length // 2).long(),
        "attention_mask": (torch.arange(length) < lengths).long(),
        "masked_positions": positions,
        "masked_labels": torch.randint(0, vocabulary, (n, masked)),
        "next_sentence_labels": torch.randint(0, 2, (n,)),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _images(case: Case, device: str) -> dict[str, Tensor]:
    images = torch.randn(case.batch, 3, case.image, case.image, device=device)
    classes = dict(case.sizes).get("classes", 1000)
    return {
        "images": images.to(memory_format=torch.channels_last),
        "labels": torch.randint(0, classes, (case.batch,), device=device),
    }


def optimizer_for(case: Case, parameters: Any) -> torch.optim.Optimizer:
    """A fused optimizer, the usual one for the model."""
    if case.model.startswith("bert"):
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def _static_door(case: Case, batch: dict[str, Tensor], device: str) -> Run:
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    model = placed(make(case), case, device)
    program = static.Program(model, lambda parameters: optimizer_for(case, parameters), strategy)
    place = static.CUDAPlace(0) if device == "cuda" else static.CPUPlace()
    executor = static.Executor(place)
    return lambda: executor.run(program, batch, ["loss"], return_numpy=False)


def _by_hand(case: Case, batch: dict[str, Tensor], device: str) -> Run:
    model = placed(make(case), case, device)
    return _plain_loop(model, optimizer_for(case, model.parameters()), lambda: sum(model(**batch).values()), device)


def _transformers(case: Case, batch: dict[str, Tensor], device: str) -> Run:
    model, inputs = placed(transformers_bert(case), case, device), transformers_inputs(batch)
    return _plain_loop(model, optimizer_for(case, model.parameters()), lambda: model(**inputs).loss, device)


def transformers_bert(case: Case) -> Any:
    """transformers' model of the same size."""
    from transformers import BertConfig, BertForPreTraining  # pyrefly: ignore[missing-import]

    ours = make(case).config
    config = BertConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.width,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.heads,
        intermediate_size=ours.intermediate,
        max_position_embeddings=ours.max_positions,
    )
    return BertForPreTraining(config)


def transformers_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same batch as its model takes it: a label for each position."""
    labels = torch.full_like(batch["input_ids"], -100)
    labels.scatter_(1, batch["masked_positions"], batch["masked_labels"])
    inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    return inputs | {"labels": labels, "next_sentence_label": batch["next_sentence_labels"]}


def _timm(case: Case, batch: dict[str, Tensor], device: str) -> Run:
    import timm  # pyrefly: ignore[missing-import]

    model = placed(timm.create_model("resnet50", num_classes=1000), case, device)
    images, labels = batch["images"], batch["labels"]
    return _plain_loop(
        model,
        optimizer_for(case, model.parameters()),
        lambda: functional.cross_entropy(model(images).float(), labels),
        device,
    )


def _plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Any], device: str) -> Run:
    """What a user writes: compile the model, autocast around the forward, step."""
    model.compile()

    def run() -> Tensor:
        optimizer.zero_grad()
        with _autocast(device):
            value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return run


@contextmanager
def _autocast(device: str) -> Iterator[None]:
    with torch.autocast(device, dtype=torch.bfloat16):
        yield


def placed(model: nn.Module, case: Case, device: str) -> nn.Module:
    """The model on its device, ready to train; convolutions in channels-last order."""
    model = model.to(device).train()
    if not case.model.startswith("bert"):
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return model


def _synchronised(run: Run, device: str) -> Run:
    """Single calls are long; waiting after each keeps rivals out of each other's time."""

    def timed() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    return timed
