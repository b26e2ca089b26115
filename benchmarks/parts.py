"""The shares of a step's time: data, forward, backward, optimizer, guard, tracking.

Executes the loop's own rounds with time marks between the parts: CUDA events on a GPU, which do not synchronize; the
clock on a CPU. Forward lasts from the model's call to the start of backward, so it includes the loss, and for a loss in
chunks the head's own backward pass. `guard` is everything that is in no other part: seeding, buffer copies, batch
checks, norms, gate, clipping, snapshots.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from jobs import Rounds
from measuring import time_updates

from stabletrain.records import Batch
from stabletrain.trainer.reports import NOTHING
from stabletrain.trainer.run import TrainingRun

PARTS = ("data", "forward", "backward", "optimizer", "guard", "tracking")


class Parted(Rounds):
    """Rounds that record, during `shares`, when each of their parts begins."""

    def __init__(self, job: TrainingRun) -> None:
        self._marks: list[tuple[str, Any]] | None = None
        super().__init__(job)
        model, optimizer = job.state.model, job.state.optimizer
        forward = model._compiled_call_impl or model._call_impl  # what a call runs; `compile()` also sets it
        model._compiled_call_impl = self._begins("forward", forward)  # ty: ignore[invalid-assignment]
        time_updates(optimizer, partial(self.mark, "optimizer"), partial(self.mark, "guard"))

    def mark(self, part: str) -> None:
        """Ends the current part and begins `part`."""
        if self._marks is None:
            return
        if self.job.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def fetch(self) -> tuple[Batch, list[Batch]]:
        self.mark("data")
        found = super().fetch()
        self.mark("guard")
        return found

    def judge(self, seen: Mapping[str, float] = NOTHING) -> bool:
        self.mark("tracking")
        judged = super().judge(seen)
        self.mark("guard")
        return judged

    def shares(self, rounds: int) -> dict[str, float]:
        """Returns each part's median share of a round's time."""
        noted: list[list[tuple[str, Any]]] = []
        backward = self._begins("backward", torch.autograd.backward, then="guard")
        with mock.patch.object(torch.autograd, "backward", backward):
            for _ in range(rounds):
                self._marks = []
                self()
                self.mark("end")
                noted.append(self._marks)
        self._marks = None
        if self.job.device.type == "cuda":
            torch.cuda.synchronize(self.job.device)
        found: dict[str, list[float]] = {part: [] for part in PARTS}
        for marks in noted:
            taken: dict[str, float] = defaultdict(float)
            for (part, start), (_, end) in itertools.pairwise(marks):
                taken[part] += end - start if isinstance(start, float) else start.elapsed_time(end)
            for part in PARTS:
                found[part].append(taken[part] / sum(taken.values()))
        return {part: statistics.median(shares) for part, shares in found.items()}

    def _begins(self, part: str, call: Callable[..., Any], then: str | None = None) -> Callable[..., Any]:
        """Returns `call` with a mark before it, and a mark `then` after it if given."""

        def marked(*args: Any, **named: Any) -> Any:
            self.mark(part)
            found = call(*args, **named)
            if then:
                self.mark(then)
            return found

        return marked

    def look(self) -> bool:
        self.mark("tracking")
        marks, self._marks = self._marks, None  # the monitors run the model too, which must not count as forward
        watching = super().look()
        self._marks = marks
        self.mark("guard")
        return watching
