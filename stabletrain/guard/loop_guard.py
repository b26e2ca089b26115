"""`LoopGuard`: judges the steps of a user's training loop, applies or withholds updates, and follows each verdict.

What `Guard` and `AttachedGuard` share. They differ in who runs a step: `Guard` runs the user's closures, an attached
loop runs its own code. A step goes through these stages:

| stage | |
|---|---|
| begin | record the state that forward and backward change: buffers, random generators: `_begin` |
| judge | measure the gradients; decide whether the update is safe, with one host read: `_judge_step` |
| apply | run the optimizer's step, and undo it if its result is not finite: `_apply_if_open` |
| withhold | restore the buffers and explain the step: `_withhold` |
| follow | skip, take again, restore, roll back or halt, as the policy decides: `_follow` |
"""

import contextlib
import math
from collections.abc import Generator, Sequence
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.buffers import buffers_of
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.forensics.handler import IncidentSummary
from stabletrain.forensics.investigate import IncidentRequest
from stabletrain.forensics.probes.update import UpdateFault, update_fault
from stabletrain.guard.checks.comparing import sums
from stabletrain.guard.checks.copies import Copies
from stabletrain.guard.checks.written import note_start, state_is_finite
from stabletrain.guard.gradients import BareTensors, trained_parameters, unwrapped
from stabletrain.guard.incidents import Incidents, settings
from stabletrain.guard.judge import Judge
from stabletrain.guard.load_listener import LoadListener
from stabletrain.guard.micro_batch import MicroBatch, loss_of
from stabletrain.guard.options import GuardOptions
from stabletrain.guard.policy import RollbackGuard
from stabletrain.guard.repeat import confirm
from stabletrain.guard.rerun import BegunStep, Generators, Rerun
from stabletrain.guard.spikes import bounds
from stabletrain.guard.states import NoStates, States
from stabletrain.guard.subject import LoopSubject, compiled_frames
from stabletrain.monitors.rolling import Alarm
from stabletrain.parallel.loop import innermost, ranks_of_loop
from stabletrain.printable import is_round
from stabletrain.records import Number, RankPart, Reading, TrainState, Verdict
from stabletrain.stability.precision.base import FullPrecision

_GUARDS: "WeakKeyDictionary[Optimizer, ref[LoopGuard]]" = WeakKeyDictionary()
"""The guard of each optimizer. A newer guard of the same optimizer replaces it."""


class LoopGuard:
    """Judges the steps of a loop; see `Guard` for attributes and arguments.

    Raises:
        ConfigError: model and optimizer do not belong together, or an option is out of bounds.
    """

    updates = True

    def __init__(self, model: nn.Module | Sequence[Tensor], optimizer: Optimizer, options: GuardOptions) -> None:
        if not isinstance(model, nn.Module):
            if not isinstance(model, list | tuple) or not all(isinstance(each, Tensor) for each in model):
                raise ConfigError(
                    f"Guard({type(model).__name__}, ...): give the nn.Module that is trained, or a list of tensors"
                )
            model = BareTensors(model)
        optimizer = unwrapped(optimizer)
        self._outer, self._model, self._optimizer = model, innermost(model), optimizer
        self._parameters = trained_parameters(self._model, optimizer)
        self._trained_ids = set[int]()
        self._device = self._parameters[0].device
        self._parallel = parallel = ranks_of_loop()
        precision = options.make_precision(self._device, optimizer, several_ranks=parallel.ranks.distributed)
        self._policy = policy = options.make_policy()
        self._state, self._states = TrainState(self._model, optimizer), NoStates()
        if isinstance(policy, RollbackGuard):
            self._states = States(self._model, optimizer, policy, precision, options.loader, parallel.any_rank)
        self._judge = Judge(
            self._model, optimizer, precision=precision, parallel=parallel, policy=policy, max_norm=options.max_norm
        )
        self._incidents = Incidents(
            Path(options.folder), options.max_incidents, options.max_seconds, self._parallel.ranks
        )
        self._keep_state, self._frames = options.keep_state, compiled_frames()
        self._step = 0  # steps judged so far
        self._shown_step, self._next_shown_step = 0, None  # number of the last step and of the next, as the loop counts
        self._last_applied: list[MicroBatch] = []  # for replays with another batch
        self._newest_kind, self._best_loss = "", math.inf
        self._start_noted, self._updating, self._without_gradient = False, False, 0
        self._first_ids = {id(parameter) for parameter in self._model.parameters()}
        self._loads = LoadListener()
        self._loads.listen(self._model, optimizer)
        self.alarms: list[Alarm] = []
        self.last: Reading | None = None
        self.rolled_back = 0
        _GUARDS[optimizer] = ref(self)
        optimizer.register_step_pre_hook(check_caller)

    def at(self, step: SupportsIndex) -> None:
        """Sets the number of the next step as the loop counts, which messages and incidents then show.

        Without it they show how many steps the guard has judged. The numbers may repeat, skip and go back.

        Raises:
            ConfigError: the number is negative.
        """
        if (number := index(step)) < 0:
            raise ConfigError(f"step={number} is below 0: give the number of the step")
        self._next_shown_step = number

    def state_replaced(self) -> None:
        """Tells the guard that the loop itself has changed weights, moments or buffers.

        Not needed after `load_state_dict` of the model or of the optimizer. Older checksums are discarded,
        and the next step takes a new snapshot to go back to.
        """
        self._loads.noticed = False
        self._policy.states.forget()
        self._policy.check_state_every(self._policy.state_check.every)
        self._start_noted = False

    # ---- begin

    def _begin(self) -> BegunStep:
        """Begins a step: drops the old gradients, and records the state that forward and backward change."""
        # The loop may have loaded a checkpoint or added parameters since the last step.
        if self._loads.noticed:
            self.state_replaced()
        self._find_parameters()
        # Note what is not finite from the start, so that no step is blamed for it.
        if not self._start_noted:
            note_start(self._model, self._optimizer)
            self._start_noted = True
        self._states.before_first_update(self._step)
        if self.updates:
            self._optimizer.zero_grad(set_to_none=True)
        # A withheld step restores the buffers, such as batch norm's statistics; a rerun draws the same random numbers.
        return BegunStep(Generators.now(self._device), buffers_of(self._model).save())

    def _find_parameters(self) -> None:
        """Finds the trained parameters again, if the loop has added some to the optimizer or replaced some."""
        ids = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        if ids != self._trained_ids:
            self._parameters, self._trained_ids = trained_parameters(self._model, self._optimizer), ids

    # ---- judge

    @property
    def _precision(self) -> FullPrecision:
        return self._judge.precision

    def _judge_step(self, step: int, loss: Tensor, **numbers: Any) -> Reading:
        """Returns the reading of the step that was just computed; the arguments are those of `Judge`."""
        unproven = bool(self._policy.update_check.why(self._optimizer))
        return self._judge(step, loss, self._parameters, unproven=unproven, **numbers)

    def _state_changed(self, begun: BegunStep) -> Number:
        """Returns 1 if weights, moments or buffers have changed since the last update, else 0."""
        return self._policy.state_check.before_update(self._state, begun.buffers)

    def _count(self, reading: Reading) -> Reading:
        """Counts the step; returns its reading with the lengths of the update before it."""
        if self._states.lengths:  # they are on the host when this step's reading is
            update, weights = torch.stack(self._states.lengths).tolist()
            reading = reading._replace(update=update, weights=weights)
        # Everything that is due every so many steps follows the guard's own count: the loop's may repeat or go back.
        self._shown_step = reading.step if self._next_shown_step is None else self._next_shown_step
        self._next_shown_step, self._step = None, reading.step
        return reading

    # ---- apply

    def _apply_if_open(self, begun: BegunStep, reading: Reading) -> Reading:
        """Applies the update if the gate is open; returns the reading, changed if the update was undone."""
        if not reading.applied or self._apply():
            return reading
        return self._undone(begun, reading)

    def _undone(self, begun: BegunStep, reading: Reading) -> Reading:
        """Returns the reading of a step whose update was undone. It may be applied again, so the buffers are saved."""
        begun.after_forward = buffers_of(self._model).save()
        return reading._replace(applied=False, bad_update=True)

    def _apply(self) -> bool:
        """Applies the update; returns whether it stays: one that is not finite is undone."""
        raise NotImplementedError

    def _run_optimizer_step(self) -> None:
        """Runs the optimizer's own step, without judging it."""
        raise NotImplementedError

    def _copies(self) -> Copies | None:
        """Returns copies of what the update may write, to check and undo it; None if it is proven to stay finite."""
        return self._policy.update_check.copy(self._model, self._optimizer) if self._judge.unproven else None

    @contextlib.contextmanager
    def _update(self, kept: Copies | None = None) -> Generator[None]:
        """A context in which the optimizer's step runs, with a lower learning rate for a while after a rollback.

        If the step raises an error, `kept` is put back, so that no partial update remains.
        """
        factor = self._policy.lr_multiplier(self._step)
        groups = [group for group in self._optimizer.param_groups if factor != 1.0 and "lr" in group]
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        self._updating = True  # `check_caller` lets this step pass
        try:
            yield
        except BaseException:
            if kept is not None:
                kept.put_back()
            raise
        finally:
            self._updating = False
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _keep_or_undo(self, kept: Copies | None) -> bool:
        """Returns whether the update that was just applied is finite, on all ranks; if not, undoes it."""
        if kept is None or not self._parallel.any_rank(not kept.are_finite_now()):
            return True
        kept.put_back()
        return False

    # ---- follow the verdict

    def _follow(self, begun: BegunStep, reading: Reading) -> None:
        """Gets the policy's verdict on a step whose update was applied or withheld, and follows it."""
        policy, shown = self._policy, reading._replace(step=self._shown_step)
        verdict = policy.judge(reading)
        # A gradient that was computed twice and differs is a fault of the machine only if the closure repeats exactly.
        if policy.recheck.runs_out_of_memory(reading):
            self._incidents.note(
                f"step {self._shown_step}: too little memory to compute a gradient twice, so no step is repeated any "
                "more; training is not affected"
            )
        if policy.recheck.differing_part(reading):
            verdict = self._confirm(begun, verdict)
        self.last, self.rolled_back = shown, 0
        # Explain a withheld step now, while its batch, gradients and generators are there. This may change the verdict:
        # a fault of the machine is no reason to skip a batch.
        if reading.applied:
            self._best_loss = min(self._best_loss, reading.loss)
            self._last_applied = begun.micro_batches
        else:
            verdict = self._withhold(begun, shown, verdict)
        # The numbers were wrong once and the state is intact: take the same step again, and follow its new verdict.
        if verdict is Verdict.RESTORE and policy.kind != "state":
            self._take_again(begun, reading)
            return
        self._show(policy.new_alarms())
        # Only now are weights, moments and buffers final: take the checksums that the next step compares with.
        self._remember_state()
        if verdict is Verdict.RESTORE:  # memory is damaged: nothing after the newest intact state can be trusted
            self._restore_intact_state()
        elif verdict is Verdict.ROLLBACK:  # skipping did not help: the weights are bad, not the batches
            self._roll_back()
        elif verdict is Verdict.HALT:
            raise TrainingHalted(f"step {self._shown_step}: {policy.reason}")
        else:
            self._states.after_update(reading.step)

    def _end_step(self) -> None:
        """Ends a step, also one that raised an error."""
        self._warn_of_replaced_parameters()
        self._loads.noticed = False  # the guard itself has loaded states since, in a rollback

    def _confirm(self, begun: BegunStep, verdict: Verdict) -> Verdict:
        """Returns the verdict on a step whose gradients differ when computed twice, after a third computation."""
        recheck = self._policy.recheck
        if not recheck.compared:  # it was taken again, and differs again
            return verdict
        found = confirm(recheck, self._rerun(begun, 1.0))
        if found.third == "second" or found.agreed:
            recheck.found = found
            return verdict
        recheck.stop()
        self._incidents.note(
            f"step {self._shown_step}: the closure never gives the same gradients again, so it depends on more than "
            "weights, buffers, batch and PyTorch's random numbers: no step is repeated any more"
        )
        return Verdict.SKIP

    # ---- withhold

    def _withhold(self, begun: BegunStep, reading: Reading, verdict: Verdict) -> Verdict:
        """Restores the buffers, lowers the loss scale after an overflow, and explains the step; returns the verdict."""
        # A withheld step changes nothing: weights and moments are untouched, and the forward pass wrote only buffers.
        begun.buffers.put_back()
        self._precision.update(reading.overflow, applied=False)
        policy = self._policy
        if reading.overflow:  # routine in fp16: an overflow only lowers the loss scale
            return verdict
        if policy.kind == "recheck" and policy.recheck.found is None:  # its bits always differ: no fault
            return verdict
        # Explain the first of several skips in a row: the others mostly have its cause. Explain a halt of another kind
        # too, and every fault of the machine.
        new = policy.consecutive == 1 or (verdict is Verdict.HALT and policy.kind != self._newest_kind)
        if new or policy.kind in ("state", "recheck"):
            found = self._investigate(begun, reading)
            if found is not None:
                policy.note_mistake(found)
            verdict = self._verdict_on_machine(begun, reading, verdict, None if found is None else found.cause)
            if found is not None and not found.known:
                self._newest_kind = policy.kind
                return verdict
        number = policy.skips[policy.kind]
        if verdict is Verdict.SKIP and is_round(number):
            self._incidents.note(
                f"step {reading.step}: {policy.reason}; update skipped ({policy.kind}, number {number})"
            )
        return verdict

    def _investigate(self, begun: BegunStep, reading: Reading) -> IncidentSummary | None:
        """Explains the step; returns None if there was no investigation."""
        subject, policy = self._subject(begun, reading), self._policy
        group, clips = self._optimizer.param_groups[0], self._judge.clips
        known = settings(self._precision.name, group, clips=clips, best_loss=self._best_loss)
        optimizer = None if subject.sharded else self._optimizer  # no rank holds whole moments
        return self._incidents.investigate(subject, IncidentRequest(policy.kind, optimizer, bounds(policy)), known)

    def _verdict_on_machine(self, begun: BegunStep, reading: Reading, verdict: Verdict, cause: str | None) -> Verdict:
        """Returns RESTORE for a withheld step if memory or arithmetic was at fault, and not data or settings.

        Args:
            cause: the result of the investigation; None if there was none.
        """
        policy, step = self._policy, self._step
        if policy.kind == "recheck":
            return policy.on_machine_fault(step, policy.reason, damaged=False, otherwise=verdict)
        if policy.kind not in ("nonfinite", "spike", "update"):
            return verdict
        # Damaged weights or moments make every later step bad: only an older state helps.
        damaged = cause == "corrupt_state" or not state_is_finite(self._model, self._optimizer)
        if self._parallel.any_rank(damaged):
            why = f"{policy.reason}: weights or moments have changed since the last update"
            fault = policy.on_machine_fault(step, why, damaged=True, otherwise=verdict)
            if fault is not verdict:
                policy.kind = "state"
            return fault
        if cause is None and reading.bad_update and policy.consecutive == 1:  # it was not investigated
            cause = "hardware_fault" if self._update_fault() is None else "unsafe_optimizer"
        if cause == "hardware_fault" and self._can_take_again(begun, reading):
            return policy.on_machine_fault(step, policy.reason, damaged=False, otherwise=verdict)
        return verdict

    def _subject(self, begun: BegunStep, reading: Reading) -> LoopSubject:
        """Collects everything that an investigation of the step needs."""
        ranks, own, step = self._parallel.ranks, None, self._step
        if ranks.distributed:
            own = RankPart(ranks.rank, float(sum(begun.losses[1:], begun.losses[0])))
        return LoopSubject(
            self._rerun(begun, reading.loss_scale),
            reading,
            step - 1,
            usual=self._last_applied,
            older_state=lambda: self._states.older(step - 2),
            part=own,
            sharded=any(hasattr(parameter, "to_local") for parameter in self._parameters),
            keep_state=self._keep_state,
            frames=self._frames,
            gap=self._gap(begun),
            changes=self._policy.state_check.changes(self._model) if reading.state_changed else (),
            update=self._update_fault if reading.bad_update else None,
            recheck=self._policy.recheck.found,
        )

    def _update_fault(self) -> UpdateFault | None:
        """Runs the optimizer's step again and names what is not finite in it; everything is put back."""
        with self._update():
            return update_fault(self._model, self._optimizer, self._run_optimizer_step)

    def _gap(self, begun: BegunStep) -> str:
        """Returns why the closures do not compute the loop's own loss; empty if they do."""
        del begun
        return ""

    def _rerun(self, begun: BegunStep, loss_scale: float) -> Rerun:
        """Returns what is needed to run a step's closures again."""
        return Rerun(self._model, self._outer, self._parameters, self._precision, begun, loss_scale)

    # ---- take a step again

    def _can_take_again(self, begun: BegunStep, reading: Reading) -> bool:
        """Returns whether the update can be applied again, or the closures run again on unchanged batches."""
        if self._parallel.ranks.distributed:
            return False
        same_batches = all(tensor._version == version for tensor, version in begun.versions)
        return reading.bad_update or (self.updates and same_batches)

    def _take_again(self, begun: BegunStep, reading: Reading) -> None:
        """Takes a withheld step again, because its numbers were wrong and have changed nothing.

        If the update was wrong, it is applied again. Otherwise the closures run twice more, and the gradients of both
        runs must have the same bits.
        """
        self._incidents.note(f"step {self._shown_step}: taken again, with the same batch and learning rate")
        if reading.bad_update:
            if begun.after_forward is not None:
                begun.after_forward.put_back()
            self._precision.unscaled_again()
            again = reading._replace(applied=True, bad_update=False)
        else:
            first, second = self._run_again(begun), self._run_again(begun)
            loss = sum(begun.losses[1:], begun.losses[0])
            differs = torch.full((), 0.0 if torch.equal(first, second) else math.inf, device=self._device)
            again = self._judge_step(reading.step, loss, recheck=differs)
        self._follow(begun, self._apply_if_open(begun, again))

    def _run_again(self, begun: BegunStep) -> Tensor:
        """Runs the closures of a step from where it began; returns the sums of the gradients' bits."""
        begun.losses = []
        begun.buffers.put_back()
        begun.generators.set()
        self._optimizer.zero_grad(set_to_none=True)
        for micro_batch in begun.micro_batches:
            with self._precision.autocast():
                loss = loss_of(micro_batch())
            self._precision.scale(loss).backward()
            begun.losses.append(loss.detach())
        return sums([parameter.grad for parameter in self._parameters], self._device)

    # ---- roll back, and restore

    def _roll_back(self) -> None:
        """Restores the newest healthy state."""
        reason = self._policy.reason
        self.rolled_back = self._states.roll_back(self._step, number=self._shown_step)
        self._remember_state()
        self._incidents.note(
            f"step {self._shown_step}: {reason}: rollback {self._policy.rollbacks}; pass over the batches of "
            f"{self.rolled_back} steps (guard.rolled_back)"
        )

    def _restore_intact_state(self) -> None:
        """Restores the newest intact state, because memory or arithmetic failed since."""
        reason = self._policy.reason
        self._policy.skips["state"] += 1  # counts as skipped: the loop cannot read this batch again
        self._policy.state_check.put_back_buffers()  # the saved state lacks buffers that the model does not save
        self.rolled_back = self._states.put_back(self._shown_step)
        self._remember_state()
        self._incidents.note(
            f"step {self._shown_step}: {reason}: the newest intact state is put back; go on with any batch"
        )

    def _remember_state(self) -> None:
        """Takes the checksums of the state after a step, if they are wanted."""
        if not self._policy.state_check.every:
            return
        self._state.step = self._state.executed_steps = self._step
        self._policy.state_check.after_update(self._state, buffers_of(self._model).save())

    # ---- messages

    def _show(self, alarms: list[Alarm]) -> None:
        """Prints alarms, and keeps them."""
        self.alarms += alarms
        own = f" (as the guard counts steps; this is its step {self._step})" if self._shown_step != self._step else ""
        for alarm in alarms:
            self._incidents.note(f"step {self._shown_step}: {alarm.text}{own}")

    def _warn_of_replaced_parameters(self) -> None:
        """Warns of parameters that the loop put in the place of trained ones: the optimizer never updates them."""
        without_gradient = sum(parameter.grad is None for parameter in self._parameters)
        if without_gradient == self._without_gradient:  # as in the step before
            return
        self._without_gradient = without_gradient
        present = {id(parameter) for parameter in self._model.parameters()}
        if all(id(parameter) in present for parameter in self._parameters):
            return
        named, known = self._model.named_parameters(), self._trained_ids | self._first_ids
        new = [name for name, each in named if each.requires_grad and id(each) not in known]
        if new:
            self._incidents.note(
                f"step {self._shown_step}: {', '.join(new[:3])}: replaced since the optimizer was made, which still "
                "updates the old one; fix: make optimizer and guard again, or copy_ the new values into the old "
                "parameter"
            )

    # ---- counts, incidents and state

    @property
    def skipped(self) -> int:
        """Number of steps that were withheld, fp16's routine overflows included."""
        return sum(self._policy.skips.values())

    @property
    def machine_faults(self) -> int:
        """Number of steps at which memory or arithmetic failed, and that were taken again or put back."""
        return self._policy.machine_faults

    @property
    def skips(self) -> dict[str, int]:
        """Number of steps that were withheld, by kind.

        The kinds are `nonfinite`, `spike`, `overflow`, `state`, `recheck` and `update`.
        """
        return {kind: count for kind, count in self._policy.skips.items() if kind != "bad_data"}

    @property
    def incidents(self) -> list[IncidentSummary]:
        """The incidents, oldest first: `path`, `cause`, `verdict`, `fix`, and `lines` to show."""
        return [*self._incidents.found]

    def state_dict(self) -> dict[str, Any]:
        """Returns counts, limits and loss scale, for the loop's own checkpoint."""
        return {
            "step": self._step,
            "policy": self._policy.state_dict(),
            "scaling": self._precision.state_dict(),
            "lengths": [float(length) for length in self._states.lengths],
            "best_loss": self._best_loss,
            "newest_kind": self._newest_kind,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them. Snapshots are not part of the state: the next step takes a new one."""
        self._step = self._shown_step = state["step"]
        self._policy.load_state_dict(state["policy"])
        # The loop loads its weights and moments too: checksums of those from before would report a memory fault.
        self.state_replaced()
        self._precision.load_state_dict(state["scaling"])
        self._states.lengths = [torch.tensor(length, device=self._device) for length in state.get("lengths", [])]
        self._best_loss, self._newest_kind = state.get("best_loss", math.inf), state.get("newest_kind", "")
        self.last, self.rolled_back = None, 0


def check_caller(optimizer: Optimizer, *arguments: Any) -> None:
    """Refuses an `optimizer.step()` that the optimizer's guard did not ask for."""
    guard = guard_of(optimizer)
    if guard is not None and guard.updates and not guard._updating:
        raise ConfigError(
            "optimizer.step() was called outside the guard: guard.step() and guard.update() apply the update; remove "
            "the call, or use Guard.attach(model, optimizer) for a loop that cannot be changed"
        )


def guard_of(optimizer: Optimizer) -> LoopGuard | None:
    """Returns the newest guard of an optimizer; None if it has none."""
    newest = _GUARDS.get(optimizer)
    return None if newest is None else newest()
