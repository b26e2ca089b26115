"""A withheld step of a user's loop, as an investigation sees it: its closures run again on the live model."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.checkpoint.tree import Tree
from stabletrain.forensics.facts import Culprits, LargestInput, Outcome, compare
from stabletrain.forensics.model_copy import is_compiled
from stabletrain.forensics.probes.attention_scores import Scores
from stabletrain.forensics.probes.samples import find_by_bisection
from stabletrain.forensics.probes.state import staleness
from stabletrain.forensics.probes.update import UpdateFault
from stabletrain.forensics.replay import NotPossible, outcome_of
from stabletrain.forensics.subject import Subject
from stabletrain.forensics.trace.origin import find_origin
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.guard.checks.recheck import Finding
from stabletrain.guard.micro_batch import MicroBatch, named_tensors
from stabletrain.guard.rerun import Rerun, RerunResult
from stabletrain.guard.samples import BatchTrials, bad_samples, largest_input, place_of, without_bad_values
from stabletrain.guard.saved_step import save_loop_step, why_not_replayable
from stabletrain.guard.shared_reruns import Reruns, SharedReruns
from stabletrain.machine.compiling import uncompiled
from stabletrain.records import RankPart, Reading

NO_BATCH = "the closure takes no batch: let it take one, and pass it as guard.step(closure, batch=...)"


@dataclass
class LoopSubject(Subject):
    """A step of a user's loop.

    Attributes:
        rerun: runs the closures again.
        reading, part, step, changes, recheck: see `Subject`.
        usual: the micro-batches of the last step that was applied; empty before the first.
        older_state: returns an older state; None if there is none.
        update: runs the step again under `trace_update`, and puts everything back; None for any other kind of
            incident.
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
    older_state: Callable[[], Tree | None] = lambda: None
    part: RankPart | None = None
    recheck: Finding | None = None
    update: Callable[[], UpdateFault | None] | None = None
    sharded: bool = False
    deadline: float = math.inf
    keep_state: bool = True
    frames: int = 0
    gap: str = ""
    reruns: Reruns = field(init=False)
    _nothing_began_here: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.reruns = SharedReruns(lambda request: self._join(*request)) if self.sharded else Reruns()

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

    def older(self) -> Tree | None:
        """See `Subject`."""
        return self.older_state()

    def bad_samples(self, classes: int | None) -> list[dict[str, Any]]:
        """See `Subject`."""
        del classes
        micro_batches = self.rerun.begun.micro_batches
        found = bad_samples(micro_batches, self.usual)
        if found and math.isfinite(self.reading.loss + self.reading.grad_norm + self.reading.buffers):
            return []  # the model does not read these values
        if not all(each.takes_batch for each in micro_batches):
            return found  # the step cannot be run without these values
        try:
            again = self._run("cleaned") if found else None
        except Exception:  # the user's code may raise anything
            again = None
        # If the step fails without these values too, they only mark missing data, and the fault is another.
        return [] if again is not None and not math.isfinite(again.loss + again.grad_norm) else found

    def identify(self, index: int) -> Mapping[str, Any]:
        """Returns the sample's micro-batch and row, if the step had several micro-batches."""
        return place_of(index, self.rerun.begun.micro_batches)

    def replay(self, variant: str) -> Outcome:
        """See `Subject`."""

        def run() -> tuple[float, float, float]:
            found = self._run(variant)
            return found.loss, found.grad_norm, zero_share(found.gradients)

        # With sharded weights the ranks run it together, so none may leave it out for its time limit.
        outcome = outcome_of(run, math.inf if self.sharded else self.deadline)
        loss, norm = outcome.loss, outcome.grad_norm
        if loss is None or norm is None:
            return outcome
        if self.gap and math.isfinite(loss):  # a normal forward pass says nothing about the step
            return Outcome(not_run=self.gap)
        same = variant == "same"
        equal = compare(loss, norm, self.reading, self.part, self.comparable) if same else None
        finite = math.isfinite(loss) and (math.isfinite(norm) or self._made_bad_by_another_rank)
        return replace(outcome, finite=finite, bitwise_equal_to_reading=equal)

    @property
    def _made_bad_by_another_rank(self) -> bool:
        """Whether another rank made the gradients bad that this rank sees: they are sums over the ranks."""
        return self.sharded and self._nothing_began_here

    @property
    def comparable(self) -> bool:
        """Whether a rerun must give the step's bits: nothing was compiled, and no closure changed its batch."""
        changed = any(tensor._version != version for tensor, version in self.rerun.begun.versions)
        compiled = compiled_frames() > self.frames or any(map(is_compiled, self.rerun.outer.modules()))
        return not (changed or compiled or self.gap)

    def trace(self, variant: str) -> Trace:
        """See `Subject`."""
        tracing = Trace(self.rerun.model)
        self._run(variant, tracing)
        self._nothing_began_here = find_origin(tracing) is None
        return tracing

    def culprits(self) -> Culprits | None:
        """See `Subject`."""
        if self.sharded:
            raise NotPossible("single samples are not tried while the weights are sharded")
        if not all(each.takes_batch for each in self.rerun.begun.micro_batches):
            raise NotPossible(NO_BATCH)
        if not self.rerun.begun.micro_batches:
            raise NotPossible(self.gap)
        return find_by_bisection(BatchTrials(self.rerun, self.usual, self.deadline))

    def sizes(self, older: Mapping[str, Any] | None, classes: int | None) -> dict[str, float]:
        """Returns the largest attention logit."""
        del classes
        with uncompiled():
            scores = Scores()
        self._run("same" if older is None else "older_state", scores, backward=self.sharded)
        return scores.metrics() if not math.isnan(scores.largest) else {}

    def largest_input(self) -> LargestInput | None:
        """See `Subject`."""
        return largest_input(self.rerun.begun.micro_batches, self.usual)

    def staleness(self, optimizer: Optimizer) -> float:
        """See `Subject`."""
        found = dict(zip(map(id, self.rerun.parameters), self._run("same").gradients, strict=True))
        return staleness(self.model, [found.get(id(p)) for p in self.model.parameters()], optimizer)

    def save(self, folder: Path) -> None:
        """Writes the batch; and the weights, if the step can be replayed from the folder."""
        whole = not self.why_not_replayable()
        save_loop_step(folder, self.rerun, self.reading, whole=whole, comparable=self.comparable)

    def why_not_replayable(self) -> str:
        """Returns why `stabletrain replay` cannot run the step from its folder; empty if it can."""
        saved = super().why_not_replayable()
        return saved or why_not_replayable(self.rerun, sharded=self.sharded, keep_state=self.keep_state)

    # ---- reruns

    def _run(self, variant: str, watched_by: Any = None, *, backward: bool = True) -> RerunResult:
        """Runs the step as one of `VARIANTS`."""
        if not self.rerun.begun.micro_batches:
            raise NotPossible(self.gap or "nothing was recorded of the step")
        micro_batches = self._other_batches() if variant == "fresh_batch" else None
        if variant == "cleaned":
            micro_batches = without_bad_values(self.rerun.begun.micro_batches)
        weights = self._older_weights() if variant == "older_state" else None

        def work() -> RerunResult:
            return self.rerun.run(
                micro_batches, true_fp32=variant == "fp32", weights=weights, backward=backward, watched_by=watched_by
            )

        return self.reruns.run((variant, backward), work)

    def _join(self, variant: str, backward: bool) -> None:
        """Joins a rerun that another rank requested, with this rank's micro-batches."""
        weights = self._older_weights() if variant == "older_state" else None
        self.rerun.run(true_fp32=variant == "fp32", weights=weights, backward=backward)

    def _other_batches(self) -> list[MicroBatch]:
        """Returns this step's closures with the batches of the last step that was applied."""
        micro_batches = self.rerun.begun.micro_batches
        if not all(each.takes_batch for each in micro_batches):
            raise NotPossible(NO_BATCH)
        if not self.usual:
            raise NotPossible("no step was applied before, so there is no other batch")
        memory = [
            {tensor.data_ptr() for each in step for _, tensor in named_tensors(each.batch)}
            for step in (micro_batches, self.usual)
        ]
        if memory[0] & memory[1]:
            raise NotPossible("the loop reuses the memory of a batch, so there is no other batch")
        return [MicroBatch(each.closure, self.usual[i % len(self.usual)].batch) for i, each in enumerate(micro_batches)]

    def _older_weights(self) -> Mapping[str, Any]:
        tree = self.older_state()
        if tree is None:
            raise NotPossible("there is no older state: Guard(rollback=True) keeps some")
        return tree["model"]


def compiled_frames() -> int:
    """Returns how many functions `torch.compile` has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["frames"]["ok"]


def zero_share(gradients: Sequence[Tensor | None]) -> float:
    """Returns the share of gradient elements that are exactly 0, in [0, 1]."""
    found = [gradient for gradient in gradients if gradient is not None]
    found = [each.to_local() if hasattr(each, "to_local") else each for each in found]  # ty: ignore[not-callable]
    dense = [each.coalesce().values() if each.layout != torch.strided else each for each in found]
    zeros = sum(int((each == 0).sum()) for each in dense)
    return zeros / max(sum(each.numel() for each in dense), 1)
