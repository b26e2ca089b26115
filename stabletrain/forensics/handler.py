"""Incident handlers: investigate incidents, write their folders and return the lines to show.

`IncidentHandler` investigates the first incidents of a run, each within a time budget. The same cause at the same
operation is written only once. `distributed_handler.py` does this on several ranks.
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stabletrain.checkpoint.tree import Tree
from stabletrain.errors import ConfigError
from stabletrain.forensics.agreement import NotInvestigated, Requests, one_line_of
from stabletrain.forensics.diagnosis.cause_table import CAUSES, Diagnosis
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.incident import Execution, file_incident, remove_unfinished
from stabletrain.forensics.incident_list import ORIGIN_KEYS, filed_incidents
from stabletrain.forensics.investigate import Findings, IncidentRequest, investigate
from stabletrain.forensics.subject import Subject
from stabletrain.parallel.whole import WholeState
from stabletrain.tracking.metrics import plain

ATTEMPTS = 3
"""Maximum number of investigations, in multiples of `max_incidents`: finding a known mistake again costs time too."""


@dataclass(frozen=True)
class IncidentSummary:
    """An incident that was investigated; `cause`, `verdict` and `fix` are as in `Diagnosis`.

    Attributes:
        path: the incident's folder; None if it could not be written.
        lines: three lines to show: what happened, the best fix, and where the details are.
        mistake: identifies the mistake; see `mistake_key`.
        known: whether this mistake is filed already, so that there is nothing to show.
    """

    path: Path | None
    cause: str
    verdict: str
    fix: Sequence[str]
    lines: list[str]
    mistake: tuple[str, ...] = ()
    known: bool = False


class NoIncidentHandler:
    """Investigates nothing.

    Attributes:
        newest: the guard's kind (`spike` ...) of the newest skipped step that was investigated; set by the caller.
        found: the incidents of this process, oldest first.
    """

    newest = ""

    def __init__(self) -> None:
        self.found: list[IncidentSummary] = []

    def open(self, folder: Path, setting: RunSettings, *, shared: bool = False) -> None:
        """Does nothing."""

    def handle(
        self, request: IncidentRequest, make_subject: Callable[[], Subject], states: WholeState
    ) -> IncidentSummary | None:
        """Returns None."""
        return None


class IncidentHandler(NoIncidentHandler):
    """Investigates the first incidents of a run.

    A mistake in the code or the configuration recurs after every rollback. It is written once and then only
    counted, which leaves room for other incidents.

    Attributes:
        max_incidents: maximum number of incident folders, including those that exist already.
        max_seconds: approximate time limit for each; checks that have not begun by then are left out.
        keep_state: whether weights and batch are saved with each, for `stabletrain replay`.
        recurrences: how often each known mistake was found again, by cause, module, operation, direction and line.

    Raises:
        ConfigError: a limit is not positive.
    """

    def __init__(self, max_incidents: int = 10, max_seconds: float = 120.0, keep_state: bool = True) -> None:
        if max_incidents < 1:
            raise ConfigError(
                f"forensics.max_incidents={max_incidents} is below 1: use forensics=off to investigate none"
            )
        if not max_seconds > 0:
            raise ConfigError(f"forensics.max_seconds={max_seconds} is not above 0: use for example 120")
        super().__init__()
        self.max_incidents, self.max_seconds, self.keep_state = max_incidents, max_seconds, keep_state
        self.recurrences: Counter[tuple[str, ...]] = Counter()
        self._filed: set[tuple[str, ...]] = set()
        self._investigations = 0
        self._folder: Path | None = None
        self._setting, self._settings, self._shared = RunSettings(), "", False

    def open(self, folder: Path, setting: RunSettings, *, shared: bool = False) -> None:
        """Sets the folder for incidents, and the run's settings, which decide which fixes apply.

        A resumed run counts the incidents that an earlier process filed with the same settings as its own.

        Args:
            shared: whether other processes use the folder too; then only incidents of this process count.
        """
        self._folder, self._setting, self._shared = folder, setting, shared
        if shared:
            return
        self._settings = settings_hash(setting)
        remove_unfinished(folder)
        mistakes = {mistake_key(record["cause"], record.get("origin")) for _, record in self._earlier()}
        self._filed |= {mistake for mistake in mistakes if not may_recur(mistake)}

    def handle(
        self, request: IncidentRequest, make_subject: Callable[[], Subject], states: WholeState
    ) -> IncidentSummary | None:
        """Explains a step and writes its folder.

        Returns None if the budget is spent, or if the alarm was false. If the run was killed and executes the same step
        again, returns the incident that is filed already.

        Args:
            make_subject: collects what running the step again needs, with the model in training.
            states: the whole weights to run it with.

        Raises:
            NotInvestigated: an error prevents it. Nothing else is raised: explaining a step must not end the run.
        """
        try:
            # A resumed run repeats the steps after its checkpoint: show the known incident again, write no second one.
            if (filed := self.filed_at(request.tick)) is not None:
                return filed
            if not self.has_budget():
                return None
            self.count()  # count it first: a failed investigation costs time too
            # Everything that a replay needs. Check the memory before anything is allocated or gathered: FSDP shards the
            # model with one rank, too.
            subject = make_subject()
            states.check()
            states.prepare()

            def older() -> Tree | None:
                states.prepare_older()
                return states.gather_older()

            # The time limit begins after the weights are gathered: that takes long, and is no part of the diagnosis.
            subject.begin(states.gather(), older, self.deadline(), Requests())
            found = self.investigate(subject, request)
            return None if found is None else self.noted(self.write_incident(subject, found, tick=request.tick))
        except Exception as error:
            raise NotInvestigated(one_line_of(error)) from error

    def noted(self, summary: IncidentSummary | None) -> IncidentSummary | None:
        """Adds an incident to those of this process, unless it is known; returns it.

        On several ranks each notes it, so that every rank knows a mistake that another one has filed.
        """
        if summary is not None and not summary.known:
            self.found.append(summary)
            if summary.path is not None and not may_recur(summary.mistake):
                self._filed.add(summary.mistake)
        return summary

    def filed_at(self, tick: int | None) -> IncidentSummary | None:
        """Returns the incident that was filed for the step executed at `tick`; None if there is none."""
        for path, record in self._earlier() if tick is not None else ():
            if record.get("tick") == tick:
                about = Diagnosis(record["cause"], record["confidence"], record["verdict"], record["fix"], [])
                where, mistake = f"{path} (filed already)", mistake_key(about.cause, record.get("origin"))
                return summary(path, where, record["step"], record["rank"], about, mistake)
        return None

    def _earlier(self) -> list[tuple[Path, dict[str, Any]]]:
        """Returns the incidents in the folder that were filed with the present settings."""
        records = [] if self._folder is None else filed_incidents(self._folder)
        return [(path, record) for path, record in records if record.get("settings") == self._settings]

    def has_budget(self) -> bool:
        """Whether another incident may be investigated."""
        if self._folder is None or self._investigations >= ATTEMPTS * self.max_incidents:
            return False
        filed = self.found if self._shared else list(self._folder.glob("step-*"))
        return len(filed) < self.max_incidents

    def count(self) -> None:
        """Counts an investigation that begins."""
        self._investigations += 1

    def deadline(self, longest: float = math.inf) -> float:
        """The deadline of an investigation that begins now and may take `longest` seconds."""
        return time.monotonic() + min(self.max_seconds, longest)

    def investigate(self, subject: Subject, request: IncidentRequest) -> Findings | None:
        """Returns the findings; None if the alarm was false."""
        # The guard's limits decide whether a finite replay counts as normal.
        setting = replace(self._setting, loss_limit=request.limits[0], norm_limit=request.limits[1])
        found = investigate(subject, request, setting)
        small = found.evidence.underflow
        return None if request.kind == "loss_scale" and (small is None or not small.real) else found

    def write_incident(
        self, subject: Subject, found: Findings, rank: int | None = None, tick: int | None = None
    ) -> IncidentSummary:
        """Writes the folder, unless the mistake is known already, and returns the summary.

        Args:
            subject, found: the step and the findings.
            rank: the rank at fault; None for one process, or if no rank is known to be.
            tick: see `IncidentRequest`.
        """
        about, origin = found.diagnosis, found.evidence.origin
        mistake = mistake_key(about.cause, None if origin is None else origin.as_dict())
        if mistake in self._filed:
            self.recurrences[mistake] += 1
            return IncidentSummary(None, about.cause, about.verdict, about.fix, [], mistake, known=True)
        assert self._folder is not None, "open(folder, setting) comes first"
        assert subject.reading is not None
        path: Path | None = None
        execution = Execution(tick, self._settings)
        try:
            path = file_incident(
                self._folder, subject, found, rank=rank, keep_state=self.keep_state, execution=execution
            )
        except OSError as error:  # a full disk must neither end the run nor hide the cause
            where = f"its folder could not be written ({error.strerror or error})"
        else:
            where = str(path)
        return summary(path, where, subject.reading.step, rank, about, mistake)


def summary(
    path: Path | None, where: str, step: int, rank: int | None, about: Diagnosis, mistake: tuple[str, ...]
) -> IncidentSummary:
    """Returns the summary of an incident; `where` says where its details are."""
    of_rank = "" if rank is None else f", rank {rank}"
    lines = [
        f"step {step}{of_rank}: {about.cause} ({about.confidence:.0%} sure): {about.verdict}",
        f"fix: {about.fix[0] if about.fix else 'none known'}",
        f"details: {where}",
    ]
    return IncidentSummary(path, about.cause, about.verdict, about.fix, lines, mistake)


def settings_hash(setting: RunSettings) -> str:
    """Returns a hash of a run's settings, which is the same in the run that `resume` continues."""
    values = {key: value for key, value in setting.values.items() if key != "resume"}
    return hashlib.sha256(json.dumps(plain(values), sort_keys=True).encode()).hexdigest()[:16]


def mistake_key(cause: str, origin: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Identifies a mistake: the cause, and the operation if there is one, as in a `diagnosis.json`."""
    return (cause, *(() if origin is None else (origin[key] for key in ORIGIN_KEYS)))


def may_recur(mistake: tuple[str, ...]) -> bool:
    """Whether a mistake may happen again on its own, such as bad data, so that each is filed."""
    return mistake[0] not in CAUSES or CAUSES[mistake[0]].accident
