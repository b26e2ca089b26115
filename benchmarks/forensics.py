"""What forensics costs: while nothing is wrong, against tools that look at every step; and a diagnosis, in steps.

    python benchmarks/forensics.py --json forensics.json
    python benchmarks/forensics.py --diagnosis --precision bf16 --rounds 5 --json diagnosis.json

Steady state: a round of the loop with forensics on, over one with forensics off. Beside it a second run with forensics
off, whose ratio shows what this measurement can tell apart; a hook on every module that looks whether its output is
finite; and autograd's anomaly mode. All of them in each round, in turns first.

Diagnosis: from a withheld step to its folder, in steps of the same run. Three incidents: an activation that becomes NaN
once and is finite when the step is run again; one sample for which the model divides by 0, which takes the most passes,
since the sample is searched for; and a spike, by a learning rate that is too large for one step. Memory is the most
that was in use, in the diagnosis and in an ordinary step.

The median and the quartiles over the rounds are printed.
"""

import contextlib
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from finite_hooks import finite_hooks
from jobs import SIZES, Rounds, built
from measuring import Clock, command_line, head, machine, most_memory, quartiles, save, silence
from torch import Tensor, nn

from stabletrain.machine import hardware

SMALL = {
    "gpt_nano, 16 x 128 tokens": ("model=gpt_nano", "data=random_tokens", "batch_size=16"),
    "resnet20, 32 images of 32 px": ("model=resnet20", "data=random_images", "batch_size=32"),
}
LARGE = ("model=gpt2", "data=random_tokens", "data.vocab_size=50257")
DIAGNOSED = {
    "cpu": SMALL | {"gpt2 (124 M), 4 x 256 tokens": (*LARGE, "data.block_size=256", "batch_size=4")},
    "cuda": SMALL | {"gpt2 (124 M), 8 x 1024 tokens": (*LARGE, "data.block_size=1024", "batch_size=8")},
}
AT = {"activation": 4, "sample": 7, "spike": 11}
"""Steps, from 0, whose updates are withheld; the spike last, since its weights stay ruined."""


def steady(folder: Path, overrides: Sequence[str], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Rounds of each kind over the round without forensics that stands beside them, and that one's milliseconds."""
    runs = {
        name: Rounds(built(folder / name, (*overrides, f"forensics={option}")))
        for name, option in (("off", "off"), ("forensics", "default"), ("off again", "off"))
    }
    off = runs["off"]
    kinds: dict[str, tuple[Rounds, Callable[[], AbstractContextManager]]] = {
        **{name: (run, contextlib.nullcontext) for name, run in runs.items()},
        "hooks": (off, lambda: finite_hooks(off.job.state.model)),
        "anomaly mode": (off, torch.autograd.detect_anomaly),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(-3, rounds):  # the first three warm up
        order = [*kinds] if number % 2 else [*kinds][::-1]
        taken = {}
        for name in order:
            run, within = kinds[name]
            with within():
                taken[name] = clock.seconds(run)
        if number >= 0:
            for name, each in taken.items():
                found[name].append(1000 * each if name == "off" else each / taken["off"])
    for run in runs.values():
        run.job.batches.close()
    return found


def break_down(marked: Tensor, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output, divided by 0 for the sample that is marked."""
    other = (inputs[0] != marked).flatten(1).any(1)
    return output / other.view(-1, *[1] * (output.ndim - 1)).to(output.dtype)


def diagnoses(folder: Path, overrides: Sequence[str], clock: Clock) -> dict[str, dict[str, float]]:
    """Of each incident the seconds of its diagnosis and of a step of the same run, and the most memory of both."""
    activation = f"{{kind: activation, at: [{AT['activation']}]}}"
    burst = f"{{kind: learning_rate, at: [{AT['spike'] - 1}], factor: 100000.0}}"
    freely = (
        "forensics.max_seconds=100000",
        "optimizer.lr=1e-4",
        "faults=plan",
        f"faults.faults=[{activation},{burst}]",
    )
    job = built(folder, (*overrides, *freely))
    device, marked = job.device, job.load(AT["sample"]).inputs[:1].to(job.device)
    first = next(module for module in job.state.model.modules() if not [*module.children()])
    first.register_forward_hook(lambda *given: break_down(marked, *given))
    run, steps, heights, found = Rounds(job), [], [0], {}
    while len(found) < len(AT):
        taken, memory = {}, {}
        for part in (run.compute, run.settle, run.commit):
            with most_memory(device) as memory[part.__name__]:
                taken[part.__name__] = clock.seconds(part)
        settled = job.state.step - 2
        if settled in AT.values():
            name = next(name for name, step in AT.items() if step == settled)
            found[name] = {"seconds": taken["settle"], "memory": max(memory["settle"], default=0)}
        elif settled >= 0:  # the first one warms up
            steps.append(sum(taken.values()))
            heights += [height for part in memory.values() for height in part]
    job.batches.close()
    filed = [json.loads(path.read_text()) for path in sorted((folder / "incidents").glob("*/diagnosis.json"))]
    kinds = {each["step"] - 1: each["kind"] for each in filed}
    assert kinds == {step: "spike" if name == "spike" else "nonfinite" for name, step in AT.items()}, f"filed: {kinds}"
    ordinary = {"step": statistics.median(steps), "step_memory": max(heights)}
    return {name: {**each, **ordinary} for name, each in found.items()}


def show_rounds(clock: Clock, workload: str, overrides: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measures and prints the steady state of one run."""
    with tempfile.TemporaryDirectory() as folder, silence():
        found = steady(Path(folder), overrides, rounds, clock)
    for what, values in found.items():
        middle, low, high = quartiles(values)
        name, digits = ("off, ms", 1) if what == "off" else (f"{what} / off", 4)
        print(f"| {workload} | {name} | {middle:.{digits}f} | {low:.{digits}f} - {high:.{digits}f} |", flush=True)
    return [{"what": what, "values": values} for what, values in found.items()]


def show_diagnoses(clock: Clock, workload: str, overrides: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measures and prints the diagnoses in so many runs."""
    runs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, silence():
            runs.append(diagnoses(Path(folder), overrides, clock))
    for incident in AT:
        found = [run[incident] for run in runs]
        middle, low, high = quartiles([each["seconds"] / each["step"] for each in found])
        taken, step = (statistics.median(each[what] for each in found) for what in ("seconds", "step"))
        memory, ordinary = (max(each[what] for each in found) / 1e9 for what in ("memory", "step_memory"))
        print(
            f"| {workload} | {incident} | {taken:.2f} | {step:.3f} | {middle:.1f} | {low:.1f} - {high:.1f} | "
            f"{memory:.2f} | {ordinary:.2f} |",
            flush=True,
        )
    return [{"what": incident, "runs": [run[incident] for run in runs]} for incident in AT]


def main() -> None:
    """Measures, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 60)
    parser.add_argument("--diagnosis", action="store_true", help="a diagnosis in steps; --rounds counts runs")
    parser.add_argument("--only", default="", help="a part of the name of what is to be measured")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
    device = hardware.pick(asked.device)
    clock = Clock(device, asked.clock)
    show, sizes, columns = show_rounds, SIZES, ("what", "median", "quartiles")
    if asked.diagnosis:
        columns = ("incident", "diagnosis, s", "a step, s", "steps", "quartiles", "memory, GB", "a step's, GB")
        show, sizes = show_diagnoses, DIAGNOSED
    print(f"{machine(device)}, {asked.clock} time")
    print(head("workload", *columns))
    results = []
    for name, overrides in sizes[device.type].items():
        for mode in asked.precision.split(",") if asked.only in name else ():
            chosen = (*overrides, f"device={device}", f"precision={mode}")
            found = show(clock, f"{name}, {mode}", chosen, asked.rounds)
            results += [{"workload": name, "precision": mode, **each} for each in found]
    save(asked.json, device, results)


if __name__ == "__main__":
    main()
