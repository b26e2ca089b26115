"""CUDA graphs: a step of `compile=graph` beside compiled and uncompiled ones, for small models and for gpt2.

    python benchmarks/graphs.py --json graphs.json

The kinds alternate in one process, ten steps a turn. `speed` is the median over the rounds of the uncompiled run's time
over the kind's own. On a CPU, which has no graphs, only the uncompiled run is measured.
"""

import tempfile
from functools import partial
from pathlib import Path

from jobs import SIZES, Rounds, built
from measuring import Budget, Clock, command_line, head, in_turns, machine, modes, quartiles, ratios, row, save, silence

from stabletrain.machine import hardware

KINDS = {"cpu": ("false",), "cuda": ("false", "true", "graph")}
"""Values of `compile`, by device."""


def main() -> None:
    """Measures every model, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 10)
    parser.add_argument("--turn", type=int, default=10, help="steps per turn")
    parser.set_defaults(precision="auto")
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    clock, budget, results = Clock(device, asked.clock), Budget(asked.budget), []
    (mode,) = modes(asked.precision, device)
    gpts = [item for item in SIZES["cuda"].items() if "GPT" in item[0]] if device.type == "cuda" else []
    sizes = {**SIZES["tiny"], **dict(gpts)}
    print(f"{machine(device)}, {mode}, {asked.rounds} rounds of {asked.turn} steps")
    print(head("model", "compile", "a step, ms", "speed", "quartiles"))
    for number, (name, overrides) in enumerate(sizes.items()):
        if not budget.begins(name):
            continue
        until = budget.share(len(sizes) - number)
        with tempfile.TemporaryDirectory() as folder, silence():
            chosen = (*overrides, f"device={device}", f"precision={mode}")
            runs = {
                kind: Rounds(built(Path(folder) / kind, (*chosen, f"compile={kind}"))) for kind in KINDS[device.type]
            }

            def turn(run: Rounds, _: int) -> float:
                return clock.seconds(lambda: [run() for _ in range(asked.turn)]) / asked.turn

            taken = in_turns({kind: partial(turn, run) for kind, run in runs.items()}, asked.rounds, until=until)
            for run in runs.values():
                run.close()
        for kind, seconds in taken.items():
            middle, low, high = quartiles(ratios(taken["false"], seconds))
            spread = f"{low:.2f} - {high:.2f}"
            print(row(name, kind, f"{1e3 * quartiles(seconds)[0]:.2f}", f"{middle:.2f}", spread), flush=True)
            results.append({"workload": name, "what": kind, "seconds": seconds, "speed": middle})
        save(asked.json, device, results)
    save(asked.json, device, results, budget=budget)


if __name__ == "__main__":
    main()
