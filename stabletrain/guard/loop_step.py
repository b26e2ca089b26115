"""`LoopStep`: a step of a user's own loop as the engine sees it."""

from torch import Tensor

from stabletrain.forensics.handler import IncidentSummary
from stabletrain.forensics.investigate import IncidentRequest
from stabletrain.forensics.probes.update import UpdateFault, update_fault
from stabletrain.guard.checks.comparing import Compared, sums
from stabletrain.guard.engine import ReadStep
from stabletrain.guard.incidents import Incidents, settings
from stabletrain.guard.own_loop import OwnLoop
from stabletrain.guard.rerun import BegunStep
from stabletrain.guard.subject import LoopSubject
from stabletrain.records import RankPart, Reading
from stabletrain.tracking.tracker import NoTracker


class LoopStep(ReadStep):
    """A step of a user's own loop, which is run again by calling its closures.

    Attributes:
        loop: the loop.
        begun: the state before the step, with its closures.
    """

    def __init__(
        self, loop: OwnLoop, begun: BegunStep, reading: Reading, number: int, tracker: NoTracker, incidents: Incidents
    ) -> None:
        super().__init__(
            reading, number, loop.steps, loop.state, loop.device, loop.policy, loop.parallel, tracker, incidents.handler
        )
        self.loop, self.begun, self.incidents = loop, begun, incidents

    def investigate(self, kind: str, reading: Reading) -> IncidentSummary | None:
        """See `ReadStep`."""
        loop = self.loop
        subject = self._subject(reading)
        group = loop.optimizer.param_groups[0]
        known = settings(loop.precision.name, group, clips=loop.judge.clips, best_loss=loop.best_loss)
        optimizer = None if subject.sharded else loop.optimizer  # no rank holds whole moments
        return self.incidents.investigate(subject, IncidentRequest(kind, optimizer, loop.policy.bounds), known)

    def _subject(self, reading: Reading) -> LoopSubject:
        """Collects everything that an investigation of the step needs."""
        loop, begun, own = self.loop, self.begun, None
        if self.parallel.ranks.distributed:
            own = RankPart(self.parallel.ranks.rank, float(begun.loss))
        return LoopSubject(
            loop.rerun(begun, reading.loss_scale),
            reading._replace(step=self.number),
            self.reading.step - 1,
            usual=loop.last_applied,
            older=lambda: loop.states.older(self.reading.step - 2),
            part=own,
            sharded=any(hasattr(parameter, "to_local") for parameter in loop.parameters),
            keep_state=self.incidents.keep_state,
            frames=loop.frames,
            gap=loop.gap(begun),
            changes=self.guard.state_check.changes(loop.model) if reading.state_changed else (),
            update=self._update_fault if reading.bad_update else None,
            recheck=self.guard.recheck.found,
        )

    def _update_fault(self) -> UpdateFault | None:
        """Runs the optimizer's step again and names what is not finite in it; everything is put back."""
        with self.loop.update():
            return update_fault(self.loop.model, self.loop.optimizer, self.loop.run_optimizer_step)

    def can_be_repeated(self) -> bool:
        """See `ReadStep`."""
        return self.loop.can_take_again(self.begun, self.reading)

    def differs_when_repeated(self, cause: str | None) -> bool:
        """Two reruns of an investigation agree, and differ from the step. A closure may depend on anything else."""
        return cause == "hardware_fault"

    def update_again(self) -> None:
        """See `ReadStep`."""
        with self.loop.update():
            self.loop.run_optimizer_step()

    def gradient_again(self, compared: Compared) -> Tensor | None:
        """See `ReadStep`."""
        return sums(self.loop.rerun(self.begun, 1.0).run().gradients, self.device)
