import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import torch as library

from fleetx.checkpoint.errors import Damaged
from fleetx.checkpoint.tensor_file import DTYPES, outline, read_tensors, write_tensors


def sample(dtype, shape):
    generator = torch.Generator().manual_seed(len(shape))
    numbers = torch.randint(0, 100, shape, generator=generator)
    return numbers.to(torch.float32).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def everything():
    tensors = {str(dtype): sample(dtype, (2, 3)) for dtype in DTYPES}
    return tensors | {
        "scalar": torch.tensor(2.5),
        "scalar int": torch.tensor(-(2**60)),
        "empty": torch.empty(0),
        "empty matrix": torch.empty(3, 0, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 2, dtype=torch.int64),
        "transposed": torch.randn(3, 4).t(),
        "every second": torch.randn(10)[::2],
        "ünïcode/\"'\n": torch.ones(1),
        "nan and inf": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def same_bits(left, right):
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))


def test_every_kind_of_tensor_comes_back(tmp_path):
    tensors = everything()
    digest = write_tensors(tmp_path / "a", tensors)
    back = read_tensors(tmp_path / "a", digest, outline(tensors))
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("one", [torch.arange(20.0)[7::20], torch.arange(9.0).view(3, 3).t()[1:2, 1:2]])
def test_one_element_of_any_stride_comes_back(tmp_path, one):
    assert one.stride() != torch.empty_like(one, memory_format=torch.contiguous_format).stride()
    digest = write_tensors(tmp_path / "a", {"one": one})
    assert torch.equal(read_tensors(tmp_path / "a", digest, outline({"one": one}))["one"], one)


def test_the_library_of_safetensors_reads_what_we_write(tmp_path):
    tensors = everything()
    write_tensors(tmp_path / "a", tensors)
    back = library.load_file(tmp_path / "a")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], value) for name, value in tensors.items())


def test_a_file_without_tensors_is_a_file(tmp_path):
    digest = write_tensors(tmp_path / "a", {})
    assert read_tensors(tmp_path / "a", digest, {}) == {}
    assert library.load_file(tmp_path / "a") == {}


def test_what_is_read_has_memory_of_its_own(tmp_path):
    tensors = {"a": torch.randn(5), "b": torch.randn(7)}
    digest = write_tensors(tmp_path / "a", tensors)
    back = read_tensors(tmp_path / "a", digest, outline(tensors))
    assert back["a"].untyped_storage().nbytes() == 20
    assert back["b"].data_ptr() % 64 == torch.empty(7).data_ptr() % 64


def test_a_dtype_that_the_format_has_not_is_refused(tmp_path):
    with pytest.raises(TypeError, match="'a' is torch.complex128"):
        outline({"a": torch.ones(1, dtype=torch.complex128)})


@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_caught(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("flip") / "a"
    tensors = everything()
    digest = write_tensors(path, tensors)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(Damaged, match="SHA-256"):
        read_tensors(path, digest, outline(tensors))


def test_a_file_of_another_size_is_caught_without_reading_it(tmp_path):
    tensors = {"a": torch.ones(3)}
    digest = write_tensors(tmp_path / "a", tensors)
    (tmp_path / "a").write_bytes(b"short")
    with pytest.raises(Damaged, match="a has 5 bytes, and "):
        read_tensors(tmp_path / "a", digest, outline(tensors))
    (tmp_path / "a").unlink()
    with pytest.raises(Damaged, match="a is missing"):
        read_tensors(tmp_path / "a", digest, outline(tensors))
    (tmp_path / "a").mkdir()
    with pytest.raises(Damaged, match="a is not a file"):
        read_tensors(tmp_path / "a", digest, outline(tensors))


def test_tensors_that_the_manifest_does_not_know_are_caught(tmp_path):
    digest = write_tensors(tmp_path / "a", {"a": torch.ones(3)})
    for other in ({"a": torch.ones(4)}, {"b": torch.ones(3)}, {"a": torch.ones(3, dtype=torch.int32)}):
        with pytest.raises(Damaged, match="other tensors than its manifest"):
            read_tensors(tmp_path / "a", digest, outline(other))


def test_tensors_begin_at_a_multiple_of_their_width(tmp_path):
    write_tensors(tmp_path / "a", everything())
    contents = (tmp_path / "a").read_bytes()
    length = struct.unpack("<Q", contents[:8])[0]
    header = json.loads(contents[8 : 8 + length])
    widths = {name: dtype.itemsize for dtype, name in DTYPES.items()}
    assert length % 8 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % widths[entry["dtype"]] == 0
