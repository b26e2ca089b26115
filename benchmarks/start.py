"""How long one waits for a command: `python train.py` to its first step, and answers that need no model.

    python benchmarks/start.py --json start.json

Every command is a process of its own, all of them in each round, one after the other, in turns first. Printed are
median and quartiles over the rounds, of seconds on the clock and of the processor's, user and system together; on a
machine that is busy with other work the latter says more. The first round, which reads the files from the disk, counts
as well.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from first_step import TRAIN, Taken, to_a_step, to_the_end
from measuring import command_line, machine, save
from targets import head, quantity, show

from stabletrain.machine import hardware

FIRST_STEP, ANSWER = 8.0, 2.0
"""Seconds that are the targets."""

REFUSED = 2
"""The exit code of a command that cannot work."""


def commands(folder: Path, device: str) -> dict[str, tuple[float, Callable[[int], Taken]]]:
    """What is timed, by its name: the target, and what runs it for a round."""
    program = (sys.executable, "-m", "stabletrain.cli")
    quiet = (f"device={device}", "compile=false", "log_every=1", "monitors=none")

    def first_step(kind: str, *overrides: str) -> Callable[[int], Taken]:
        def run(number: int) -> Taken:
            place = folder / f"{kind}-{number}"
            return to_a_step((*TRAIN, *quiet, *overrides, f"hydra.run.dir={place}"), folder, place / "metrics.jsonl")

        return run

    def answer(code: int, *words: str) -> Callable[[int], Taken]:
        run = partial(to_the_end, words, folder, code)
        return lambda _: run()

    (folder / "run" / "incidents").mkdir(parents=True)
    return {
        "python train.py, to the first step": (FIRST_STEP, first_step("gpt")),
        "python train.py experiment=resnet_digits, to the first step": (
            FIRST_STEP,
            first_step("resnet", "experiment=resnet_digits"),
        ),
        "python train.py --help": (ANSWER, answer(0, *TRAIN, "--help")),
        "python train.py optimizer.lrr=1": (ANSWER, answer(REFUSED, *TRAIN, "optimizer.lrr=1")),
        "python train.py batch_size=-1": (ANSWER, answer(REFUSED, *TRAIN, "batch_size=-1")),
        "python train.py model=resnet20": (ANSWER, answer(REFUSED, *TRAIN, "model=resnet20")),
        "stabletrain --help": (ANSWER, answer(0, *program, "--help")),
        "stabletrain diagnose <run>": (ANSWER, answer(0, *program, "diagnose", "run")),
    }


def measured(folder: Path, device: str, rounds: int) -> dict[str, tuple[float, list[Taken]]]:
    """Of each command its target, and what it took in each round."""
    kinds = commands(folder, device)
    found: dict[str, list[Taken]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name in kinds if number % 2 else reversed(kinds):
            found[name].append(kinds[name][1](number))
    return {name: (kinds[name][0], taken) for name, taken in found.items()}


def results(found: dict[str, tuple[float, list[Taken]]]) -> list[dict[str, Any]]:
    """Two quantities of each command; the target holds for the clock."""
    each = []
    for name, (target, taken) in found.items():
        each.append(quantity(name, "wall time", [one.wall for one in taken], "s", target))
        each.append(quantity(name, "user + sys", [one.cpu for one in taken], "s"))
    return each


def main() -> None:
    """Measures, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 5)
    asked = parser.parse_args()
    device = hardware.pick(asked.device)
    print(machine(device))
    print(head())
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), str(device), asked.rounds)
    save(asked.json, device, show(results(found)))


if __name__ == "__main__":
    main()
