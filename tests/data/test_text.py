import gzip
import os
import shutil

import numpy as np
import pytest
import torch

from fleetx.data import Epoch, load_digital_dataset_from_file, load_vocabulary, make_digital
from fleetx.data.masking import mask_tokens, most_masked
from fleetx.data.text import shortened

VOCAB = "[PAD]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\nd\ne\nf\n"
GOOD = "1 4 5 2 6 7 2;0 0 0 0 1 1 1;0 1 2 3 4 5 6;1"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_digital(tmp_path_factory.mktemp("text") / "set", samples=60, vocab=50, seq_len=24)


def load(made, **options):
    data_dir, vocab_path = made
    return load_digital_dataset_from_file(
        data_dir=data_dir, vocab_path=vocab_path, **({"batch_size": 8, "max_seq_len": 24} | options)
    )


def write(folder, content, name="part.txt", vocab=VOCAB):
    data = folder / "data"
    data.mkdir(exist_ok=True)
    (data / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "vocab.txt").write_text(vocab)
    return data, folder / "vocab.txt"


def restored(batch):
    """The tokens before masking."""
    ids = batch["input_ids"].clone()
    rows, columns = (batch["masked_positions"] >= 0).nonzero(as_tuple=True)
    ids[rows, batch["masked_positions"][rows, columns]] = batch["masked_labels"][rows, columns]
    return ids


def test_batches(made):
    batches = list(load(made))
    assert [len(batch["input_ids"]) for batch in batches] == [8] * 7 + [4]
    for batch in batches:
        n = len(batch["input_ids"])
        assert all(value.dtype == torch.int64 for value in batch.values())
        assert {name: (*value.shape,) for name, value in batch.items()} == {
            "input_ids": (n, 24),
            "token_type_ids": (n, 24),
            "attention_mask": (n, 24),
            "masked_positions": (n, 4),
            "masked_labels": (n, 4),
            "next_sentence_labels": (n,),
        }
        lengths = batch["attention_mask"].sum(dim=1)
        assert torch.equal(batch["attention_mask"], (torch.arange(24) < lengths[:, None]).long())
        assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()
        assert torch.equal(batch["masked_positions"] == -1, batch["masked_labels"] == -100)
        assert (batch["masked_positions"][:, 0] > 0).all()
        assert (batch["masked_labels"][batch["masked_labels"] != -100] >= 5).all()


def test_what_comes_out_is_what_the_files_say(made):
    data_dir, _ = made
    lines = gzip.decompress((data_dir / "part-000.gz").read_bytes()).decode().splitlines()
    lines += (data_dir / "part-001.txt").read_text().splitlines()
    batches = list(load(made, shuffle=False, swap_sentences=False))
    rows = [row for batch in batches for row in zip(restored(batch), batch["token_type_ids"], strict=True)]
    for line, (tokens, types) in zip(lines, rows, strict=True):
        wanted, kinds = ([int(word) for word in field.split()] for field in line.split(";")[:2])
        assert tokens.tolist() == wanted + [0] * (24 - len(wanted))
        assert types.tolist() == kinds + [0] * (24 - len(wanted))
    assert all((batch["next_sentence_labels"] == 0).all() for batch in batches)


def test_half_of_the_second_sentences_are_exchanged(made):
    plain = torch.cat([restored(b) for b in load(made, shuffle=False, swap_sentences=False)])
    loader = load(made, shuffle=False, buffer=20)
    for _ in range(2):
        batches = list(loader)
        swapped = torch.cat([batch["next_sentence_labels"] for batch in batches]) == 1
        assert swapped.view(3, 20).sum(dim=1).tolist() == [10, 10, 10]
        tokens = torch.cat([restored(batch) for batch in batches])
        assert torch.equal(tokens[~swapped], plain[~swapped])
        assert (tokens[swapped] != plain[swapped]).any(dim=1).all()
    assert loader.epoch == 2


def test_swaps_and_masks_are_drawn_anew_in_each_epoch(made):
    samples = load(made).dataset
    labels = [[samples.sample(i, Epoch(0, epoch)).label for i in range(60)] for epoch in (0, 1)]
    assert labels[0] != labels[1]
    masks = [[samples.sample(i, Epoch(0, epoch)).positions.tolist() for i in range(60)] for epoch in (0, 1, 0)]
    assert masks[0] != masks[1]
    assert masks[0] == masks[2]


def test_samples_that_do_not_follow_already_count_as_negatives(tmp_path):
    lines = [GOOD, GOOD[:-1] + "0"] * 10
    data = write(tmp_path, "\n".join(lines))
    labels = torch.cat([batch["next_sentence_labels"] for batch in load(data, shuffle=False)])
    assert labels.tolist() == [0, 1] * 10


def test_an_exchanged_sentence_is_cut_to_fit_and_ends_with_its_separator():
    assert shortened(np.array([7, 8, 9, 2]), 3).tolist() == [7, 8, 2]
    assert shortened(np.array([7, 8, 9, 2]), 4).tolist() == [7, 8, 9, 2]
    assert shortened(np.array([7, 8, 9, 2]), 1).tolist() == [2]


def test_masking_rates(made):
    vocabulary = load_vocabulary(made[1])
    tokens = np.array([2, *range(10, 30), 3, *range(30, 49), 3])
    chosen = masked = kept = 0
    for index in range(2000):
        seen, positions, originals = mask_tokens(tokens, vocabulary, Epoch(0, 0).rng(index))
        assert len(positions) == 6
        assert not vocabulary.special[originals].any()
        assert np.array_equal(np.delete(seen, positions), np.delete(tokens, positions))
        chosen += len(positions)
        masked += int((seen[positions] == vocabulary["[MASK]"]).sum())
        kept += int((seen[positions] == originals).sum())
    assert abs(masked / chosen - 0.8) < 0.012
    assert abs(kept / chosen - 0.1 - 0.1 / 45) < 0.01


def test_at_least_one_token_is_masked(made):
    seen, positions, originals = mask_tokens(np.array([2, 9, 3]), load_vocabulary(made[1]), Epoch(0, 0).rng(0))
    assert positions.tolist() == [1]
    assert originals.tolist() == [9]
    assert len(seen) == 3
    assert [most_masked(length) for length in (3, 128, 512)] == [1, 20, 77]


@pytest.mark.parametrize("in_tokens", [False, True])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 1), (1, 0)])
def test_resumes_to_the_exact_next_batch(made, before, after, in_tokens):
    options = {"seed": 5, "in_tokens": in_tokens, "batch_size": 160 if in_tokens else 8, "buffer": 20}
    expected = list(load(made, **options))
    loader = load(made, num_workers=before, **options)
    states = [loader.state_dict()] + [loader.state_dict() for _ in loader]
    resumed = load(made, num_workers=after, **options)
    for given, state in enumerate(states[:-1]):
        resumed.load_state_dict(state)
        for got, want in zip(resumed, expected[given:], strict=True):
            assert all(torch.equal(got[name], want[name]) for name in want)


def test_in_tokens_fills_batches_by_padded_tokens(made):
    loader = load(made, in_tokens=True, batch_size=100)
    assert len(loader) == sum(1 for _ in iter(loader))
    loader.set_epoch(0)
    total = 0
    for batch in loader:
        n, length = batch["input_ids"].shape
        assert n * length <= 100
        assert length == batch["attention_mask"].sum(dim=1).max()
        assert batch["masked_positions"].shape == (n, most_masked(length))
        total += n
    assert total == 60


@pytest.mark.parametrize("in_tokens", [False, True])
def test_workers_share_an_epoch(made, in_tokens):
    options = {"in_tokens": in_tokens, "batch_size": 120 if in_tokens else 4, "swap_sentences": False}
    ranks = [[*load(made, rank=rank, workers=3, **options)] for rank in range(3)]
    assert len({len(rank) for rank in ranks}) == 1
    rows = sorted(tuple(row[row > 0].tolist()) for rank in ranks for batch in rank for row in restored(batch))
    alone = sorted(
        tuple(row[row > 0].tolist()) for batch in load(made, swap_sentences=False) for row in restored(batch)
    )
    assert rows == alone


def test_longer_samples_are_dropped_and_counted(made):
    loader = load(made, max_seq_len=16)
    kept = sum(len(batch["input_ids"]) for batch in loader)
    assert 0 < kept < 60
    assert loader.skipped == {"longer than max_seq_len": 60 - kept}


@pytest.mark.parametrize(
    ("line", "message", "reason"),
    [
        ("1 4 2;0 0 0;0 1 2", r"part.txt:2: expected `token_ids;sent_ids;pos_ids;label`, found 3 fields", "malformed"),
        ("", r"part.txt:2: expected `token_ids", "malformed"),
        ("1 x 2;0 0 0;0 1 2;1", r"part.txt:2: token_ids must be numbers separated by spaces, got b'x'", "malformed"),
        ("1 -4 2;0 0 0;0 1 2;1", r"part.txt:2: token_ids must be numbers .* got b'-4'", "malformed"),
        ("1 4_4 2;0 0 0;0 1 2;1", r"got b'4_4'", "malformed"),
        (";;;1", r"part.txt:2: token_ids must be numbers", "malformed"),
        (";0;;1", r"part.txt:2: token_ids must be numbers", "malformed"),
        ("1 4;0 0 0;0 1;1", r"part.txt:2: .*must be equally long, got 2, 3 and 2 numbers", "malformed"),
        ("1 4 2;1 1 1;0 1 2;1", r"part.txt:2: sent_ids must be 0 for the first sentence", "malformed"),
        ("1 4 2;0 0;0 1 2;1", r"part.txt:2: .*must be equally long, got 3, 2 and 3 numbers", "malformed"),
        ("1 4 2;0 1 0;0 1 2;1", r"part.txt:2: sent_ids must be 0 for the first sentence, then 1", "malformed"),
        ("1 4 2;0 0 0;0 2 1;1", r"part.txt:2: pos_ids must count from 0 to 2", "malformed"),
        ("1 4 2;0 0 0;0 1 2;2", r"part.txt:2: the label must be 1 .* or 0, got b'2'", "malformed"),
        ("1 2 2;0 0 0;0 1 2;1", r"part.txt:2: a sample needs a token that is not special", "malformed"),
        ("1 10 2;0 0 0;0 1 2;1", r"part.txt:2: token id 10 is not in the vocabulary of 10 tokens", "unknown"),
        (f"1 {10**30} 2;0 0 0;0 1 2;1", r"part.txt:2: token id 10+ is not in the vocabulary", "unknown"),
    ],
)
def test_bad_lines(tmp_path, line, message, reason):
    data = write(tmp_path, f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(ValueError, match=message):
        load(data)
    loader = load(data, on_error="skip")
    assert [len(batch["input_ids"]) for batch in loader] == [2]
    assert loader.skipped == {{"malformed": "malformed line", "unknown": "unknown token id"}[reason]: 1}


def test_a_truncated_gzip_file(tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"1 {' '.join(map(str, rng.integers(4, 10, 3)))} 2;0 0 0 0 0;0 1 2 3 4;1\n" for _ in range(2000)]
    data = write(tmp_path, gzip.compress("".join(lines).encode())[:-500], "part.gz")
    with pytest.raises(ValueError, match=r"part.gz:\d+: the gzip file is damaged after this line .*fetch it again"):
        load(data)
    loader = load(data, on_error="skip")
    assert 0 < len(loader.dataset) < 2000
    assert loader.skipped["truncated file"] == 1
    data = write(tmp_path, b"not gzip", "part.gz")
    with pytest.raises(ValueError, match=r"part.gz:0: the gzip file is damaged"):
        load(data)


def test_missing_and_empty_files(tmp_path):
    data, vocab = write(tmp_path, GOOD)
    with pytest.raises(FileNotFoundError, match=r"nowhere: there is no such folder"):
        load((tmp_path / "nowhere", vocab))
    with pytest.raises(FileNotFoundError, match=r"nowhere: there is no such vocabulary file"):
        load((data, tmp_path / "nowhere"))
    (data / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty.txt: the file is empty"):
        load((data, vocab))
    assert load((data, vocab), on_error="skip").skipped == {"empty file": 1}
    (data / "part.txt").unlink()
    with pytest.raises(ValueError, match=r"data: no sample is left .*'empty file': 1"):
        load((data, vocab), on_error="skip")
    (data / "empty.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"data: the folder holds no files"):
        load((data, vocab))


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        ("[PAD]\n[CLS]\na\n", r"vocab.txt: a vocabulary needs .*; \[SEP\] \[MASK\] is missing"),
        ("[PAD]\n[CLS]\n[SEP]\n[MASK]\n", r"special tokens only"),
        ("[PAD]\n[PAD]\n", r"vocab.txt:2: a token and its id occur once, but '\[PAD\]' has id 0 already"),
        ("[PAD]\t1\na\t1\n", r"vocab.txt:2: a token and its id occur once, but id 1 is '\[PAD\]' already"),
        ("[PAD]\tone\n", r"vocab.txt:1: expected `token` or `token<tab>id`"),
        ("[PAD]\n\n", r"vocab.txt:2: expected `token`"),
    ],
)
def test_bad_vocabularies(tmp_path, vocab, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, GOOD, vocab=vocab))


def test_ids_of_a_vocabulary_may_be_given(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\t9\n[CLS]\t8\n[SEP]\t7\n[MASK]\t6\nword\t0\n")
    vocabulary = load_vocabulary(tmp_path / "vocab.txt")
    assert (vocabulary["[PAD]"], vocabulary.size, vocabulary.ordinary.tolist()) == (9, 10, [0])


def test_bad_arguments(made):
    with pytest.raises(ValueError, match=r"must hold one sample of max_seq_len=24: got 20. Raise it"):
        load(made, in_tokens=True, batch_size=20)
    with pytest.raises(ValueError, match=r"must be at least 1, got 0, 24 and 1000"):
        load(made, batch_size=0)
    with pytest.raises(ValueError, match=r"last='drop' is for batches counted in samples"):
        load(made, in_tokens=True, batch_size=100, last="drop")


def test_any_spelling_of_a_line_means_the_same(tmp_path):
    """The usual one is read in a faster way; spaces, tabs, leading zeros and other line ends are permitted too."""
    spellings = ["1 4 5 2;0 0 1 1;0 1 2 3;1", " 1  4 5 2 ; 0 0 1 1;0\t1 2 3; 1 ", "1 04 5 2;0 0 1 1;0 1 2 03;1\r"]
    loader = load(write(tmp_path, "".join(f"{line}\n" for line in spellings)))
    text = loader.dataset.text
    assert text.tokens.tolist() == [1, 4, 5, 2] * 3
    assert (text.firsts.tolist(), text.follows.tolist()) == ([2] * 3, [1] * 3)


@pytest.mark.parametrize("ids", [False, True])
def test_any_spelling_of_a_vocabulary_means_the_same(tmp_path, ids):
    tokens = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a\u2028b", "ß"]
    lines = [f"{token}\t{number}" if ids else token for number, token in enumerate(tokens)]
    read = []
    for end, last in (("\n", "\n"), ("\n", ""), ("\r\n", "\r\n")):
        path = tmp_path / "vocab.txt"
        path.write_bytes((end.join(lines) + last).encode())
        read.append(load_vocabulary(path))
    assert all(vocabulary.ids == {token: n for n, token in enumerate(tokens)} for vocabulary in read)
    assert all(vocabulary.ordinary.tolist() == [4, 5] for vocabulary in read)


def test_a_vocabulary_larger_than_the_model_is_refused(made):
    with pytest.raises(ValueError, match=r"below the model's vocab_size of 20, .* 50 tokens is 49.* vocab_size=50"):
        load(made, vocab_size=20)
    assert len(load(made, vocab_size=50)) > 0


def test_gaps_in_a_vocabulary_are_told(tmp_path, caplog):
    load(write(tmp_path, GOOD, vocab=VOCAB + "foo\t99999\n"))
    assert "11 tokens have ids up to 99999" in caplog.text
    assert "a model needs vocab_size=100000 for it" in caplog.text


def test_a_byte_order_mark_is_no_part_of_the_first_token(tmp_path):
    for line_end in ("\n", "\r\n"):  # the fast way of reading and the careful one
        path = tmp_path / "vocab.txt"
        path.write_bytes(("\ufeff" + line_end.join(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", ""])).encode())
        assert load_vocabulary(path)["[PAD]"] == 0


def test_unknown_arguments_get_the_nearest(made):
    with pytest.raises(TypeError, match=r"has no argument 'max_seqlen'; did you mean 'max_seq_len'"):
        load(made, max_seqlen=3)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "no plain file"),
        (lambda path: path.symlink_to("/dev/zero"), "no plain file"),
        (lambda path: path.symlink_to("nowhere"), "no plain file"),
        (lambda path: path.write_bytes(b"7 " * 600), "endless line"),
    ],
)
def test_files_that_may_have_no_end_are_refused(made, tmp_path, monkeypatch, make, reason):
    monkeypatch.setattr("fleetx.data.digital.MOST_BYTES", 1000)
    folder = tmp_path / "data"
    shutil.copytree(made[0], folder)
    make(folder / "part-9")
    with pytest.raises(
        ValueError, match=r"part-9.*: (a pipe, a device or a broken link|a line has 1,000 bytes or more)"
    ):
        load((folder, made[1]))
    assert load((folder, made[1]), on_error="skip").skipped == {reason: 1}
