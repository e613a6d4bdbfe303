import gzip

import numpy as np
import pytest
import torch

from fleetx.data import load_fashion_mnist, load_idx, make_idx
from fleetx.data.make import write_idx


@pytest.mark.parametrize("name", ["values", "values.gz"])
def test_round_trip(tmp_path, name):
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_idx(tmp_path / name, values)
    assert torch.equal(load_idx(tmp_path / name), torch.from_numpy(values))


def test_other_types_are_big_endian(tmp_path):
    (tmp_path / "values").write_bytes(b"\0\0\x0c\x01\0\0\0\x02\0\0\x01\0\xff\xff\xff\xff")
    assert torch.equal(load_idx(tmp_path / "values"), torch.tensor([256, -1], dtype=torch.int32))


def test_fashion_mnist(tmp_path):
    data = load_fashion_mnist(make_idx(tmp_path / "set", images=40, size=12))
    assert data.train_images.shape == (40, 1, 12, 12)
    assert data.train_images.dtype == torch.uint8
    assert data.test_images.shape == (10, 1, 12, 12)
    assert data.train_labels.bincount().tolist() == [4] * 10
    assert data.test_labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"begins with 0, 0 and a type"),
        (b"\x89PNG....", r"begins with 0, 0 and a type from 8 to 14, this one with b'\\x89PNG'"),
        (b"\0\0\x08\x03\0\0", r"the header of 3 dimensions does not fit: 6 bytes in all"),
        (b"\0\0\x08\x01\0\0\0\x05abc", r"shape \(5,\) needs 5 bytes, and the file has 3: it is damaged"),
        (b"\0\0\x08\x01\0\0\0\x02abc", r"shape \(2,\) needs 2 bytes, and the file goes on after them: it is damaged"),
        (bytes([0, 0, 8, 200]) + b"\0\0\0\x01" * 200 + b"a", r"has 1 to 32 dimensions, and this one 200"),
        (b"\0\0\x08\x20" + bytes(4) + b"\xff" * 124, r"no array has the shape \(0, 4294967295.*the file is damaged"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    (tmp_path / "values").write_bytes(content)
    with pytest.raises(ValueError, match=rf"values: .*{message}"):
        load_idx(tmp_path / "values")


def test_truncated_gzip_and_missing_files(tmp_path):
    (tmp_path / "values.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x05abcde")[:-9])
    with pytest.raises(ValueError, match=r"values.gz: not a whole gzip file"):
        load_idx(tmp_path / "values.gz")
    with pytest.raises(FileNotFoundError, match=r"none: there is no such file"):
        load_idx(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz"):
        load_fashion_mnist(tmp_path)


def test_parts_that_do_not_belong_together(tmp_path):
    folder = make_idx(tmp_path / "set", images=20, size=8)
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.zeros(19, np.uint8))
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte.gz: expected 20 bytes, got torch.uint8 \(19,\)"):
        load_fashion_mnist(folder)
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.full(20, 12, np.uint8))
    with pytest.raises(ValueError, match=r"labels are from 0 to 9, found 12"):
        load_fashion_mnist(folder)


@pytest.mark.parametrize("end", [b"\0" * 2**22, b""])
def test_a_gzip_file_is_read_no_further_than_its_header_says(tmp_path, end, monkeypatch):
    path = tmp_path / "bomb.gz"
    # 28 bytes after the first header; far more than there is after the second.
    header = b"\0\0\x08\x01" + (b"\0\0\0\x1c" if end else b"\xff\xff\xff\xff")
    path.write_bytes(gzip.compress(header + bytes(28) + end))
    taken = []
    read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: taken.append(size) or read(self, size))
    with pytest.raises(ValueError, match=r"needs 28 bytes, and the file goes on" if end else r"the file has 28: it is"):
        load_idx(path)
    assert 0 < min(taken) <= max(taken) <= 2**20
    assert sum(taken) <= 2**22
