"""What each knob of docs/catalogue.py adds to the time and to the memory of a step, relative to the defaults.

    OMP_NUM_THREADS=1 python benchmarks/catalogue.py multirun/catalogue/cost.json
    OMP_NUM_THREADS=1 python benchmarks/catalogue.py cost.json --only default,QK-LayerNorm

The model is that of `model=gpt_nano` (4 blocks of width 128) on 16 x 128 random tokens, otherwise the settings are
those of `experiment=catalogue`. The knobs alternate in one process, step by step; time is the median of the ratios to
the step of the row that a knob is compared with. Memory is the largest number of bytes that a step holds at once,
counted from allocation to release: weights, moments, gradients and activations.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from jobs import HERE, built
from measuring import Clock, head, in_turns, machine, quartiles, ratios, row, silence
from memory import Counted

from stabletrain.step import train_step
from stabletrain.trainer.run import TrainingRun

sys.path.insert(0, str(HERE.parent))  # `docs` is not installed
from docs.catalogue import KINDS

BASE = ("experiment=catalogue", "~monitors.every")  # `monitors=none` has no such key

SIZE = ("model.n_layer=4", "model.n_embd=128", "data=random_tokens", "data.vocab_size=256", "data.block_size=128")

WARM_UP = 3


def step_of(job: TrainingRun) -> Callable[[], object]:
    """Returns a function that takes the next step of a run."""

    def step() -> None:
        batch = job.data.batches.get(job.state.step)
        train_step(job.state, batch.to(job.device).split(job.plan.grad_accum_steps), job.tools)

    return step


def peak(job: TrainingRun, step: Callable[[], object]) -> int:
    """Returns the largest number of bytes that a step holds at once."""
    with Counted(job.state.model) as counted:
        for state in job.state.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    counted.meet(value)
        step()
    return counted.peak


def main() -> None:
    """Measures, prints the table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", help="names of rows, separated by commas")
    asked = parser.parse_args()
    chosen = [kind for kind in KINDS if asked.only is None or kind.name in asked.only.split(",")]
    steps, bytes_ = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for place, kind in enumerate(chosen):
            with silence():
                job = built(Path(folder) / str(place), (*BASE, *shlex.split(kind.settings), *SIZE))
            steps[kind.name] = step_of(job)
            for _ in range(WARM_UP):
                steps[kind.name]()
            bytes_[kind.name] = peak(job, steps[kind.name])
        device = job.device
        clock = Clock(device)
        taken = in_turns(
            {name: lambda _, step=step: clock.seconds(step) for name, step in steps.items()}, asked.rounds, 1
        )
    print(machine(device))
    print(head("knob", "time", "quartiles", "memory"))
    rows = {}
    for kind in chosen:
        other = kind.beside if kind.beside in taken else kind.name
        middle, low, high = quartiles(ratios(taken[kind.name], taken[other]))
        more = bytes_[kind.name] / bytes_[other]
        rows[kind.name] = {"time": middle, "quartiles": [low, high], "memory": more}
        print(row(kind.name, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{more:.3f}"), flush=True)
    asked.file.write_text(
        json.dumps({"machine": machine(device), "rounds": asked.rounds, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
