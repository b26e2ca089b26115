"""Investigates a held step of a user's loop and writes its folder, on one rank or several."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.distributed_handler import for_all_ranks
from stabletrain.forensics.handler import IncidentHandler, IncidentSummary, NoIncidentHandler
from stabletrain.forensics.investigate import IncidentRequest
from stabletrain.forensics.probes.samples import describe
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.guard.rerun import Rerun
from stabletrain.guard.samples import bad_samples
from stabletrain.guard.subject import LoopSubject
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.whole import WholeState
from stabletrain.tracking.tracker import NoTracker

MAX_ERRORS = 3
"""Maximum number of errors of closures that are explained."""


class Incidents:
    """The incidents of a loop.

    Args:
        folder: receives a folder for each incident.
        max_incidents, max_seconds: budget, as in `forensics/handler.py`; 0 incidents investigates none.
        ranks: this process among those that train together.
        tracker: receives lines.
        keep_state: whether weights are saved with an incident that can be replayed from its folder.

    Attributes:
        handler: investigates, and holds the incidents found.
        newest: the result of the last investigation; None if it found nothing, or the budget is spent.
    """

    def __init__(
        self,
        folder: Path,
        max_incidents: int,
        max_seconds: float,
        *,
        ranks: Ranks,
        tracker: NoTracker,
        keep_state: bool = True,
    ) -> None:
        own = IncidentHandler(max_incidents, max_seconds) if max_incidents else NoIncidentHandler()
        self.handler, self.keep_state = for_all_ranks(own, ranks), keep_state
        self.newest: IncidentSummary | None = None
        self._folder, self._ranks, self._tracker = folder, ranks, tracker
        self._left = MAX_ERRORS if max_incidents else 0  # errors that may still be explained

    def investigate(
        self, subject: LoopSubject, request: IncidentRequest, setting: RunSettings
    ) -> IncidentSummary | None:
        """Investigates a step; see `IncidentHandler.handle`."""
        self.handler.open(self._folder, setting, shared=True)
        self.newest = None
        self.newest = self.handler.handle(request, lambda: subject, WholeState(subject.rerun.model, subject.older))
        return self.newest

    def explain_error(self, error: Exception, rerun: Rerun) -> None:
        """Logs where values were first not finite before a closure raised an error: its batch, or an operation."""
        # On several ranks the others are not here.
        if not self._left or self._ranks.distributed or isinstance(error, torch.OutOfMemoryError):
            return
        self._left -= 1
        bad: list[dict[str, Any]] = []
        tracing = Trace(rerun.model)
        with contextlib.suppress(Exception):  # a batch that cannot be read must not hide the user's error
            bad = bad_samples(rerun.begun.micro_batches, ())
            if not bad:
                rerun.run(backward=False, watched_by=tracing)
        if bad:
            self._tracker.note(f"before this {type(error).__name__}, {describe(bad)}")
        if not tracing.accidents:
            return
        first = tracing.accidents[0]
        why = first.finding.reason if first.finding is not None else "its result is not finite"
        self._tracker.note(
            f"before this {type(error).__name__}, {first.op} in {first.module or 'the model'} gave NaN or Inf: {why}"
        )
        caller = f", called from {first.called_from}" if first.called_from else ""
        self._tracker.note(f"at: {first.source}{caller}")


def settings(name: str, groups: Sequence[dict], *, clips: bool, best_loss: float) -> RunSettings:
    """Returns the known settings of a loop.

    Args:
        name: of the number format; empty if unknown.
        groups: the first parameter group of each optimizer. Where they differ, only the learning rates are known, as a
            list.
        clips: whether the guard clips.
        best_loss: smallest loss of the applied steps.
    """
    keys: Sequence[str] = ("lr", "weight_decay", "betas", "eps")
    told = [{f"optimizer.{key}": plain_number(group[key]) for key in keys if key in group} for group in groups]
    values = {key: value for key, value in told[0].items() if all(each.get(key) == value for each in told)}
    if "optimizer.lr" not in values and all("optimizer.lr" in each for each in told):
        values["optimizer.lr"] = [each["optimizer.lr"] for each in told]
    return RunSettings(
        choices={"clipping": "zclip" if clips else "none"} | ({"precision": name} if name else {}),
        values=values | ({"precision.min_scale": 1.0} if name == "fp16" else {}),
        deterministic=False,  # a closure may depend on anything
        best_loss=best_loss,
    )


def plain_number(value: object) -> object:
    """Returns a number for a tensor, and a list for a tuple."""
    if isinstance(value, tuple):
        return [plain_number(each) for each in value]
    return value.item() if hasattr(value, "item") else value  # ty: ignore[not-callable]
