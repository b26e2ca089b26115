"""Sharded tensors on disk: each rank writes its shard, and any number of ranks can read the whole tensors."""

import pytest
import safetensors.torch
import torch

from stabletrain.checkpoint import dcp
from stabletrain.checkpoint.dcp import Copies
from stabletrain.checkpoint.tree import Piece, local_part
from stabletrain.checkpoint.writer import write_file
from tests.checkpoint.given import as_rank

WHOLE = {
    "rows": torch.arange(15.0).view(5, 3),
    "few": torch.tensor([[1.0, 2.0]]),
    "bits": torch.tensor([0.1, -0.0, float("nan"), float("inf")]).bfloat16(),
}
"""Tensors that two ranks shard unevenly: the second rank has no part of `few`."""

REPLICATED = {"step": torch.tensor([7], dtype=torch.int64)}
SHAPES = {name: [*tensor.shape] for name, tensor in (WHOLE | REPLICATED).items()}


def written(folder, count):
    """Writes the shards of `count` ranks; returns the files, and the entries that each rank returned."""
    entries = []
    for rank in range(count):
        with as_rank(rank, count) as shard:
            copies = Copies({**{name: shard(tensor) for name, tensor in WHOLE.items()}, **REPLICATED}, rank)
        entries.append(copies.write(folder, rank, count, write_file))
    return sorted(folder.iterdir()), entries


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_shards_of_all_ranks_make_up_the_whole_bit_for_bit(tmp_path, count):
    files, entries = written(tmp_path, count)
    found = dcp.read(files, SHAPES, {})
    assert found.keys() == SHAPES.keys()
    assert all(same(found[name], tensor) for name, tensor in (WHOLE | REPLICATED).items())
    assert [sorted(each) for each in entries] == [[file.name] for file in files]
    assert {name: entry["bytes"] for each in entries for name, entry in each.items()} == {
        file.name: file.stat().st_size for file in files
    }


def test_replicated_tensors_are_written_by_rank_0_only(tmp_path):
    files, _ = written(tmp_path, 2)
    names = [{*safetensors.torch.load_file(file)} for file in files]
    assert names == [{"rows", "few", "bits", "step"}, {"rows", "bits"}]


@pytest.mark.parametrize("reading", [1, 3])
def test_a_rank_reads_its_shard_of_files_written_by_another_number_of_ranks(tmp_path, reading):
    files, _ = written(tmp_path, 2)
    for rank in range(reading):
        with as_rank(rank, reading) as shard:
            places = {name: shard(torch.zeros_like(tensor)) for name, tensor in WHOLE.items()}
            found = dcp.read(files, SHAPES, places)
            for name, tensor in WHOLE.items():
                assert isinstance(found[name], Piece), "it stays on the host"
                assert same(local_part(found[name]), local_part(shard(tensor))), name
            assert torch.equal(found["step"], REPLICATED["step"])


def test_a_target_of_another_dtype_or_shape_gets_the_whole_tensor_as_stored(tmp_path):
    files, _ = written(tmp_path, 2)
    found = dcp.read(files, SHAPES, {"bits": torch.zeros(4, dtype=torch.float64), "rows": torch.zeros(2, 3)})
    assert same(found["bits"], WHOLE["bits"])
    assert same(found["rows"], WHOLE["rows"])
    with as_rank(0, 2) as shard:
        for shape in [(2, 3), (6, 3)]:
            found = dcp.read(files, SHAPES, {"rows": shard(torch.zeros(shape))})
            assert same(found["rows"], WHOLE["rows"])


def test_pieces_of_a_snapshot_are_written_like_the_live_shards_and_dcp_clones_none_of_the_copies(tmp_path):
    for rank in range(2):
        with as_rank(rank, 2) as shard:
            live = {name: shard(tensor) for name, tensor in WHOLE.items()}
            pieces = {name: Piece.of(tensor, tensor.to_local().clone()) for name, tensor in live.items()}
            copies = Copies({**pieces, **REPLICATED}, rank)
        copies.write(tmp_path, rank, 2, write_file)
        for item in copies.plan.items:
            resolved = copies.resolve_data(item)
            assert resolved.untyped_storage().nbytes() == resolved.nbytes, "DCP clones what is part of something larger"
            assert resolved.data_ptr() == copies.copies[item.index.fqn].data_ptr()
    found = dcp.read(sorted(tmp_path.iterdir()), SHAPES, {})
    assert all(same(found[name], tensor) for name, tensor in (WHOLE | REPLICATED).items())


def test_the_state_may_change_after_it_is_copied(tmp_path):
    live = {"w": torch.ones(3)}
    copies = Copies(live, 0)
    live["w"].fill_(9.0)
    copies.write(tmp_path, 0, 1, write_file)
    assert dcp.read([*tmp_path.iterdir()], None, {})["w"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_missing_shard_is_an_error(tmp_path, lost):
    """Also if the last shard is missing, although the others make up a smaller tensor."""
    files, _ = written(tmp_path, 2)
    with pytest.raises(ValueError, match=r"the stored pieces of '\w+' do not cover the tensor"):
        dcp.read([file for number, file in enumerate(files) if number != lost], SHAPES, {})


def test_a_tensor_of_an_unexpected_shape_is_refused(tmp_path):
    files, _ = written(tmp_path, 2)
    with pytest.raises(ValueError, match="the stored pieces of 'rows' do not cover the tensor"):
        dcp.read(files, {**SHAPES, "rows": [6, 3]}, {})


def test_other_files_in_the_folder_are_not_read(tmp_path):
    files, _ = written(tmp_path, 1)
    safetensors.torch.save_file({"alien": torch.zeros(1)}, tmp_path / "alien.safetensors")
    assert dcp.read(files, None, {}).keys() == SHAPES.keys()
    assert dcp.read([], SHAPES, {}) == {}


def test_a_safetensors_file_of_another_program_holds_whole_tensors(tmp_path):
    safetensors.torch.save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    found = dcp.read([tmp_path / "model.safetensors"], None, {})
    assert torch.equal(found["a"], torch.arange(6.0).view(2, 3))
