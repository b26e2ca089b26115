"""A held step of a user's loop, as an investigation sees it: its closures run again on the live model."""

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stabletrain.checkpoint.tree import Tree
from stabletrain.forensics.agreement import NotInvestigated, Requests
from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.evidence import Evidence
from stabletrain.forensics.facts import Culprits, LargestInput, Outcome
from stabletrain.forensics.probes.attention_scores import Scores
from stabletrain.forensics.probes.samples import find_by_bisection
from stabletrain.forensics.probes.update import UpdateFault
from stabletrain.forensics.rerun import NotPossible, RerunResult, Watch, is_compiled
from stabletrain.forensics.subject import Subject
from stabletrain.forensics.trace.origin import find_origin
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.guard.checks.recheck import Finding
from stabletrain.guard.in_code import for_any_loop, unknown_beyond_forward, unknown_without_rerun
from stabletrain.guard.micro_batch import MicroBatch
from stabletrain.guard.rerun import Rerun
from stabletrain.guard.samples import (
    NO_BATCH,
    BatchTrials,
    bad_samples,
    empty_batches,
    largest_input,
    place_of,
    with_other_batches,
    without_bad_values,
)
from stabletrain.guard.saved_step import save_loop_step, why_not_replayable
from stabletrain.guard.whole_weights import WholeWeights
from stabletrain.machine.compiling import uncompiled
from stabletrain.records import RankPart, Reading

RERUN = "rerun"
"""The request to run the step again, by the variant, and with or without a backward pass."""

WHOLE_WEIGHTS = "whole weights"
"""The request to gather them."""

CLEANED = "cleaned"
"""Variant: 0 in place of every NaN and Inf of the batch."""


@dataclass
class LoopSubject(Subject):
    """A step of a user's loop.

    Attributes:
        rerun: runs the closures again.
        reading, part, step, changes, recheck: see `Subject`.
        usual: the micro-batches of the last step that was applied; empty before the first.
        older, update: see `Subject`; `update` puts everything back.
        sharded: whether the weights are sharded across ranks.
        deadline: see `Subject`.
        keep_state: whether the weights are saved, if the step can be replayed from its folder.
        frames: `compiled_frames()` when the guard was made.
        gap: why the closures do not compute the loop's own loss; empty if they do.
    """

    rerun: Rerun
    reading: Reading  # ty: ignore[incompatible-mutable-override]  always known here
    step: int
    changes: Sequence[tuple[str, str, str]] = ()
    usual: Sequence[MicroBatch] = ()
    older: Callable[[], Tree | None] = lambda: None
    part: RankPart | None = None
    recheck: Finding | None = None
    update: Callable[[], UpdateFault | None] | None = None
    sharded: bool = False
    deadline: float = math.inf
    keep_state: bool = True
    frames: int = 0
    gap: str = ""
    requests: Requests = field(default_factory=Requests, init=False)
    applied: bool = field(default=False, init=False)
    _nothing_began_here: bool = field(default=False, init=False)
    _whole: WholeWeights = field(init=False)

    def __post_init__(self) -> None:
        self._whole = WholeWeights(self.rerun.model)

    @property
    def model(self) -> nn.Module:  # ty: ignore[incompatible-property-override]  only read
        """The user's model, without wrappers. Raises NotPossible if its weights are sharded."""
        if self.sharded:
            raise NotPossible("the weights are sharded: they were not compared")
        return self.rerun.model

    @property
    def buffers(self) -> list[Tensor]:  # ty: ignore[incompatible-property-override]  only read
        """The buffers' values from before the step."""
        return self.rerun.begun.buffers.tensors()

    def begin(
        self, model: nn.Module | None, older: Callable[[], Tree | None], deadline: float, requests: Requests
    ) -> None:
        """See `Subject`. The closures run on the live model, whatever `model` is."""
        self.older, self.deadline, self.requests = older, deadline, requests

    def serves(self) -> Mapping[str, Callable[..., object]]:
        """See `Subject`: with sharded weights the ranks run the step together, each with its own micro-batches."""
        return {RERUN: self._run_here, WHOLE_WEIGHTS: self._whole.gather}

    def bad_samples(self, classes: int | None) -> list[dict[str, Any]]:
        """See `Subject`."""
        micro_batches = self.rerun.begun.micro_batches
        empty = empty_batches(micro_batches)
        found = empty or bad_samples(micro_batches, self.usual)
        if found and math.isfinite(self.reading.loss + self.reading.grad_norm + self.reading.buffers):
            return []  # the model does not read these values
        if empty:
            return empty
        if not all(each.takes_batch for each in micro_batches):
            return found  # the step cannot be run without these values
        try:
            again = self.run(CLEANED) if found else None
        except NotInvestigated:
            raise
        except Exception:  # the user's code may raise anything
            again = None
        # If the step fails without these values too, they only mark missing data, and the fault is another.
        return [] if again is not None and not math.isfinite(again.loss + again.grad_norm) else found

    def identify(self, index: int) -> Mapping[str, Any]:
        """Returns the sample's micro-batch and row, if the step had several micro-batches."""
        return place_of(index, self.rerun.begun.micro_batches)

    def replay(self, variant: str) -> Outcome:
        """See `Subject`."""
        outcome = super().replay(variant)
        loss, norm = outcome.loss, outcome.grad_norm
        if loss is None or norm is None:
            return outcome
        if self.gap and math.isfinite(loss):  # a normal forward pass says nothing about the step
            return Outcome(not_run=self.gap)
        # With sharded weights the gradients are sums over the ranks: another rank may have made them bad.
        finite = math.isfinite(loss) and (math.isfinite(norm) or (self.sharded and self._nothing_began_here))
        return replace(outcome, finite=finite)

    @property
    def loss_known(self) -> bool:  # ty: ignore[incompatible-property-override]  only read
        """Whether the loop's loss is known: 0 stands for an unknown one."""
        return not self.gap or self.reading.loss != 0.0

    @property
    def comparable(self) -> bool:
        """Whether a rerun must give the step's bits: nothing was compiled, and no closure changed its batch."""
        changed = any(tensor._version != version for tensor, version in self.rerun.begun.versions)
        compiled = compiled_frames() > self.frames or any(map(is_compiled, self.rerun.outer.modules()))
        return not (changed or compiled or self.gap)

    def trace(self, variant: str) -> Trace:
        """See `Subject`: if the step was traced while it ran, that trace, which has the loop's own loss too."""
        live = self.rerun.begun.trace
        tracing = live if live is not None and variant == "same" else super().trace(variant)
        self._nothing_began_here = find_origin(tracing) is None
        return tracing

    def culprits(self) -> Culprits:
        """See `Subject`. Each rank tries its own samples, with whole weights, and without the other ranks."""
        if not all(each.takes_batch for each in self.rerun.begun.micro_batches):
            raise NotPossible(NO_BATCH)
        if not self.rerun.begun.micro_batches:
            raise NotPossible(self.gap)
        with contextlib.ExitStack() as stack:
            rerun = self.rerun
            if self.sharded:
                self.requests.run(WHOLE_WEIGHTS, work=self._whole.gather)
                rerun = stack.enter_context(self._whole.in_place(rerun))
            return find_by_bisection(BatchTrials(rerun, self.usual, self.deadline))

    def sizes(self, older: Mapping[str, Any] | None, classes: int | None) -> dict[str, float]:
        """Returns the largest attention logit."""
        with uncompiled():
            scores = Scores()
        self.run("same" if older is None else "older_state", lambda model: scores, backward=self.sharded)
        return scores.metrics() if not math.isnan(scores.largest) else {}

    def largest_input(self) -> LargestInput | None:
        """See `Subject`."""
        return largest_input(self.rerun.begun.micro_batches, self.usual)

    def gradients(self) -> list[Tensor | None]:
        """See `Subject`."""
        found = dict(zip(map(id, self.rerun.parameters), super().gradients(), strict=True))
        return [found.get(id(parameter)) for parameter in self.model.parameters()]

    def diagnose(self, evidence: Evidence) -> Diagnosis:
        """See `Subject`: with fixes that hold in any training loop."""
        seen = evidence.origin is not None or evidence.samples or evidence.damage
        if self.gap and evidence.kind != "update" and not seen:  # nothing was measured that could tell the cause
            return for_any_loop(unknown_beyond_forward(evidence))
        return for_any_loop(unknown_without_rerun(super().diagnose(evidence), evidence))

    def save(self, folder: Path) -> None:
        """Writes the batch; and the weights, if the step can be replayed from the folder."""
        whole = not self.why_not_replayable()
        save_loop_step(folder, self.rerun, self.reading, whole=whole, comparable=self.comparable)

    def why_not_replayable(self) -> str:
        """Returns why `stabletrain replay` cannot run the step from its folder; empty if it can."""
        saved = super().why_not_replayable()
        return saved or why_not_replayable(self.rerun, sharded=self.sharded, keep_state=self.keep_state)

    # ---- reruns

    def run(self, variant: str, watch: Watch | None = None, *, backward: bool = True) -> RerunResult:
        """Runs the step as one of `VARIANTS`, or as `CLEANED`."""
        begun = self.rerun.begun.micro_batches
        if not begun:
            raise NotPossible(self.gap or "nothing was recorded of the step")
        micro_batches = begun
        if variant == "fresh_batch":
            micro_batches = with_other_batches(begun, self.usual)
        elif variant == CLEANED:
            micro_batches = without_bad_values(begun)
        elif variant == "older_state":
            self._older_weights()  # not found while other ranks take part
        work = partial(self._run_here, variant, backward, micro_batches, watch)
        return self.requests.run(RERUN, variant, backward, work=work) if self.sharded else work()

    def _run_here(
        self,
        variant: str,
        backward: bool,
        micro_batches: Sequence[MicroBatch] | None = None,
        watch: Watch | None = None,
    ) -> RerunResult:
        """Runs the step with these micro-batches, or this rank's own."""
        weights = self._older_weights() if variant == "older_state" else None
        watched_by = None if watch is None else watch(self.rerun.model)
        return self.rerun.run(
            micro_batches, true_fp32=variant == "fp32", weights=weights, backward=backward, watched_by=watched_by
        )

    def _older_weights(self) -> Mapping[str, Any]:
        tree = self.older()
        if tree is None:
            raise NotPossible("there is no older state: Guard(rollback=True) keeps some")
        return tree["model"]


def compiled_frames() -> int:
    """Returns how many functions `torch.compile` has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["frames"]["ok"]
