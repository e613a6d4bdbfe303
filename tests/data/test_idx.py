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
        (b"\0\0\x08\x01\0\0\0\x05abc", r"shape \(5,\) needs 13 bytes, the file has 11: it is damaged"),
        (b"\0\0\x08\x01\0\0\0\x02abc", r"shape \(2,\) needs 10 bytes, the file has 11"),
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
