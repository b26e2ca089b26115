"""What it costs to compute a gradient and an update twice (`guard.recheck_every`): extra time over a step's.

    OMP_NUM_THREADS=1 python benchmarks/recheck.py --clock cpu --rounds 20

Every second step of a run is computed twice, so that neighbouring steps are compared. `share` is the extra time of one
such step over the time of a plain one, divided by the default number of steps between two of them.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from jobs import SIZES, Rounds, built
from measuring import Clock, command_line, head, machine, modes, row, save, silence

from stabletrain.guard.policy import SkipGuard
from stabletrain.machine import hardware

WARM_UP = 2
"""Pairs of steps that are not measured."""


def measured(folder: Path, overrides: Sequence[str], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Returns the seconds of each plain step, and of each that is computed twice."""
    run = Rounds(built(folder, (*overrides, "guard.recheck_every=2", "guard.snapshot_every=1000000")))
    found: dict[str, list[float]] = {"plain": [], "twice": []}

    def step() -> None:
        run.compute()
        run.judge()
        run.commit()

    for number in range(2 * (WARM_UP + rounds)):
        twice = run.job.tools.guard.recheck.due(run.job.state.step)
        taken = clock.seconds(step)
        if number >= 2 * WARM_UP:
            found["twice" if twice else "plain"].append(taken)
    run.close()
    return found


def main() -> None:
    """Measures a GPT and a ResNet, and prints one row for each and precision."""
    parser = command_line(__doc__, 20)
    parser.add_argument("--tiny", action="store_true", help="tiny models, only to check that it runs")
    asked = parser.parse_args()
    device, every = hardware.choose_device(asked.device), SkipGuard().recheck_every
    clock, results = Clock(device, asked.clock), []
    print(f"{machine(device)}, {asked.clock} time, {asked.rounds} rounds")
    print(head("model", "plain step", "computed twice", "more", f"share, every {every} steps"))
    size = "tiny" if asked.tiny else device.type
    for name, overrides in SIZES[size].items():
        for mode in modes(asked.precision, device):
            chosen = (*overrides, f"device={device.type}", f"precision={mode}", "compile=false")
            with tempfile.TemporaryDirectory() as folder, silence():
                taken = measured(Path(folder), chosen, asked.rounds, clock)
            plain, twice = mean(taken["plain"]), mean(taken["twice"])
            more = twice / plain - 1
            cells = (f"{1e3 * plain:.1f} ms", f"{1e3 * twice:.1f} ms", f"{more:.0%}", f"**{more / every:.2%}**")
            print(row(f"{name}, {mode}", *cells), flush=True)
            results.append(found(name, mode, more / every, taken))
    save(asked.json, device, results)


def found(name: str, mode: str, share: float, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Returns one result, as it is saved."""
    return {"model": name, "precision": mode, "share": share, "seconds": taken}


if __name__ == "__main__":
    main()
