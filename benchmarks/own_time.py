"""What the guard costs, as its own time over a step's: for costs that paired whole steps are too noisy to show.

    OMP_NUM_THREADS=1 python benchmarks/own_time.py --precision fp32,bf16 --rounds 100
    OMP_NUM_THREADS=1 python benchmarks/own_time.py --clock cpu                     on a machine shared with others

The difference between two bare loops is about 1.5 % on a shared machine, more than a guarded step adds. So the parts of
each step are timed: forward, backward, the optimizer, and the rest. The rest of a guarded step is the loss and what
this project does beyond training: seeding, buffer copies, batch checks, norms, gate, clipping, logging, and in its
rounds monitors' inspections and snapshots. A bare loop's rest is its loss, schedule, `zero_grad` and clipping.

    own time = rest of the defaults - rest of a bare loop          own over step = 1 + own time / bare step

Means over all rounds, so rare events count. Loading a batch is not part of either. Beside it stand the paired ratio of
whole steps, and that of a second bare loop: the resolution of the paired ratio.
"""

import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from bare import BareLoop
from jobs import SIZES, Rounds
from measuring import command_line, head, in_turns, machine, modes, quartiles, ratios, row, save, silence, time_updates
from overhead import bare_of, optimizer_of, started
from targets import judged
from torch import nn
from torch.optim import Optimizer

from stabletrain.machine import hardware

PARTS = ("forward", "backward", "optimizer", "data")


class Parts:
    """Times the parts of a loop's steps; `rest` is what lies outside of them.

    Args:
        model, optimizer: of the loop; its step calls each of them.
        clock: seconds, `time.perf_counter` or `time.process_time`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, clock: Callable[[], float]) -> None:
        self._clock, self._part, self._since = clock, "", 0.0
        self.seconds: dict[str, float] = {}
        forward = model._compiled_call_impl or model._call_impl

        def called(*args: Any, **named: Any) -> Any:
            self.begin("forward")
            logits = forward(*args, **named)
            self.begin("rest")
            return logits

        model._compiled_call_impl = called  # ty: ignore[invalid-assignment]
        time_updates(optimizer, partial(self.begin, "optimizer"), partial(self.begin, "rest"))

    def begin(self, part: str) -> None:
        """Ends the present part and begins another; does nothing outside of `timed`."""
        if self._part:
            now = self._clock()
            self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._since
            self._part, self._since = part, now

    @contextmanager
    def timed(self) -> Generator[None]:
        """A context around one step; afterwards `seconds` holds that of each part."""
        backward = torch.autograd.backward

        def differentiate(*args: Any, **named: Any) -> None:
            self.begin("backward")
            backward(*args, **named)
            self.begin("rest")

        self.seconds, self._part, self._since = {}, "rest", self._clock()
        with mock.patch.object(torch.autograd, "backward", differentiate):
            yield
        self.begin("")
        self._part = ""


class Guarded(Rounds):
    """Rounds whose loading of a batch is a part of its own."""

    parts: Parts | None = None

    def fetch(self) -> Any:
        """Returns the next batch."""
        if self.parts is not None:
            self.parts.begin("data")
        found = super().fetch()
        if self.parts is not None:
            self.parts.begin("rest")
        return found

    def look(self) -> bool:
        """Runs the monitors' first half if they are due: all of it is the guard's own time."""
        parts, self.parts = self.parts, None
        if parts is None:
            return super().look()
        with mock.patch.object(parts, "begin"):  # the monitors run the model too
            watching = super().look()
        self.parts = parts
        return watching


def measured(folder: Path, overrides: tuple[str, ...], rounds: int, kind: str, *, bf16: bool) -> dict[str, Any]:
    """Measures one model; returns the seconds of each part, kind and round."""
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[kind]
    with mock.patch("overhead.Rounds", Guarded):
        run = started(folder, overrides, ("defaults",))["defaults"]
    run.parts = Parts(run.job.state.model, run.job.state.optimizer, clock)
    loops = {name: bare_of(run, optimizer_of(overrides), bf16=bf16) for name in ("bare", "bare again")}
    kinds: dict[str, tuple[BareLoop | Rounds, Parts]] = {"defaults": (run, run.parts)}
    for name, loop in loops.items():
        loop.model._compiled_call_impl = None  # the copied model would mark the run's parts
        kinds[name] = loop, Parts(loop.model, loop.optimizer, clock)
    rest: dict[str, list[float]] = {name: [] for name in kinds}

    def turn(name: str, number: int) -> float:
        step, parts = kinds[name]
        with parts.timed():
            step()
        if number >= 0:
            rest[name].append(parts.seconds["rest"])
        return sum(seconds for part, seconds in parts.seconds.items() if part != "data")

    taken = in_turns({name: lambda number, name=name: turn(name, number) for name in kinds}, rounds)
    done = dict(run.done)
    run.close()
    return {"rest": rest, "seconds": taken, "done": done}


def main() -> None:
    """Measures a GPT and a ResNet, and prints one row for each and precision."""
    parser = command_line(__doc__, 100)
    parser.add_argument("--only", default="", help="measure only models whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="tiny models, only to check that it runs")
    asked = parser.parse_args()
    device = hardware.choose_device("cpu")
    print(f"{machine(device)}, {asked.clock} time, {asked.rounds} rounds")
    print(head("model", "bare step", "rest", "bare's rest", "own over step", "paired", "quartiles", "bare again"))
    results, values = [], {}
    for name, overrides in SIZES["tiny" if asked.tiny else "cpu"].items():
        for mode in modes(asked.precision, device) if asked.only in name else ():
            chosen = (*overrides, "device=cpu", f"precision={mode}", "compile=false")
            with tempfile.TemporaryDirectory() as folder, silence():
                found = measured(Path(folder), chosen, asked.rounds, asked.clock, bf16=mode == "bf16")
            step = mean(found["seconds"]["bare"])
            ours, bare = (mean(found["rest"][kind]) for kind in ("defaults", "bare"))
            own = 1 + (ours - bare) / step
            middle, low, high = quartiles(ratios(found["seconds"]["defaults"], found["seconds"]["bare"]))
            again = quartiles(ratios(found["seconds"]["bare again"], found["seconds"]["bare"]))[0]
            cells = (f"{1e3 * step:.1f} ms", f"{1e3 * ours:.2f} ms", f"{1e3 * bare:.2f} ms", f"**{own:.4f}**")
            cells += (f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{again:.3f}")
            print(row(f"{name}, {mode}", *cells), flush=True)
            results.append({"model": name, "precision": mode, "own": own, "paired": middle, "again": again, **found})
            key = "overhead/own_resnet" if "ResNet" in name else "overhead/own_gpt"
            values[key] = max(own, values.get(key, 0.0))
    print("\n" + judged(values, device, "overhead/own"))
    save(asked.json, device, results, values)


if __name__ == "__main__":
    main()
