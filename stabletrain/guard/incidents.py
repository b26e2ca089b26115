"""Investigates a withheld step of a user's loop and writes its folder, on one rank or several."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from stabletrain.forensics.agreement import NotInvestigated, one_line_of
from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.causes import unknown
from stabletrain.forensics.diagnosis.evidence import Evidence, RunSettings
from stabletrain.forensics.distributed_handler import main_has_budget, write_together
from stabletrain.forensics.handler import ATTEMPTS, IncidentHandler, IncidentSummary, NoIncidentHandler
from stabletrain.forensics.investigate import Findings, IncidentRequest
from stabletrain.forensics.subject import Subject
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.guard.rerun import Rerun
from stabletrain.guard.subject import LoopSubject
from stabletrain.parallel.ranks import Ranks, timeout
from stabletrain.tracking.tracker import NoTracker

MAX_ERRORS = 3
"""Maximum number of errors of closures that are explained."""

IN_CODE = {
    "optimizer.lr=": "lower the learning rate to {}",
    "optimizer.weight_decay=": "lower the weight decay to {}",
    "optimizer.eps=": "eps={} in the optimizer, so that no denominator is 0",
    "optimizer.betas=": "betas={}, so that the second moment follows faster",
    "optimizer=stable_adamw": "use StableAdamW, which shortens updates when the second moment lags",
    "precision=bf16": "use bf16 in place of fp16: torch.autocast(dtype=torch.bfloat16), or Guard(precision='bf16')",
    "precision=fp32": "train in fp32, without autocast",
    "precision.fp32_modules=": "run {} in fp32: torch.autocast(enabled=False), and inputs cast with .float()",
    "precision.init_scale=": "a larger loss scale: {}",
    "precision.growth_interval=": "a loss scale that grows sooner: growth_interval={}",
    "qknorm=": "normalise queries and keys before their product (QK-norm)",
    "qkclip=": "bound attention logits (QK-clip)",
    "softcap=": "cap the logits: cap * tanh(logits / cap)",
    "zloss=": "add a z-loss: 1e-4 * logsumexp(logits) ** 2",
    "init.std=": "smaller initial weights: std {}",
    "init=": "smaller initial weights",
    "warmup.steps=": "a longer warmup: {} steps",
    "clipping=": "clip gradients: Guard(max_norm=1.0)",
    "guard=rollback": "keep snapshots to go back to: Guard(rollback=True)",
    "resume=": "go back to the last good checkpoint; Guard(rollback=True) keeps snapshots to go back to by itself",
}
"""What an override of `train.py` means in a loop of the user's own; `{}` is its value."""


def in_code(fix: str) -> str:
    """Returns a fix in words that hold in any training loop."""
    for begins, words in IN_CODE.items():
        if fix.startswith(begins):
            return words.format(fix.partition("=")[2].strip("[]"))
    return fix


def for_any_loop(diagnosis: Diagnosis) -> Diagnosis:
    """Returns a diagnosis whose fixes hold in any training loop."""
    fix = [*dict.fromkeys(in_code(each) for each in diagnosis.fix)]
    if diagnosis.cause == "hardware_fault":
        fix.insert(0, "check that the closure depends on its batch and on PyTorch's generators only")
    return replace(diagnosis, fix=fix, also=[for_any_loop(one) for one in diagnosis.also])


def unknown_beyond_forward(evidence: Evidence) -> Diagnosis:
    """Returns the diagnosis of a step if only its forward pass could run again, and that showed nothing."""
    found = unknown(evidence)
    if evidence.kind != "nonfinite" or not math.isfinite(evidence.reading.buffers):
        return found
    verdict = f"{found.verdict}: not in the forward pass, so in the loop's loss or in the backward pass"
    fix = "look at the loop's loss; with guard.step or guard.record, the operation is named"
    return replace(found, verdict=verdict, fix=[fix])


class LoopHandler(IncidentHandler):
    """An incident handler whose fixes hold in any training loop.

    Args:
        filed: the incidents of this process. Folders of earlier ones do not count against the budget.
    """

    def __init__(self, max_incidents: int, max_seconds: float, filed: Sequence[IncidentSummary]) -> None:
        super().__init__(max_incidents, max_seconds)
        self._of_process = filed

    def open(self, folder: Path, setting: RunSettings) -> None:
        """Sets the folder for incidents, which other processes may use too, and the settings."""
        self._folder, self._setting = folder, setting

    def has_budget(self) -> bool:
        """Whether another incident may be investigated."""
        return self._investigations < ATTEMPTS * self.max_incidents and len(self._of_process) < self.max_incidents

    def investigate(self, subject: Subject, request: IncidentRequest) -> Findings | None:
        """Returns the findings; None if the alarm was false."""
        found = super().investigate(subject, request)
        if found is None:
            return None
        gap = subject.gap if isinstance(subject, LoopSubject) and request.kind != "update" else ""
        if gap:  # the closures take no part in an update
            evidence = found.evidence
            if evidence.origin is None and not evidence.samples and not evidence.damage:
                # Nothing was measured that could tell the cause.
                found = replace(found, diagnosis=unknown_beyond_forward(evidence))
            found = replace(found, failures=[gap, *found.failures])
        return replace(found, diagnosis=for_any_loop(found.diagnosis))


class Incidents(NoIncidentHandler):
    """Investigates a loop's withheld steps.

    Args:
        folder: receives a folder for each incident.
        max_incidents, max_seconds: budget, as in `forensics/handler.py`; 0 incidents investigates none.
        ranks: this process among those that train together.

    Attributes:
        found: summaries of the incidents, oldest first.
        newest: the policy's kind of the newest held step that was investigated.
        keep_state: whether weights are saved with an incident that can be replayed from its folder.
    """

    def __init__(
        self,
        folder: Path,
        max_incidents: int,
        max_seconds: float,
        ranks: Ranks,
        tracker: NoTracker,
        keep_state: bool = True,
    ) -> None:
        self.newest, self.keep_state, self._tracker = "", keep_state, tracker
        self.found: list[IncidentSummary] = []
        self._folder, self._ranks, self._explained = folder, ranks, 0
        self._handler = LoopHandler(max_incidents, max_seconds, self.found) if max_incidents else None

    def investigate(
        self, subject: LoopSubject, request: IncidentRequest, setting: RunSettings
    ) -> IncidentSummary | None:
        """Investigates a step, and files and shows what is new; returns None if there was no investigation.

        All ranks must call it together.
        """
        if self._handler is None:
            return None
        self._handler.open(self._folder, setting)
        summary = self._handle(self._handler, subject, request)
        if summary is not None and not summary.known:
            self.found.append(summary)
        return summary

    def _handle(self, handler: LoopHandler, subject: LoopSubject, request: IncidentRequest) -> IncidentSummary | None:
        """Investigates on this rank alone, or on all, and has one of them write the folder."""
        several = self._ranks.distributed
        if not (main_has_budget(handler, self._ranks) if several else handler.has_budget()):
            return None
        handler.count()
        # Ranks wait for each other: use at most half of the time that they wait.
        subject.deadline = handler.deadline(timeout().total_seconds() / 2 if several else math.inf)
        found: Findings | None = None
        error: Exception | None = None
        try:
            found = handler.investigate(subject, request)
        except NotInvestigated:
            raise
        except Exception as raised:  # explaining a step must not end the training
            error = raised
        subject.reruns.finish()  # another rank may still need this rank's shards
        if several:
            return write_together(handler, self._ranks.rank, subject, found, error)
        if error is not None:
            raise NotInvestigated(one_line_of(error)) from error
        if found is None:
            return None
        try:
            return handler.write_incident(subject, found)
        except Exception as raised:  # writing its folder must not either: a batch may hold anything
            raise NotInvestigated(one_line_of(raised)) from raised

    def explain_error(self, error: Exception, rerun: Rerun) -> None:
        """Logs where values were first not finite in a closure that raised an error, if any were."""
        if self._handler is None or self._explained >= MAX_ERRORS or isinstance(error, torch.OutOfMemoryError):
            return
        if self._ranks.distributed:  # the others are not here
            return
        self._explained += 1
        tracing = Trace(rerun.model)
        with contextlib.suppress(Exception):
            rerun.run(backward=False, watched_by=tracing)
        if not tracing.accidents:
            return
        first = tracing.accidents[0]
        why = first.finding.reason if first.finding is not None else "its result is not finite"
        self._tracker.note(
            f"before this {type(error).__name__}, {first.op} in {first.module or 'the model'} gave NaN or Inf: {why}"
        )
        self._tracker.note(
            f"at: {first.source}" + (f", called from {first.called_from}" if first.called_from else ""),
        )


def settings(name: str, group: dict, *, clips: bool, best_loss: float) -> RunSettings:
    """Returns the known settings of a loop.

    Args:
        name: of the number format; empty if unknown.
        group: the optimizer's first parameter group.
        clips: whether the guard clips.
        best_loss: smallest loss of the applied steps.
    """
    keys: Sequence[str] = ("lr", "weight_decay", "betas", "eps")
    values = {f"optimizer.{key}": plain_number(group[key]) for key in keys if key in group}
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
