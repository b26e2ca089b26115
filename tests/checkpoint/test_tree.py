"""A tree survives JSON and safetensors bit for bit; its host copy shares no memory."""

import json
import math
import struct
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from torch.distributed.tensor import Replicate, Shard

from stabletrain.checkpoint.tree import Piece, flatten, is_of_first_copy, to_host, unflatten, unsharded
from stabletrain.checkpoint.writer import DTYPES, pieces


def through_json(tree):
    tensors, skeleton = flatten(tree)
    return unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def test_the_pieces_of_one_rank_are_tensors_again_wherever_they_are():
    """A snapshot of FSDP with one rank has them, and its checkpoint is written whole."""
    local = torch.arange(3.0)
    piece = Piece(local, None, None, local.shape, local.stride())
    found = unsharded({"a": [piece, 1], "b": (piece, {"c": piece}), "d": local})
    assert all(each is local for each in (found["a"][0], found["b"][0], found["b"][1]["c"], found["d"]))
    assert (found["a"][1], type(found["b"])) == (1, tuple)


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("shard", [0, 1])
def test_of_several_copies_of_a_shard_one_is_the_first(copy, shard):
    mesh = Mock(get_local_rank=[copy, shard].__getitem__)
    piece = Piece(torch.ones(2), mesh, (Replicate(), Shard(0)), torch.Size([4]), (1,))
    assert is_of_first_copy(piece) == (copy == 0)


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, 1e22, 1.0, 2.0**-1074]
)
def test_a_float_keeps_every_bit(value):
    back = through_json({"x": value})["x"]
    assert type(back) is float
    assert bits(back) == bits(value)


def test_nan_int_bool_and_none_keep_value_and_type():
    tree = {
        "nan": math.nan,
        "big": 2**127 + 1,
        "one": 1,
        "true": True,
        "none": None,
        "text": "NaN",
        "e": {},
        "l": [],
    }
    back = through_json(tree)
    assert math.isnan(back.pop("nan"))
    tree.pop("nan")
    assert back == tree
    assert [type(v) for v in back.values()] == [type(v) for v in tree.values()]


def test_tuples_come_back_as_lists_and_tensors_as_themselves():
    tensor = torch.arange(3)
    back = through_json({"a": (1, (2.5, tensor)), "b": [tensor]})
    assert back["a"][0] == 1
    assert back["a"][1][1] is tensor
    assert back["b"][0] is tensor


@pytest.mark.parametrize("key", ["$tensor", "$float", "$", "$$tensor", "", "a/b", "~"])
def test_a_key_that_looks_like_the_skeletons_own_is_only_a_key(key):
    tensor = torch.zeros(1)
    tree = {key: "nan", "other": {key: tensor}, "third": {key: {key: math.inf}}}
    assert through_json(tree) == tree


def test_two_paths_that_read_alike_keep_two_tensors():
    first, second = torch.tensor(1), torch.tensor(2)
    back = through_json({"a/b": first, "a": {"b": second}})
    assert back["a/b"] is first
    assert back["a"]["b"] is second


def test_a_key_that_is_no_str_is_refused_with_its_path():
    with pytest.raises(TypeError, match=r"'optimizer/state' has the key 0: keys must be str"):
        flatten({"optimizer": {"state": {0: 1}}})


def test_what_would_need_pickle_is_refused_with_its_path():
    with pytest.raises(TypeError, match=r"'parts/guard/0' is a set"):
        flatten({"parts": {"guard": [{1}]}})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library_reads_what_is_written_in_every_dtype(dtype):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 8), generator=generator, dtype=torch.uint8)
    tensors = {
        "b": raw.view(dtype),
        "a.scalar": raw.view(dtype)[0, 0].clone(),
        "empty": torch.empty(0, 3).to(dtype),
    }
    tensors["byte"] = torch.tensor([1, 2, 3], dtype=torch.uint8)  # so that alignment matters
    back = safetensors.torch.load(b"".join(pieces(tensors)))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_every_tensor_lies_aligned_in_the_file():
    tensors = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(1, dtype=torch.float64), "c": torch.zeros(1)}
    content = b"".join(pieces(tensors))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_a_dtype_the_format_lacks_is_refused():
    with pytest.raises(TypeError, match="'w' is torch.complex128"):
        list(pieces({"w": torch.zeros(1, dtype=torch.complex128)}))


def test_the_host_copy_shares_nothing():
    live = torch.arange(6.0).reshape(2, 3)
    tree = {
        "w": live.requires_grad_(),
        "tied": live,
        "turned": live.detach().t(),
        "list": [live],
        "n": {"k": 1},
    }
    copy = to_host(tree)
    with torch.no_grad():
        live.add_(100)
    tree["n"]["k"] = 2
    expected = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(copy["w"], expected)
    assert torch.equal(copy["turned"], expected.t())
    assert copy["n"] == {"k": 1}
    assert not copy["w"].requires_grad
    assert copy["turned"].is_contiguous()
    copy["w"].zero_()
    assert torch.equal(copy["tied"], expected)
    assert torch.equal(copy["list"][0], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_host_copy_of_a_cuda_tensor_has_arrived():
    live = torch.randn(1 << 24, device="cuda")
    expected = live.cpu()
    live.mul_(1.0)
    copy = to_host({"w": live})
    live.zero_()
    assert copy["w"].is_pinned()
    assert torch.equal(copy["w"], expected)
