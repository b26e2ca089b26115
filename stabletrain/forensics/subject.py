"""The step under investigation: the known facts about it, and ways to run it again.

There are two kinds. `StepSubject` is a step of this project's trainer; it runs again on a copy of the model. A step of
a user's own loop (`guard/subject.py`) runs again by calling the user's closure on the live model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.checkpoint.tree import Tree
from stabletrain.forensics.agreement import Requests
from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.diagnosis.evidence import Evidence
from stabletrain.forensics.facts import Culprits, LargestInput, Outcome, compared, largest_value, most_unusual
from stabletrain.forensics.probes.attention_scores import Scores
from stabletrain.forensics.probes.fp8_casts import Fp8Casts, fp8_casts
from stabletrain.forensics.probes.samples import (
    Bisection,
    bad_samples,
    find_by_bisection,
    identity_of,
    sample_sizes,
)
from stabletrain.forensics.probes.state import staleness
from stabletrain.forensics.probes.underflow import Underflow, underflow
from stabletrain.forensics.probes.update import UpdateFault
from stabletrain.forensics.replay import CompiledCopy, inputs_of, runs_compiled
from stabletrain.forensics.repro import Repro, save_repro, tensors_in
from stabletrain.forensics.rerun import VARIANTS, RerunResult, Watch, outcome_of
from stabletrain.forensics.saved_step import write_batch
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.guard.checks.recheck import Finding
from stabletrain.monitors.probe import measure_forward
from stabletrain.records import RankPart, Reading

ONLY_THE_UPDATE = (
    "its forward and backward pass were finite, and the optimizer's step, which was not, cannot be run from a folder"
)
"""Why a step with a non-finite update cannot be replayed."""


class Subject:
    """A step under investigation. Its methods may raise anything that the user's code raises.

    Attributes:
        model: with its weights from before the step.
        buffers: the buffers' values from before the step, in the order of `model.buffers()`.
        step: number of the step, counted from 0.
        reading: the step's; None if unknown.
        part: this rank's own part of the step, as it measured it; None in a single process.
        applied: whether the update was applied; then running the step again does not repeat it.
        older: returns a captured state (`checkpoint/capture.py`) from before the step; None if there is none.
        changes, recheck: see `Repro`.
        update: runs the optimizer's step again, and returns why it is not finite; None if it cannot be run again.
        deadline: in `time.monotonic()` seconds; nothing new begins after it.
        requests: how ranks run together what one of them needs.
        gap: why running the step again leaves out a part of it; empty if it does not.
    """

    model: nn.Module
    buffers: Sequence[Tensor]
    step: int
    reading: Reading | None
    part: RankPart | None
    applied: bool
    changes: Sequence[tuple[str, str, str]]
    recheck: Finding | None
    update: Callable[[], UpdateFault | None] | None
    older: Callable[[], Tree | None]
    deadline: float
    requests: Requests
    gap: str = ""
    loss_known: bool = True

    # ---- before the investigation

    def has_bad_samples(self, classes: int | None) -> bool:
        """Whether the batch alone explains the step, as far as that shows without running it."""
        return False

    def begin(
        self, model: nn.Module | None, older: Callable[[], Tree | None], deadline: float, requests: Requests
    ) -> None:
        """Sets what an investigation needs besides the step itself.

        Args:
            model: with whole weights; None if nothing will be run.
            older, deadline, requests: see the attributes.
        """
        raise NotImplementedError

    def serves(self) -> Mapping[str, Callable[..., object]]:
        """Returns what this rank does for the requests of others, by the request's name."""
        return {}

    # ---- evidence

    @property
    def comparable(self) -> bool:
        """Whether running the step again must give its bits."""
        raise NotImplementedError

    @property
    def variants(self) -> Sequence[str]:
        """`VARIANTS`, in the order in which they are to be replayed."""
        return VARIANTS

    def bad_samples(self, classes: int | None) -> list[dict[str, Any]]:
        """Returns the samples with values that no model can learn from; see `probes/samples.py`."""
        raise NotImplementedError

    def identify(self, index: int) -> Mapping[str, Any]:
        """Returns the names of a sample besides its index in the batch, such as its `id` and `source`."""
        raise NotImplementedError

    def run(self, variant: str, watch: Watch | None = None) -> RerunResult:
        """Runs forward and backward of the step again as one of `VARIANTS`."""
        raise NotImplementedError

    def replay(self, variant: str) -> Outcome:
        """Runs the step again as one of `VARIANTS`. Never raises: the outcome says why it was not run."""
        outcome = outcome_of(lambda: self.run(variant), self.deadline)
        return self.compared(outcome) if variant == "same" else outcome

    def compared(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of an unchanged replay, compared with the step."""
        return compared(outcome, self.reading, None if self.applied else self.part, self.comparable)

    def trace(self, variant: str) -> Trace:
        """Runs the step again as one of `VARIANTS`, and records every operation."""
        traces: list[Trace] = []

        def watch(model: nn.Module) -> Trace:
            traces.append(Trace(model))
            return traces[0]

        self.run(variant, watch)
        return traces[0]

    def culprits(self) -> Culprits:
        """Returns the samples that make the step non-finite. Raises NotPossible if they cannot be searched for."""
        raise NotImplementedError

    def sizes(self, older: Mapping[str, Any] | None, classes: int | None) -> dict[str, float]:
        """Returns sizes of activations and logits, named as the monitors' metrics; with an older state's weights."""
        raise NotImplementedError

    def largest_input(self) -> LargestInput | None:
        """Returns the sample with the largest input; None if inputs are not floating point."""
        raise NotImplementedError

    def gradients(self) -> Sequence[Tensor | None]:
        """Returns the step's gradients, in the order of `model.parameters()`."""
        return self.run("same").gradients

    def staleness(self, optimizer: Optimizer) -> float:
        """Compares the step's gradients with the optimizer's second moments; see `probes/state.py`."""
        return staleness(self.model, self.gradients(), optimizer)

    def underflow(self) -> Underflow | None:
        """Returns the gradients that are lost to underflow; None if that cannot be measured."""
        return None

    def fp8_casts(self) -> Fp8Casts | None:
        """Returns the losses of casts to fp8; None if there are no casts, or if they are not examined."""
        return None

    # ---- the folder

    def diagnose(self, evidence: Evidence) -> Diagnosis:
        """Names the cause, with fixes in words that fit where the step ran."""
        return diagnose(evidence)

    def why_not_replayable(self) -> str:
        """Returns why another process cannot replay the step from its folder; empty if it can."""
        return ONLY_THE_UPDATE if self.update is not None else ""

    def save(self, folder: Path) -> None:
        """Writes the files for a later replay into the incident's folder.

        Raises:
            OSError: the disk is full or gone.
        """
        raise NotImplementedError


class StepSubject(Subject):
    """A step of this project's trainer, which runs again on copies of the model."""

    def __init__(self, repro: Repro) -> None:
        self.repro, self.requests = repro, Requests()
        self.model, self.buffers, self.step, self.deadline = repro.model, repro.buffers, repro.step, repro.deadline
        self.reading, self.part, self.applied = repro.reading, repro.part, repro.applied
        self.changes, self.recheck, self.update, self.older = repro.changes, repro.recheck, repro.update, repro.older
        self._compiled_copy, self._replayed = CompiledCopy(), False

    @property
    def comparable(self) -> bool:
        """See `Subject`."""
        return self.repro.comparable

    def has_bad_samples(self, classes: int | None) -> bool:
        """See `Subject`."""
        return bool(self.bad_samples(classes))

    def begin(
        self, model: nn.Module | None, older: Callable[[], Tree | None], deadline: float, requests: Requests
    ) -> None:
        """See `Subject`."""
        self.model, self.older, self.deadline, self.requests = model or self.model, older, deadline, requests
        self.repro = replace(self.repro, model=self.model, older=older, deadline=deadline)

    @property
    def variants(self) -> Sequence[str]:
        """See `Subject`: a compiled one comes last, because it takes longest."""
        return sorted(VARIANTS, key=lambda variant: runs_compiled(self.repro, variant))

    def bad_samples(self, classes: int | None) -> list[dict[str, Any]]:
        """See `Subject`."""
        return bad_samples(self.repro.batch, self.repro.tools.sanitizer.vocab_size, classes)

    def identify(self, index: int) -> Mapping[str, Any]:
        """Returns the sample's id and source, if the data provides them."""
        return identity_of(self.repro.batch, index)

    def run(self, variant: str, watch: Watch | None = None) -> RerunResult:
        """See `Subject`: on a new copy of the model, which is not compiled."""
        inputs = inputs_of(self.repro, variant)
        if watch is not None:  # use the whole logits, not chunks: a trace tells forward from backward by their order
            inputs = inputs.with_plain_objective()
        return inputs.run(watch)

    def replay(self, variant: str) -> Outcome:
        """See `Subject`."""
        if not runs_compiled(self.repro, variant):
            return super().replay(variant)
        copy = self._compiled_copy
        outcome = self.compared(outcome_of(lambda: copy.inputs_of(self.repro).run(), self.deadline))
        # Only a step that came out differently is replayed once more: on the same copy, which is compiled by then.
        if self._replayed or outcome.bitwise_equal_to_reading is not False:
            copy.drop()
        self._replayed = True
        if outcome.not_run:  # perhaps compilation failed: replay uncompiled, marked as not comparable
            return StepSubject(replace(self.repro, compiled=True)).replay(variant)
        return outcome

    def culprits(self) -> Culprits:
        """See `Subject`."""
        return find_by_bisection(Bisection(self.repro))

    def sizes(self, older: Mapping[str, Any] | None, classes: int | None) -> dict[str, float]:
        """Returns the monitors' metrics on the first micro-batch."""
        repro = self.repro
        model = repro.copy_model()
        if older is not None:
            model.load_state_dict(older["model"])
        batch = repro.to_micro_batches(repro.batch)[0]
        batch = repro.tools.sanitizer.safe(batch, classes)
        with Scores() as scores:
            try:
                part = measure_forward(model, batch, repro.tools.precision, repro.tools.objective)
            except RuntimeError:
                return {}
            return part.metrics | scores.metrics()

    def largest_input(self) -> LargestInput | None:
        """Compares the batch's largest input and target with those of another batch."""
        if self.repro.fresh is None:
            return None
        batch, fresh = self.repro.batch, self.repro.fresh()
        pairs = (batch.inputs, fresh.inputs, ""), (batch.targets, fresh.targets, " in its target")
        sizes = [(sample_sizes(mine), sample_sizes(other), place) for mine, other, place in pairs]
        found = most_unusual([largest_value(mine, max(other), place) for mine, other, place in sizes if mine and other])
        return found and replace(found, sample={**found.sample, **self.identify(found.sample["index"])})

    def underflow(self) -> Underflow | None:
        """See `Subject`."""
        return underflow(self.repro)

    def fp8_casts(self) -> Fp8Casts | None:
        """See `Subject`."""
        return fp8_casts(self.repro)

    def save(self, folder: Path) -> None:
        """Writes weights and batch; the batch only, if the step cannot be replayed."""
        if self.update is not None:
            write_batch(folder, tensors_in(self.repro.batch))
        else:
            save_repro(folder, self.repro)
