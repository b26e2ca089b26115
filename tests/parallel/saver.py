"""What ranks do with checkpoints of a sharded run, in one group of processes.

    torchrun --nproc_per_node=2 -m tests.parallel.saver <place>

`<place>/rank<r>.json` holds what each rank saw; the run folders stay in `<place>` for the test to look at.
"""

import faulthandler
import json
import sys
import time
from collections.abc import Callable, Collection
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stabletrain.checkpoint import sharded
from stabletrain.checkpoint.capture import capture, restore, sharded_tensors
from stabletrain.checkpoint.snapshots import Snapshots
from stabletrain.checkpoint.tree import flatten, is_sharded, local_part
from stabletrain.parallel.checkpoints import SharedCheckpoints
from stabletrain.parallel.ranks import (
    all_gather_object,
    current_ranks,
    exit_process,
    leave_process_group,
    set_timeout,
    timeout,
)
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from stabletrain.trainer.run import TrainingRun
from tests.parallel.worker import PATIENCE, tensors_of
from tests.runs import TINY_GPT, composed

RUN = [*TINY_GPT, "forensics=off", "monitors=none", "precision=fp32", "steps=8", "checkpoint.every=4", "eval_every=8"]
RUN += ["parallel=fsdp", "checkpoint.keep=5", "guard=skip"]


def made(place: Path, name: str, *overrides: str) -> TrainingRun:
    """A run that is built and has not begun."""
    with composed(*RUN, *overrides) as cfg:
        return build(cfg, place / name)


def trained(place: Path, name: str, *overrides: str) -> TrainingRun:
    """A run that has ended."""
    job = made(place, name, *overrides)
    train(job)
    return job


def gathering(work: Callable[[], Any]) -> tuple[Any, int]:
    """Returns the result of `work`, and how often it communicated shards."""
    count, kept = 0, (DTensor.full_tensor, DTensor.redistribute)

    def counting(function: Callable) -> Callable:
        def called(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return function(*arguments, **options)

        return called

    DTensor.full_tensor, DTensor.redistribute = map(counting, kept)
    try:
        return work(), count
    finally:
        DTensor.full_tensor, DTensor.redistribute = kept


def saved_and_read(place: Path) -> dict[str, Any]:
    """A run that saves; what each rank then reads of its last checkpoint."""
    job = made(place, "run")
    job.saved.checkpoints.save, gathered = counted(job.saved.checkpoints.save)
    train(job)
    again, building = gathering(lambda: made(place, "again", f"resume={place / 'run'}"))
    found = again.saved.checkpoints.find(place / "run")
    assert found is not None
    tree, reading = gathering(lambda: found.load(sharded_tensors(again.state)))
    tensors = flatten({"model": tree["model"], "optimizer": tree["optimizer"]["state"]})[0]
    shards = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
    read = {name: shard.to_local().numel() / shard.shape.numel() for name, shard in shards.items()}
    whole = [name for name, tensor in tensors.items() if not is_sharded(tensor) and tensor.numel() > 1]
    seen = {"step": again.state.step, "end": tensors_of(job), "again": tensors_of(again), "read": read, "whole": whole}
    other = made(place, "ddp", f"resume={place / 'run'}", "parallel=ddp")
    return seen | {"gathered": [*gathered, building, reading], "ddp": tensors_of(other)}


def counted(save: Callable) -> tuple[Callable, list[int]]:
    """The same function, and how much each of its calls gathers."""
    counts: list[int] = []

    def counting(*arguments: Any, **options: Any) -> None:
        counts.append(gathering(lambda: save(*arguments, **options))[1])

    return counting, counts


def failing(place: Path) -> dict[str, Any]:
    """Runs with a disk that is full at step 4 for rank 1 only."""
    job = trained(place, "full", "faults=disk_full", "faults.at=[4]", "faults.rank=1")
    return {"left": left(place / "full"), "step": job.state.step}


def ill(place: Path) -> dict[str, Any]:
    """Damages rank 1's files of a checkpoint, in a different way each time."""
    seen: dict[str, Any] = {}
    job = made(place, "ill")
    checkpoints = job.saved.checkpoints
    assert isinstance(checkpoints, SharedCheckpoints)
    save = {"info": {}, "healthy": True, "val_loss": None}

    tree = capture(job.state, job.saved.parts)  # what only one rank has is unsound
    if current_ranks().rank == 1:
        next(t for t in tree["model"].values() if is_sharded(t)).to_local()[0] = torch.nan
    checkpoints.save(9, tree | {"step": 9}, **save)
    found = checkpoints.newest()
    assert found is not None
    seen |= {"unsound": [found.step, found.healthy]}

    checkpoints.save(10, capture(job.state, job.saved.parts) | {"step": 10}, **save)
    leave_part, limit = sharded.RankShard.write, timeout()
    set_timeout(4.5)  # rank 0 gives up before rank 1, which waits for rank 0, does
    if current_ranks().rank == 1:  # it never comes
        sharded.RankShard.write = lambda *_: None
    checkpoints.save(11, tree | {"step": 11}, **save)
    checkpoints.wait()
    sharded.RankShard.write = leave_part
    set_timeout(limit.total_seconds())
    seen |= {"left": left(place / "ill")}

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("rank 1's")

    if current_ranks().rank == 1:  # an error of the program, on one rank, is raised on all
        sharded.RankShard._unsound = broken
    try:
        checkpoints.save(12, tree, **save)
        checkpoints.wait()
    except ZeroDivisionError as error:
        seen |= {"raised": str(error)}
    return seen


def put_back(place: Path) -> dict[str, Any]:
    """Puts back a state that lies in host memory, and one from the disk: what came back, and how much memory it took.

    Also saves the first one, while the run has another. Then goes back as the run does, which looks for a state that is
    intact first.
    """
    wide = ["model.n_embd=256", "guard=rollback"]  # small tensors are copied into one vector for their checksums
    trained(place, "wide", *wide, "steps=1", "eval_every=1")
    job = made(place, "back", *wide, f"resume={place / 'wide'}")
    state, checkpoints, snapshots = job.state, job.saved.checkpoints, Snapshots()
    state.step = 9
    snapshots.take(9, capture(state, job.saved.parts), state)
    tensors = flatten(capture(state, {}))[0].values()
    shards = [local_part(tensor) for tensor in tensors if is_sharded(tensor)]
    seen: dict[str, Any] = {"before": tensors_of(job), "largest": max(shard.nbytes for shard in shards)}
    seen["all"] = sum(shard.nbytes for shard in shards)
    for shard in shards:
        shard.zero_()
    kept = snapshots.newest(9)
    checkpoints.save(9, kept, info={"run": job.output.folder.id}, healthy=True, val_loss=None)
    checkpoints.wait()
    seen["peak"] = peak_of(lambda: restore(kept, state, {}))
    seen["after"] = tensors_of(job)
    for shard in shards:
        shard.zero_()
    found = checkpoints.newest()
    assert found is not None
    tree = found.load(sharded_tensors(state))
    seen["peak from disk"] = peak_of(lambda: restore(tree, state, {}))
    seen |= {"step": found.step, "after from disk": tensors_of(job)}
    job.saved.take_snapshot()

    def go_back() -> None:
        for shard in shards:
            shard.zero_()
        known = job.saved.find(9)
        assert known is not None
        job.saved.restore(known[0], {})

    seen["peak of going back"] = peak_of(go_back)
    job.saved.snapshots.retain([])
    files = {file.stat().st_size for file in found.path.rglob("*.safetensors")}
    seen["peak of going back to disk"] = peak_of(go_back, mapped=files)
    return seen | {"at the end": tensors_of(job)}


def peak_of(work: Callable[[], Any], mapped: Collection[int] = ()) -> int:
    """The most bytes that were allocated at once by `work`; a file of a size in `mapped` is mapped, and takes none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    changes = [(when, change) for when, change in changes if abs(change) not in mapped]
    return max(accumulate(change for _, change in changes), default=0)


def left(folder: Path) -> list[str]:
    """The names in a run's folder of checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def damaged(place: Path) -> dict[str, Any]:
    """Resumes a run after one bit has flipped in rank 1's files of the newest checkpoint."""
    trained(place, "bad")
    all_gather_object(None)  # the other rank may still be reading the file
    if current_ranks().rank == 0:
        file = (
            place
            / "bad"
            / "checkpoints"
            / "step-00000008"
            / "training"
            / "shard-00002-model-00001-of-00001.safetensors"
        )
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    all_gather_object(None)
    return {"resumed_at": made(place, "bad", "resume=auto").state.step}


def main(place: Path) -> int:
    """Runs everything. A rank's results appear when it is done."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)  # a rank that hangs says where
    seen, since = {}, time.monotonic()
    for case in (saved_and_read, damaged, failing, put_back, ill):
        seen[case.__name__] = case(place)
        print(f"{case.__name__}: {time.monotonic() - since:.1f} s", flush=True)
    (place / f"rank{current_ranks().rank}.json").write_text(json.dumps(seen))
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main(Path(sys.argv[1])))
