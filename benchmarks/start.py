"""The time to start: `python train.py` to its first step, and commands that answer without a model.

    python benchmarks/start.py --json start.json

Every command is a process of its own; each round runs all of them once, in varying order. Prints median and quartiles
over the rounds, of wall-clock time and of CPU time (user and system), which is more reliable on a busy machine. The
first round, which reads the files from disk, counts too.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from first_step import TRAIN, Taken, to_a_step, to_the_end
from measuring import command_line, head, in_turns, machine, save
from quantities import COLUMNS, quantity, reached, show
from targets import judged

from stabletrain.machine import hardware

FIRST_STEP, HELP, ERROR = "start/first_step", "start/help", "start/error"
"""Names of targets in `targets.py`."""

REFUSED = 2
"""The exit code for an invalid configuration."""


def commands(folder: Path, device: str) -> dict[str, tuple[str, Callable[[int], Taken]]]:
    """Returns, per command, its target and a function that runs it for a round."""
    program = (sys.executable, "-m", "stabletrain.cli.commands")
    uncompiled = (f"device={device}", "compile=false")

    def first_step(kind: str, *overrides: str) -> Callable[[int], Taken]:
        def run(number: int) -> Taken:
            place = folder / f"{kind}-{number}"
            return to_a_step(
                (*TRAIN, *uncompiled, *overrides, f"hydra.run.dir={place}"), folder, place / "metrics.jsonl"
            )

        return run

    def answer(code: int, *words: str) -> Callable[[int], Taken]:
        run = partial(to_the_end, words, folder, code)
        return lambda _: run()

    (folder / "run" / "incidents").mkdir(parents=True)
    return {
        "python train.py compile=false, to the first step": (FIRST_STEP, first_step("gpt")),
        "the same with experiment=resnet_digits": (
            "",
            first_step("resnet", "experiment=resnet_digits"),
        ),
        "python train.py --help": (HELP, answer(0, *TRAIN, "--help")),
        "python train.py optimizer.lrr=1": (ERROR, answer(REFUSED, *TRAIN, "optimizer.lrr=1")),
        "python train.py batch_size=-1": (ERROR, answer(REFUSED, *TRAIN, "batch_size=-1")),
        "python train.py model=resnet20": (ERROR, answer(REFUSED, *TRAIN, "model=resnet20")),
        "stabletrain --help": (HELP, answer(0, *program, "--help")),
        "stabletrain diagnose <run>": ("", answer(0, *program, "diagnose", "run")),
    }


def measured(folder: Path, device: str, rounds: int) -> list[dict[str, Any]]:
    """Returns two quantities per command; the target applies to the wall-clock time."""
    kinds, taken = commands(folder, device), {}

    def timed(name: str, number: int) -> float:
        taken.setdefault(name, []).append(kinds[name][1](number))
        return taken[name][-1].wall

    in_turns({name: partial(timed, name) for name in kinds}, rounds, warm_up=0)
    found = []
    for name, (target, _) in kinds.items():
        found.append(quantity(name, "wall time", [one.wall for one in taken[name]], "s", target))
        found.append(quantity(name, "user + sys", [one.cpu for one in taken[name]], "s"))
    return found


def main() -> None:
    """Measures, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 5)
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    print(machine(device))
    print(head(*COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        results = show(measured(Path(folder), str(device), asked.rounds))
    values = reached(results)
    print("\n" + judged(values, device, "start/"))
    save(asked.json, device, results, values)


if __name__ == "__main__":
    main()
