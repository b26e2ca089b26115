"""Many runs in one group of processes: torchrun starts it once, and each rank writes down what it saw of each run.

    torchrun --nproc_per_node=2 -m tests.parallel.worker <place>

`<place>/cases.json` maps a name to a case (see `perform`); `<place>/rank<r>.json` maps it to what that rank saw.
"""

import faulthandler
import hashlib
import json
import math
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.tree import flatten, is_sharded, to_host
from stabletrain.errors import StabletrainError
from stabletrain.parallel.ranks import current_ranks, exit_process, leave_process_group
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from stabletrain.trainer.run import TrainingRun
from tests.parallel.broken import broken
from tests.runs import composed

PARTS = ("clipping", "precision")
"""What a skipped step must not change, besides model, buffers and optimizer."""


PATIENCE = 270
"""Seconds for all cases together."""


class Crash(Exception):
    """Stands for a killed group of processes: nothing runs after it."""


def perform(place: Path, name: str, case: Mapping[str, Any]) -> dict[str, Any]:
    """One run; what this rank saw of it.

    Args:
        place: folder of the run folders.
        name: of the case.
        case: `overrides`; `folder`, of the run, else the case's name; `crash_at`, a tick before which all ranks stop
            dead; `poke`, a tick and a rank, which finds NaN in its first buffer then; `tensors`, whether the whole
            state's tensors are wanted, bit by bit; `broken`, a part of explaining and the rank that fails in it;
            `wrong`, a tick and a rank, whose matrix products are wrong in one bit from then on.

    Returns:
        readings, verdicts, hashes of the state by tick, sample ids and random draws by step, and how it ended.
    """
    seen: dict[str, Any] = {"error": None, "message": ""}
    try:
        with composed(*case["overrides"]) as cfg:
            job = build(cfg, place / case.get("folder", name))
            seen |= {"readings": [], "verdicts": [], "states": {}, "ids": [], "draws": [], "gathered": []}
            if case.get("tensors"):
                seen["tensors_before"] = tensors_of(job)
            watch(job, seen, case.get("crash_at"), case.get("poke"))
            with broken(*case.get("broken", (None, 0))) as calls, wrong_products(job, *case.get("wrong", (0, -1))):
                train(job)
            seen["calls"] = dict(calls)
            finish(job, seen)
            if case.get("tensors"):
                seen["tensors_after"] = tensors_of(job)
    except (StabletrainError, Crash) as error:
        seen |= {"error": type(error).__name__, "message": str(error)}
    return seen


def watch(job: TrainingRun, seen: dict[str, Any], crash_at: int | None, poke: list[int] | None) -> None:
    """Writes every reading and verdict down, and the bits of the state between two steps."""
    judge, get = job.tools.guard.judge, job.data.batches.get
    wrapped, poked = job.tools.parallel.wrapped, []

    def judging(reading: Any) -> Any:
        verdict = judge(reading)
        seen["readings"].append(reading._asdict())
        seen["verdicts"].append([reading.step, verdict.value, job.tools.guard.kind])
        return verdict

    def getting(step: int) -> Any:
        if job.state.executed_steps == crash_at:
            raise Crash
        if [job.state.executed_steps, job.parallel.ranks.rank] == poke and not poked:
            poked.append(True)
            next(job.state.model.buffers()).fill_(math.nan)
        seen["states"][str(job.state.executed_steps)] = bits(job)
        batch = get(step)
        seen["ids"].append([step, [] if batch.ids is None else batch.ids.tolist()])
        return batch

    def wrapping(model: Any) -> Any:
        forward = wrapped(model)

        def drawing(inputs: Any, **how: Any) -> Any:
            generator = torch.Generator()
            generator.set_state(torch.get_rng_state())
            seen["draws"].append(torch.rand((), generator=generator).item())
            logits = forward(inputs, **how)
            seen["gathered"].append(sum(not is_sharded(parameter) for parameter in model.parameters()))
            return logits

        return drawing

    job.tools.guard.judge, job.data.batches.get, job.tools.parallel.wrapped = judging, getting, wrapping


@contextmanager
def wrong_products(job: TrainingRun, tick: int, rank: int) -> Generator[None]:
    """From a tick on, flips the lowest bit of the first value of every matrix product on one rank: always the same."""
    right = nn.functional.linear

    def linear(*arguments: Any) -> Tensor:
        product = right(*arguments)
        if job.state.executed_steps < tick:
            return product
        flipped = product.detach().clone()
        flipped.view(-1).view(torch.uint8)[:1].bitwise_xor_(1)
        return product + (flipped - product).detach()

    with patch("torch.nn.functional.linear", linear) if job.parallel.ranks.rank == rank else nullcontext():
        yield


def finish(job: TrainingRun, seen: dict[str, Any]) -> None:
    """Writes down how the run ended."""
    seen["states"][str(job.state.executed_steps)] = bits(job)
    seen["weights"] = digest(to_host(dict(job.state.model.state_dict())))
    seen["skips"], seen["rollbacks"] = dict(job.tools.guard.skips), job.tools.guard.rollbacks
    seen["machine_faults"] = job.tools.guard.machine_faults
    seen["parts"] = {name: str(part.state_dict()) for name, part in job.saved.parts.items() if name != "history"}
    seen["val"], seen["step"], seen["tick"] = job.history.val, job.state.step, job.state.executed_steps


def bits(job: TrainingRun) -> str:
    """This rank's weights, buffers, moments and step counters, and the state of all stateful parts."""
    tree = capture(job.state, {name: job.saved.parts[name] for name in PARTS})
    return digest({"state": {**tree, "step": 0, "tick": 0}, "buffers": dict(job.state.model.named_buffers())})


def digest(tree: Any) -> str:
    """A hash of all tensors (of sharded ones, the local shard) and of all other values."""
    tensors, skeleton = flatten(tree)
    found = hashlib.sha256(repr(skeleton).encode())
    for name, tensor in tensors.items():
        found.update(name.encode() + of_tensor(tensor).encode())
    return found.hexdigest()


def of_tensor(tensor: Any) -> str:
    """A hash of a tensor's bits."""
    local = tensor.to_local() if is_sharded(tensor) else tensor
    flat = local.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def tensors_of(job: TrainingRun) -> dict[str, str]:
    """A hash of every whole tensor of weights, moments and averages, by name."""
    tree = to_host(capture(job.state, {}))
    tensors, _ = flatten({"model": tree["model"], "optimizer": tree["optimizer"]["state"]})
    tensors |= flatten({"average": tree.get("average", {})})[0]
    return {name: of_tensor(tensor) for name, tensor in tensors.items()}


def main(place: Path) -> int:
    """Runs every case in turn, and writes down what this rank has seen after each of them."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)  # a rank that hangs says where
    cases = json.loads((place / "cases.json").read_text())
    seen = {}
    for name, case in cases.items():
        print(f"case {name}", flush=True)
        seen[name] = perform(place, name, case)
        (place / f"rank{current_ranks().rank}.json").write_text(json.dumps(seen))  # a later case may end this process
    leave_process_group()
    return 0


def numbers(seen: Mapping[str, Any], field: str) -> list[float]:
    """One number or term of the loss of every reading, by step; NaN if it is not finite, so that lists compare."""
    found = [{**reading, **reading["terms"]}[field] for reading in seen["readings"]]
    return [value if math.isfinite(value) else math.nan for value in found]


if __name__ == "__main__":
    exit_process(main(Path(sys.argv[1])))
