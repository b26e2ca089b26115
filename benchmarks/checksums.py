"""What the check of the state between two updates costs, as its own time over the step's (`guard.checksum_every`).

    OMP_NUM_THREADS=1 python benchmarks/checksums.py --clock cpu --rounds 60

Each round runs one whole step with the check before every update, and times its two halves: the checksums after an
update, and the comparison before the next. `own` is their time over that of the rest of the step; `every` is the
smallest `guard.checksum_every` with which that is at most 0.5 %, beside the default. `FLOPs/byte` is the constant
`FLOPS_PER_BYTE` of `guard/checks/state_check.py` as measured: FLOPs of the step per second, over bytes of weights
and moments that are summed per second. The last line is the estimate for an H100, from bytes over bandwidth.
"""

import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import SIZES, Rounds, built
from measuring import Clock, command_line, head, machine, modes, row, save, silence

from stabletrain.guard.checks.state_check import FLOPS_PER_BYTE, SHARE, default_every, plain
from stabletrain.machine import hardware
from stabletrain.machine.hardware import flops_per_sample

H100 = {"bytes per second": 3.35e12, "FLOP/s": 4e14}
"""Memory bandwidth (datasheet), and what a well-tuned bf16 run of GPT-2's size reaches."""

GPT2, TOKENS = 124e6, 2**19
"""Parameters of GPT-2, and tokens of its step."""


def timed(call: Callable[..., Any], clock: Clock, spent: list[float]) -> Callable[..., Any]:
    """Returns the function, which appends its seconds to `spent`."""

    def run(*args: Any) -> Any:
        begun = clock.now()
        found = call(*args)
        spent.append(clock.now() - begun)
        return found

    return run


def measured(name: str, overrides: tuple[str, ...], precision: str, device: str, rounds: int, kind: str) -> list[Any]:
    """Returns a row of the table."""
    with tempfile.TemporaryDirectory() as folder, silence():
        chosen = (*overrides, f"precision={precision}", f"device={device}", "guard.checksum_every=1")
        job = built(Path(folder), (*chosen, "forensics=off"))
        clock, spent, steps = Clock(job.device, kind), [], []
        check: Any = job.tools.guard.state_check
        for half in ("before_update", "after_update"):
            setattr(check, half, timed(getattr(check, half), clock, spent))
        one_round = Rounds(job)
        for _ in range(3):
            one_round()
        spent.clear()
        for _ in range(rounds):
            before = len(spent)
            begun = clock.now()
            one_round()
            steps.append((clock.now() - begun, sum(spent[before:])))
        job.data.batches.close()
    own = statistics.median(mine / (whole - mine) for whole, mine in steps)
    check_time = statistics.median(mine for _, mine in steps)
    step_time = statistics.median(whole - mine for whole, mine in steps)
    batch = job.data.load(0)
    flops = (flops_per_sample(job.state.model.to("cpu"), batch.inputs[:1].cpu()) or 0.0) * len(batch)
    states = [each for state in job.state.optimizer.state.values() for each in state.values()]
    tensors = [part for each in [*job.state.model.parameters(), *states] for part in plain(each)]
    size = sum(each.numel() * each.element_size() for each in tensors)
    weights = sum(each.numel() * each.element_size() for each in job.state.model.parameters())
    return [
        name,
        precision,
        f"{size / 1e6:.1f} MB",
        f"{1e3 * step_time:.1f} ms",
        f"{1e3 * check_time:.2f} ms",
        f"{own:.2%}",
        max(1, math.ceil(own / SHARE)),
        default_every(3 * weights, flops, job.device.type),
        f"{(flops / step_time) / (2 * size / check_time):.1f}",
    ]


def main() -> None:
    """Prints the table."""
    options = command_line(__doc__, 60).parse_args()
    device = hardware.choose_device(options.device)
    print(machine(device))
    columns = ["", "precision", "state", "step", "check", "own", "every", "default", "FLOPs/byte"]
    print(head(*columns))
    rows: list[list[Any]] = []
    for name, overrides in SIZES["cuda" if device.type == "cuda" else "cpu"].items():
        for precision in modes(options.precision, device):
            rows.append(measured(name, overrides, precision, device.type, options.rounds, options.clock))
            print(row(*rows[-1]))
    # Weights and two moments, summed twice an update, each byte read for its row and for its column.
    seconds = 4 * 12 * GPT2 / H100["bytes per second"]
    step = 6 * GPT2 * TOKENS / H100["FLOP/s"]
    every = default_every(12 * GPT2, 6 * GPT2 * TOKENS, "cuda")
    print(
        f"GPT-2 at {TOKENS:,} tokens on an H100, estimated: {1e3 * seconds:.1f} ms of {1e3 * step:.0f} ms, "
        f"{seconds / step:.2%}; default every {every}; constants {FLOPS_PER_BYTE}"
    )
    save(options.json, device, [dict(zip(columns, each, strict=True)) for each in rows])


if __name__ == "__main__":
    main()
