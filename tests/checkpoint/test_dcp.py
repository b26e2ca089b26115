"""Tensors of which each rank writes its part: all parts make up the whole, for any number of ranks that read them."""

import pytest
import safetensors.torch
import torch

from stabletrain.checkpoint import dcp
from stabletrain.checkpoint.dcp import Copies, local_part
from stabletrain.checkpoint.writer import write_file
from tests.checkpoint.given import as_rank

WHOLE = {
    "rows": torch.arange(15.0).view(5, 3),
    "few": torch.tensor([[1.0, 2.0]]),
    "bits": torch.tensor([0.1, -0.0, float("nan"), float("inf")]).bfloat16(),
}
"""Tensors that two ranks do not divide alike: of `few` the second has none."""

REPLICATED = {"step": torch.tensor([7], dtype=torch.int64)}
SHAPES = {name: [*tensor.shape] for name, tensor in (WHOLE | REPLICATED).items()}


def written(folder, count):
    """The files of so many ranks; and what each of them said of its own."""
    said = []
    for rank in range(count):
        with as_rank(rank, count) as shard:
            copies = Copies({**{name: shard(tensor) for name, tensor in WHOLE.items()}, **REPLICATED}, rank)
        said.append(copies.write(folder, rank, count, write_file))
    return sorted(folder.iterdir()), said


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_parts_of_all_ranks_are_the_whole_bit_for_bit(tmp_path, count):
    files, said = written(tmp_path, count)
    found = dcp.read(files, SHAPES, {})
    assert found.keys() == SHAPES.keys()
    assert all(same(found[name], tensor) for name, tensor in (WHOLE | REPLICATED).items())
    assert [sorted(each) for each in said] == [[file.name] for file in files]
    assert {name: entry["bytes"] for each in said for name, entry in each.items()} == {
        file.name: file.stat().st_size for file in files
    }


def test_what_every_rank_has_is_written_by_the_first_only(tmp_path):
    files, _ = written(tmp_path, 2)
    names = [{*safetensors.torch.load_file(file)} for file in files]
    assert names == [{"rows", "few", "bits", "step"}, {"rows", "bits"}]


@pytest.mark.parametrize("reading", [1, 3])
def test_a_rank_reads_its_own_part_of_what_another_number_of_ranks_wrote(tmp_path, reading):
    files, _ = written(tmp_path, 2)
    for rank in range(reading):
        with as_rank(rank, reading) as shard:
            places = {name: shard(torch.zeros_like(tensor)) for name, tensor in WHOLE.items()}
            found = dcp.read(files, SHAPES, places)
            for name, tensor in WHOLE.items():
                assert same(local_part(found[name]), local_part(shard(tensor))), name
            assert torch.equal(found["step"], REPLICATED["step"])


def test_a_place_of_another_dtype_is_read_as_it_was_stored_and_one_of_another_shape_whole(tmp_path):
    files, _ = written(tmp_path, 2)
    found = dcp.read(files, SHAPES, {"bits": torch.zeros(4, dtype=torch.float64), "rows": torch.zeros(2, 3)})
    assert same(found["bits"], WHOLE["bits"])
    assert same(found["rows"], WHOLE["rows"])


def test_the_state_may_change_as_soon_as_it_is_copied(tmp_path):
    live = {"w": torch.ones(3)}
    copies = Copies(live, 0)
    live["w"].fill_(9.0)
    copies.write(tmp_path, 0, 1, write_file)
    assert dcp.read([*tmp_path.iterdir()], None, {})["w"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_part_that_is_missing_is_noticed(tmp_path, lost):
    """Also at the end of a tensor, where the pieces that are left make up a smaller one."""
    files, _ = written(tmp_path, 2)
    with pytest.raises(ValueError, match=r"the pieces of '\w+' do not make it up"):
        dcp.read([file for number, file in enumerate(files) if number != lost], SHAPES, {})


def test_a_tensor_of_another_shape_than_was_promised_is_refused(tmp_path):
    files, _ = written(tmp_path, 2)
    with pytest.raises(ValueError, match="the pieces of 'rows' do not make it up"):
        dcp.read(files, {**SHAPES, "rows": [6, 3]}, {})


def test_a_file_that_lies_beside_the_parts_is_not_read(tmp_path):
    files, _ = written(tmp_path, 1)
    safetensors.torch.save_file({"alien": torch.zeros(1)}, tmp_path / "alien.safetensors")
    assert dcp.read(files, None, {}).keys() == SHAPES.keys()
    assert dcp.read([], SHAPES, {}) == {}


def test_a_file_of_another_program_is_a_whole(tmp_path):
    safetensors.torch.save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    found = dcp.read([tmp_path / "model.safetensors"], None, {})
    assert torch.equal(found["a"], torch.arange(6.0).view(2, 3))
