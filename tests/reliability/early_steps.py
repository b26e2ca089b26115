"""How well the guard judges the first steps of a run, before its window is half full.

    python -m tests.reliability.early_steps --json early_steps.json
    python -m tests.reliability.early_steps --replay early_steps.json        # judges recorded series again

Records loss, gradient norm and largest input of the first 70 steps of small runs with `guard=off`, then judges these
series with the guard's limits, and with the fixed multiples that earlier versions had instead (3 times the first loss,
100 times the first gradient norm):

- **clean starts**: every init, warmup and precision of both models; size, optimizer, learning rate, clipping, further
  options and seed are drawn at random. A step above a limit would have been skipped. This is a false skip, unless the
  loss has already grown several times: some starts diverge because a high learning rate was drawn.
- **faults**: each start in fp32 or bf16 has a random step between 2 and 60 at which every fault of `FAULTS` is tried,
  from the same state. A fault is caught if one of the first `WITHIN` damaged steps is above a limit. Many faults do
  little: in the first steps, wrong targets raise the loss no more than right ones. The last columns count only the
  faults that at least double the loss.
"""

import argparse
import contextlib
import io
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from stabletrain.beside.faults.in_data import Poison
from stabletrain.beside.faults.in_step import Gradient, LearningRate, StepFault, Undo
from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.snapshots import Snapshots
from stabletrain.guard.policy.limits import INPUTS, LOSS, NORM, Limit
from stabletrain.records import Batch, Reading, TrainState
from stabletrain.step import train_step
from stabletrain.trainer.build import build
from stabletrain.trainer.run import TrainingRun
from tests.reliability.finite.score import table
from tests.runs import composed

STEPS = 70
"""Number of steps in a start: the default window of 128 steps is half full after 64."""

WITHIN = 4
"""Number of steps in which a fault can be caught: the first damaged step and three more."""

CHOSEN_ON = 180
"""The rule was chosen on this many starts; the other starts test it."""

ALONE = (
    *("wandb=disabled", "checkpoint=off", "monitors=none", "forensics=off", "guard=off"),
    *("compile=false", "device=cpu", "steps=1000", "log_every=1000", "report=false"),
)
WARMUPS = ("none", "linear", "cosine")
INITS = {
    "gpt": ("gpt2", "normal", "fan_in", "small", "zero_residual", "torch"),
    "resnet": ("torch", "normal", "fan_in", "zero_residual"),
}
REPEATS = {"gpt": 4, "resnet": 5}
"""Number of starts for each init, warmup and precision except fp16, which has one."""

SHAPES = {
    "gpt": ((2, 16, 16, 4), (2, 32, 32, 8), (4, 64, 64, 8), (4, 64, 32, 16), (6, 96, 64, 4)),
    "resnet": ((8, 8), (8, 32), (20, 8), (20, 32)),
}
"""GPT: blocks, width, tokens per sample, samples. ResNet: depth, images. fp16 is slow on a CPU, so it
uses only the first shape.
"""

OPTIMIZERS = {
    "gpt": (
        *("adamw 3e-4", "adamw 1e-3", "adamw 3e-3", "adamw 1e-2", "adamw 3e-2"),
        *("stable_adamw 3e-3", "spam 3e-3", "muon 3e-3", "sgd 1e-1", "sgd 1e-2"),
    ),
    "resnet": ("sgd 3e-2", "sgd 1e-1", "sgd 3e-1", "adamw 1e-3", "adamw 3e-3", "adamw 1e-2"),
}
CLIPPINGS = ("norm", "norm", "none", "agc", "zclip", "adagc", "per_module", "value")
EXTRAS = {
    "gpt": ("schedule=cosine", "stability=zloss_qknorm", "softcap=gemma2", "model.dropout=0.1", "schedule=constant"),
    "resnet": ("schedule=cosine", "zloss=palm", "label_smoothing=0.1", "schedule=constant"),
}
CLASSES = {"gpt": 256, "resnet": 10}


@dataclass(frozen=True)
class Scaled(StepFault):
    """Multiplies every gradient of a step."""

    factor: float = 30.0

    def inject(self, state: TrainState, precision: Any) -> list[Undo]:
        def scale(parameter: Tensor) -> None:
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor)

        return [each.register_post_accumulate_grad_hook(scale).remove for each in state.model.parameters()]


@dataclass(frozen=True)
class Noise(StepFault):
    """Adds noise to every weight before a step, as large as the weights of its tensor."""

    @torch.no_grad()
    def inject(self, state: TrainState, precision: Any) -> list[Undo]:
        draw = torch.Generator().manual_seed(state.step)
        for each in state.model.parameters():
            each += each.float().square().mean().sqrt() * torch.randn(each.shape, generator=draw)
        return []


@dataclass(frozen=True)
class SameTarget(Poison):
    """Every target is the first class."""

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        return replace(batch, targets=torch.zeros_like(batch.targets))


FAULTS: dict[str, Callable[[list[int]], Poison | StepFault]] = {
    "wrong targets": lambda at: Poison(at, factor=1.0),
    "five batches of wrong targets": lambda at: Poison(at, factor=1.0, length=5),
    "one target for all": SameTarget,
    "inputs x 100": lambda at: Poison(at, factor=100.0),
    "learning rate x 10": lambda at: LearningRate(at, factor=10.0),
    "learning rate x 100": lambda at: LearningRate(at, factor=100.0),
    "gradient x 30": Scaled,
    "gradient x 1000": lambda at: Scaled(at, factor=1000.0),
    "one gradient value of 1e4": lambda at: Gradient(at, value=1e4),
    "noise on the weights": Noise,
}
"""Faults that leave everything finite."""

IMAGES_ONLY = ("inputs x 100",)


def starts(seed: int) -> Iterator[tuple[str, ...]]:
    """Yields the overrides of every clean start, in random order."""
    draw = random.Random(seed)
    found = [
        start(draw, model, init, warmup, precision)
        for model, inits in INITS.items()
        for init in inits
        for warmup in WARMUPS
        for precision in (*("fp32", "bf16") * REPEATS[model], "fp16")
    ]
    draw.shuffle(found)
    yield from found


def start(draw: random.Random, model: str, init: str, warmup: str, precision: str) -> tuple[str, ...]:
    """Returns the overrides of one start."""
    shape = SHAPES[model][0] if precision == "fp16" else draw.choice(SHAPES[model])
    if model == "gpt":
        blocks, width, tokens, samples = shape
        size = (
            *("model=gpt_nano", f"model.n_layer={blocks}", f"model.n_embd={width}", f"model.n_head={width // 8}"),
            f"data.block_size={tokens}",
        )
    else:
        depth, samples = shape
        size = ("experiment=resnet_digits", draw.choice((*["model=resnet20"] * 4, "model=nf_resnet20")))
        size = (*size, f"model.depth={depth}")
    optimizer, lr = draw.choice(OPTIMIZERS[model]).split()
    length = () if warmup == "none" else (f"warmup.steps={draw.choice((5, 20, 60, 200))}",)
    return (
        *(*size, f"batch_size={samples}", f"init={init}", f"warmup={warmup}", *length, f"precision={precision}"),
        *(f"optimizer={optimizer}", f"optimizer.lr={lr}", f"clipping={draw.choice(CLIPPINGS)}"),
        *(f"seed={draw.randrange(1000)}", draw.choice(EXTRAS[model])),
    )


class Start:
    """Executes the first steps of a run one at a time, and can repeat them with a fault."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        with composed(*ALONE, *overrides) as cfg, silence():
            self.job: TrainingRun = build(cfg, folder)
        self.model = "resnet" if "experiment=resnet_digits" in overrides else "gpt"

    def step(self, fault: Poison | StepFault | None = None) -> Reading:
        """Executes the next step, with a fault if it is planned for this step."""
        state, tools = self.job.state, self.job.tools
        batch, undo = self.job.data.load(state.step), []
        if isinstance(fault, Poison) and fault.happens_here(state.step):
            batch = fault.corrupt(batch, state.step, SimpleNamespace(num_classes=CLASSES[self.model]))
        elif isinstance(fault, StepFault) and fault.happens_here(state.step):
            undo = fault.inject(state, tools.precision)
        reading = train_step(state, batch.to(self.job.device).split(1), tools)
        for each in undo:
            each()
        return reading

    def with_faults(self) -> dict[str, list[list[float]]]:
        """Returns the values of the next steps with each fault, and restores the state after each."""
        state, found = self.job.state, {}
        parts = {"precision": self.job.tools.precision, "clipping": self.job.tools.clipping}
        before = Snapshots()
        before.take(state.step, capture(state, parts), state)
        for name, kind in FAULTS.items():
            if name in IMAGES_ONLY and self.model == "gpt":
                continue
            fault = kind([state.step])
            after = isinstance(fault, LearningRate)  # the step with the wrong rate is normal; the next one is damaged
            with silence():  # faults print what they do
                found[name] = [values(self.step(fault)) for _ in range(WITHIN + after)]
            restore(before.newest(state.step), state, parts)
        return found

    def close(self) -> None:
        """Ends the run."""
        self.job.data.batches.close()
        self.job.output.tracker.close(0)


def values(reading: Reading) -> list[float]:
    """Returns loss, gradient norm and largest input; empty for an overflow of fp16, which the guard does not judge."""
    return [] if reading.overflow else [reading.loss, reading.grad_norm, reading.inputs]


def recorded(overrides: Sequence[str], seed: int) -> dict[str, Any]:
    """Returns the series of a clean start, and the series of each fault at one of its steps."""
    at = random.Random(seed).randint(2, 60)
    with tempfile.TemporaryDirectory() as folder:
        run = Start(Path(folder) / "run", overrides)
        series, faulty = [], {}
        while run.job.state.step < STEPS:
            if run.job.state.step == at - 1 and "precision=fp16" not in overrides:
                faulty = run.with_faults()
            series.append(values(run.step()))
        run.close()
    return {"overrides": list(overrides), "series": series, "at": at, "faults": faulty}


# ---- judging


class Judge:
    """The default guard's limits of loss, gradient norm and inputs.

    Args:
        fixed: use fixed multiples of the first values, as earlier versions did.
    """

    def __init__(self, fixed: bool) -> None:
        terms = [replace(each, prior=math.inf) if fixed else each for each in (LOSS, NORM, INPUTS)]
        self._limits = [Limit(6.0, 128, each) for each in terms]
        self.applied = 0

    def skips(self, reading: Sequence[float]) -> bool:
        """Judges a step; returns whether it is skipped. A step without values (an overflow) is not judged."""
        if not reading:
            return False
        within = all(value <= limit.value for value, limit in zip(reading, self._limits, strict=True))
        if within:
            self.applied += 1
            for value, limit in zip(reading, self._limits, strict=True):
                limit.add(value)
        return not within


def false_skips(start: dict[str, Any], fixed: bool) -> int:
    """Returns how many steps of a clean start are skipped while the window is cold."""
    judge = Judge(fixed)
    return sum(judge.skips(reading) for reading in start["series"] if judge.applied < 64)


def caught(start: dict[str, Any], fault: str, fixed: bool) -> bool:
    """Returns whether a step of a fault is skipped."""
    judge = Judge(fixed)
    for reading in start["series"][: start["at"] - 1]:
        judge.skips(reading)
    return any(judge.skips(reading) for reading in start["faults"][fault])


def clear(start: dict[str, Any], fault: str) -> bool:
    """Returns whether a fault makes the loss non-finite, or at least twice the median of the 5 losses before it."""
    before = [reading[0] for reading in start["series"][: start["at"] - 1] if reading][-5:]
    return any(not reading[0] < 2 * median(before) for reading in start["faults"][fault] if reading)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Context that suppresses stdout and stderr."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def share(found: Iterable[bool]) -> str:
    """Formats the share of True values in percent."""
    found = list(found)
    return f"{100 * sum(found) / len(found):.0f} %" if found else "-"


def report(starts: Sequence[dict[str, Any]]) -> None:
    """Prints both tables."""
    columns = ("clean starts", "number", "with a skip, fixed multiples", "with a skip, now", "with a skip only now")
    rows: list[tuple[object, ...]] = []
    halves = {"the rule was chosen on": starts[:CHOSEN_ON], "not seen before": starts[CHOSEN_ON:]}
    for name, some in halves.items():
        before, now = ([false_skips(each, fixed) > 0 for each in some] for fixed in (True, False))
        rows.append((name, len(some), sum(before), sum(now), sum(b < n for b, n in zip(before, now, strict=True))))
    print(table(columns, [[*map(str, cells)] for cells in rows]) + "\n")
    columns = ("fault", "tried", "fixed multiples", "now", "at steps 2-15", "16-30", "31-60")
    columns, rows = (*columns, "that doubles the loss", "fixed multiples", "now"), []
    for name in (*FAULTS, "all"):
        tried = [(each, fault) for each in starts for fault in each["faults"] if name in (fault, "all")]
        now = [(each["at"], caught(each, fault, False), clear(each, fault)) for each, fault in tried]
        fixed = [caught(each, fault, True) for each, fault in tried]
        spans = [share(hit for at, hit, _ in now if low <= at <= high) for low, high in ((2, 15), (16, 30), (31, 60))]
        doubled = [number for number, (_, _, is_clear) in enumerate(now) if is_clear]
        shares = (share(fixed), share(hit for _, hit, _ in now), *spans)
        of_doubled = (share(fixed[number] for number in doubled), share(now[number][1] for number in doubled))
        rows.append((name, len(tried), *shares, len(doubled), *of_doubled))
    print(table(columns, [[*map(str, cells)] for cells in rows]))


def main() -> None:
    """Records the starts, or reads them, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the series to")
    parser.add_argument("--replay", type=Path, help="file whose series to judge, without training")
    parser.add_argument("--starts", type=int, help="number of starts (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.replay:
        found = json.loads(asked.replay.read_text())
    else:
        found = [recorded(each, number) for number, each in enumerate(islice(starts(asked.seed), asked.starts))]
    if asked.json:
        asked.json.write_text(json.dumps(found))
    report(found)


if __name__ == "__main__":
    main()
