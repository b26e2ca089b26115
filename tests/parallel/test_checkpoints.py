"""Checkpoints of a sharded run: every rank its own part, complete or absent, and no rank ever has the whole."""

import json
import shutil

import pytest
from safetensors import safe_open

from stabletrain.checkpoint import reader
from stabletrain.checkpoint.folder import find
from stabletrain.checkpoint.reader import UnusableCheckpoint
from stabletrain.checkpoint.tree import flatten
from stabletrain.tracking.metrics import read_jsonl
from tests.checkpoint.given import rewrite_manifest
from tests.parallel.launches import alone, forked
from tests.parallel.worker import of_tensor
from tests.runs import ROOT

pytestmark = [pytest.mark.beside, pytest.mark.timeout(600)]  # one of the runs has an injected fault

SHARDS = [f"{part}/shard-0000{n}-model-00001-of-00001.safetensors" for part in ("model", "training") for n in (1, 2)]


@pytest.fixture(scope="module")
def place(shared_place):
    """The folders of the runs of `saver.py`, which is launched once."""
    place = shared_place / "saver"
    place.mkdir(exist_ok=True)
    with alone(place / "lock"):
        if not (place / "rank0.json").exists():
            forked(2, "-m", "tests.parallel.saver", str(place), cwd=ROOT, logs=place)
    return place


@pytest.fixture(scope="module")
def seen(place):
    """What each rank saw."""
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(2)]


def hashes(tree):
    tensors, _ = flatten({"model": tree["model"], "optimizer": tree["optimizer"]["state"]})
    return {name: of_tensor(tensor) for name, tensor in tensors.items()}


def events(place, name, kind):
    return [event for event in read_jsonl(place / name / "events.jsonl") if event["event"] == kind]


def test_each_rank_writes_its_part_and_all_parts_are_the_state(place, seen):
    folder = place / "run" / "checkpoints" / "step-00000008"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == sorted(
        [*SHARDS, "manifest.json", "state.json"]
    )
    sizes, whole = {}, {}
    for name in SHARDS:
        with safe_open(folder / name, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        sizes[name] = sum(tensor.nbytes for tensor in tensors.values())
        whole[name.split("/")[0]] = whole.get(name.split("/")[0], 0) + sizes[name]
    for name, size in sizes.items():
        assert 0.4 < size / whole[name.split("/")[0]] < 0.6, name
    found = find(folder)
    assert found.healthy
    for rank in seen:
        assert hashes(found.load()) == rank["saved_and_read"]["end"]
    assert {f"model/{name}": of_tensor(tensor) for name, tensor in found.load_model().items()}.items() <= rank[
        "saved_and_read"
    ]["end"].items()


def test_no_rank_gathers_or_reads_more_than_its_part(seen):
    for rank in seen:
        found = rank["saved_and_read"]
        assert found["step"] == 8
        assert found["gathered"]
        assert not any(found["gathered"])
        assert found["end"] == found["again"] == found["ddp"]
        assert len(found["read"]) == 3 * len([name for name in found["read"] if name.startswith("model/")]) > 0
        assert not found["whole"]
        assert all(0.3 < share < 0.7 for share in found["read"].values())


def test_damage_in_one_ranks_part_is_found_and_the_checkpoint_before_is_used(place, seen):
    assert [rank["damaged"]["resumed_at"] for rank in seen] == [4, 4]
    (event,) = events(place, "bad", "checkpoint_skipped")
    assert event["step"] == 8
    assert event["reason"].endswith(f"{SHARDS[3]} does not match its checksum")


def test_a_part_that_one_rank_cannot_write_costs_that_checkpoint_only(place, seen):
    for rank in seen:
        assert rank["failing"] == {"left": ["step-00000008"], "step": 8}
    (event,) = events(place, "full", "checkpoint_failed")
    assert (event["step"], event["reason"]) == (4, "[Errno 28] rank 1: No space left on device")
    said = "".join((place / f"rank{rank}.err").read_text() for rank in range(2))
    assert said.count("step 4 was not written (rank 1: No space left on device)") == 1


def test_a_part_that_never_comes_is_waited_for_within_bounds(place, seen):
    (event,) = [event for event in events(place, "ill", "checkpoint_failed") if event["step"] == 11]
    assert "rank 1 has not written its part within 3 s" in event["reason"]
    assert [rank["ill"]["left"] for rank in seen] == [["step-00000009", "step-00000010"]] * 2


def test_what_is_unsound_in_one_part_makes_the_checkpoint_unhealthy(place, seen):
    assert [rank["ill"]["unsound"] for rank in seen] == [[9, False], [9, False]]
    saved = {event["step"]: event for event in events(place, "ill", "checkpoint")}
    assert saved[9]["reason"].endswith(" is not finite")
    assert not saved[9]["healthy"]


def test_an_error_of_the_program_in_one_ranks_writing_is_raised_on_all(seen):
    assert [rank["ill"]["raised"] for rank in seen] == ["rank 1's", "rank 1's"]


# ---- one process, and a checkpoint that several have written


@pytest.fixture
def checkpoint(place, tmp_path, seen):
    """A copy of one."""
    return shutil.copytree(place / "run" / "checkpoints" / "step-00000008", tmp_path / "step-00000008")


@pytest.mark.parametrize("name", SHARDS)
def test_each_file_counts(checkpoint, name):
    content = (checkpoint / name).read_bytes()
    for byte in (0, 9, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[byte] ^= 1
        (checkpoint / name).write_bytes(changed)
        for read in (reader.verify, lambda path: reader.peek(path).load()):
            with pytest.raises(UnusableCheckpoint, match=rf"{name} does not match its checksum"):
                read(checkpoint)
    (checkpoint / name).unlink()
    with pytest.raises(UnusableCheckpoint, match=rf"{name} is missing"):
        reader.verify(checkpoint)


def test_a_rank_finds_fault_with_its_share_of_the_files_only(checkpoint):
    for name in SHARDS:
        (checkpoint / name).write_bytes(bytes((checkpoint / name).stat().st_size))
    found = []
    for rank in range(4):
        with pytest.raises(UnusableCheckpoint, match="does not match its checksum") as refused:
            reader.verify(checkpoint, rank, 4)
        found.append(next(name for name in SHARDS if name in str(refused.value)))
    assert sorted(found) == SHARDS


def test_a_manifest_that_leaves_a_part_out_is_refused(checkpoint):
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    for lost, says in ((SHARDS[1], "model/"), (SHARDS[0], "model/"), (SHARDS[2], "training/")):
        rewrite_manifest(checkpoint, files={name: entry for name, entry in files.items() if name != lost})
        with pytest.raises(UnusableCheckpoint, match=f"{says} has unexpected content"):
            reader.verify(checkpoint)
    rewrite_manifest(checkpoint, files=files | {"../shard-00003-model-00001-of-00001.safetensors": files[SHARDS[0]]})
    with pytest.raises(UnusableCheckpoint, match="does not match its checksum"):
        reader.verify(checkpoint)


def test_a_file_that_somebody_has_laid_beside_the_parts_is_not_read(checkpoint):
    before = hashes(reader.verify(checkpoint).load())
    shutil.copy(checkpoint / SHARDS[0], checkpoint / "model" / "another.safetensors")
    assert hashes(reader.verify(checkpoint).load()) == before


def test_a_state_is_put_back_shard_by_shard_without_a_second_copy_of_it(seen):
    """From host memory and from the disk; on cards, a second copy would take 12 bytes per parameter."""
    for each in (rank["put_back"] for rank in seen):
        assert each["step"] == 9, "the checkpoint is that of the state in memory, which the run has left"
        assert each["after"] == each["after from disk"] == each["before"]
        assert each["largest"] < each["all"] / 10
        assert max(each["peak"], each["peak from disk"]) <= each["largest"]
        assert each["at the end"] == each["before"]
        assert each["peak of going back"] <= each["largest"]
        assert each["peak of going back to disk"] <= each["all"] + each["largest"], (
            "what is read, and nothing beside it"
        )
