"""`Guard`: no unsafe update reaches the weights of a user's own training loop, and a withheld step is explained.

    guard = Guard(model, optimizer)
    for x, y in loader:
        guard.step(lambda x, y: loss_fn(model(x), y), batch=(x, y))

A step runs forward and backward, judges loss and gradients, clips, and applies the update, or changes nothing at all.
Its verdict is known before it returns, which takes one host read: on CUDA the host waits for the backward pass.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.buffers import SavedBuffers, buffers_of
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.forensics.handler import IncidentRequest, IncidentSummary
from stabletrain.forensics.probes.update import UpdateFault, update_fault
from stabletrain.guarded.agreement import Alone, innermost, together
from stabletrain.guarded.gradients import BareTensors, trained_parameters, unwrapped
from stabletrain.guarded.incidents import Incidents, settings
from stabletrain.guarded.judge import Judge
from stabletrain.guarded.loaded import Loaded
from stabletrain.guarded.part import Part, in_new_containers, loss_of, versions
from stabletrain.guarded.repeat import confirm, repeat
from stabletrain.guarded.rerun import Begun, Generators, Rerun
from stabletrain.guarded.scaling import Scaling, scaling
from stabletrain.guarded.spikes import bounds
from stabletrain.guarded.states import Loader, states
from stabletrain.guarded.subject import LoopSubject, compiled_frames
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Number, RankPart, Reading, TrainState, Verdict
from stabletrain.stability.guard import RollbackGuard, SkipGuard
from stabletrain.stability.guard.comparing import sums
from stabletrain.stability.guard.copies import Copies
from stabletrain.stability.guard.recheck import recheck_every as recheck_of
from stabletrain.stability.guard.update_check import NoUpdateCheck
from stabletrain.stability.guard.written import note_start, state_is_finite

if TYPE_CHECKING:
    from stabletrain.guarded.attached_guard import AttachedGuard

_NEWEST: "WeakKeyDictionary[Optimizer, ref[Guard]]" = WeakKeyDictionary()
"""The guard of each optimizer. A newer guard of the same optimizer replaces it."""


class Guard:
    """Guards a training loop.

    Attributes:
        last: the reading of the last step (`records.py`); None before the first. `last.applied` says whether the
            update was applied: call `lr_scheduler.step()` only then.
        updates: whether the guard runs the optimizer's step; an attached loop does so itself.
        alarms: the slow spikes found so far; each is also printed.
        rolled_back: number of steps whose batches the loop is to pass over, because the last step rolled back; else 0.

    Args:
        model: the model, also wrapped by DDP or `torch.compile`, or sharded by `fully_shard`; or a list of the tensors
            that the loop trains.
        optimizer: any `torch.optim.Optimizer` that holds only parameters of the model.
        folder: receives a folder for each incident, `step-XXXXXXXX`; it is made when needed.
        rollback: whether to keep snapshots, and go back to a healthy one if skipping steps does not help.
        max_norm: largest gradient norm; larger gradients are scaled down, as by `clip_grad_norm_`. None: no clipping.
        precision: `bf16` or `fp16` runs closures under autocast, fp16 with a loss scale; `fp32` and None do not.
        scaler: the loop's own `torch.amp.GradScaler`. The guard scales the loss with it, steps and updates it.
        loader: an object with `state_dict` and `load_state_dict`, which a rollback puts back.
        checksum_every: updates between two checks that nothing but the step changed weights, moments and buffers; 1
            checks between all updates. 0, for none, if the loop itself changes them, as by clamping weights.
        recheck_every: steps between two repetitions of a step's gradients, which must have the same bits
            (`guarded/repeat.py`); 0 for none. The closure must take the batch, and runs a second time.
        check_update: whether updates of an optimizer that is not proven to keep weights and moments finite are checked,
            and undone if they are not (`stability/guard/update_check.py`). It copies what such a step may write.
        slow: what a slow spike does (`stability/guard/slow.py`): `off`, `alarm`, or with `rollback=True` `rollback`.
        policy: a `SkipGuard` or `RollbackGuard` with limits of your own, in place of `rollback` and `slow`.
        max_incidents: how many incidents are investigated; 0 for none.
        max_seconds: approximate time limit for each.
        keep_state: whether weights are saved with an incident that can be replayed from its folder.

    Raises:
        ConfigError: model and optimizer do not belong together, or an argument is out of bounds.
    """

    updates = True

    def __init__(
        self,
        model: nn.Module | Sequence[Tensor],
        optimizer: Optimizer,
        *,
        folder: str | Path = "incidents",
        rollback: bool = False,
        slow: str = "alarm",
        max_norm: float | None = None,
        precision: str | None = None,
        scaler: GradScaler | None = None,
        loader: Any = None,
        policy: SkipGuard | None = None,
        checksum_every: int = 0,
        recheck_every: int = 0,
        check_update: bool = True,
        max_incidents: int = 10,
        max_seconds: float = 120.0,
        keep_state: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            if not isinstance(model, list | tuple) or not all(isinstance(each, Tensor) for each in model):
                raise ConfigError(
                    f"Guard({type(model).__name__}, ...): give the nn.Module that is trained, or a list of tensors"
                )
            model = BareTensors(model)
        optimizer = unwrapped(optimizer)
        self._outer, self._model, self._optimizer = model, innermost(model), optimizer
        self._parameters = trained_parameters(self._model, optimizer)
        self._device = self._parameters[0].device
        self._agreement: Alone = together()
        several = self._agreement.ranks.distributed
        chosen = scaling(precision, scaler, self._device, together=several)
        if loader is not None and not isinstance(loader, Loader):
            raise ConfigError(
                f"Guard(loader={type(loader).__name__}(...)) has no state_dict and load_state_dict: leave it out, or "
                "use torchdata's StatefulDataLoader"
            )
        self._policy = policy or (RollbackGuard(slow=slow) if rollback else SkipGuard(slow=slow))
        if checksum_every < 0:
            raise ConfigError(
                f"Guard(checksum_every={checksum_every}) is below 0: 1 checks between all updates, 0 never"
            )
        self._policy.check_state_every(checksum_every)
        if recheck_every < 0:
            raise ConfigError(f"Guard(recheck_every={recheck_every}) is below 0: 250 is usual, 0 repeats nothing")
        self._policy.recheck = recheck_of(recheck_every)
        if not check_update:
            self._policy.update_check = NoUpdateCheck()
        self._state = TrainState(self._model, optimizer)
        self._states = states(self._model, optimizer, self._policy, chosen, loader, self._agreement.any_rank)
        self._judge = Judge(
            self._model,
            optimizer,
            scaling=chosen,
            agreement=self._agreement,
            policy=self._policy,
            max_norm=max_norm,
        )
        self._incidents = Incidents(Path(folder), max_incidents, max_seconds, self._agreement.ranks)
        self._keep_state, self._frames = keep_state, compiled_frames()
        self._step, self._begun, self._usual, self._newest_kind = 0, None, [], ""
        self._known_start, self._held, self._idle, self._rehearsed = False, set(), 0, False
        self._first = {id(parameter) for parameter in self._model.parameters()}
        self._loaded = Loaded()
        self._loaded.listen(self._model, optimizer)
        self._best, self._updating = math.inf, False
        self.alarms: list[Alarm] = []
        self.last: Reading | None = None
        self.rolled_back = 0
        self._number, self._next_number = 0, None  # of the last step and of the next, as the loop counts
        _NEWEST[optimizer] = ref(self)
        optimizer.register_step_pre_hook(check_caller)

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        criterion: Callable[..., Any] | None = None,
        **options: Any,
    ) -> "AttachedGuard":
        """Guards a loop that cannot be edited: judges whenever the loop calls `optimizer.step()`.

        The loop keeps its own forward, backward, clipping and loss scale. If it clips, one NaN has spread to every
        gradient before the guard sees them; the step is withheld all the same.

        Args:
            scaler: the loop's own `GradScaler`; the loop calls `scaler.step(optimizer)` as before.
            criterion: the module that computes the loop's loss, such as `nn.CrossEntropyLoss()`. With it, a loss that
                is not finite is seen although its gradients are; not needed if the model returns its loss.
            options: as for `Guard`, except `precision` and `max_norm`.

        Returns:
            the guard. Its `last.loss` is 0 if the loop's loss is not known.
        """
        from stabletrain.guarded.attached_guard import AttachedGuard

        return AttachedGuard(model, optimizer, scaler=scaler, criterion=criterion, **options)

    # ---- a step

    def step(self, closure: Callable[..., Any], batch: Any = None, *, step: SupportsIndex | None = None) -> Tensor:
        """Runs one step: forward, backward, judge, clip, and update, or nothing at all.

        Args:
            closure: runs the forward pass and returns the loss, a scalar. It must not call `backward`. It is run again
                if the step is withheld.
            batch: what the closure is called with: `closure(*batch)` for a tuple or list, else `closure(batch)`. With
                the batch, the guard can also find the samples at fault. A closure that takes nothing is called without.
            step: see `at`.

        Returns:
            the loss, 0-d, detached, on its device.

        Raises:
            ConfigError: the closure returned no scalar loss, or called `backward` or `optimizer.step` itself.
            TrainingHalted: neither skipping nor rolling back ended the trouble.
        """
        if self._begun is not None:
            raise ConfigError("guard.step() was called after guard.backward(): end such a step with guard.update()")
        self.backward(closure, batch)
        return self.update(step=step)

    def at(self, step: SupportsIndex) -> None:
        """Sets the number of the next step as the loop counts, which messages and incidents then show.

        Without it they show how many steps the guard has judged. The numbers may repeat, skip and go back.

        Raises:
            ConfigError: the number is negative.
        """
        if (number := index(step)) < 0:
            raise ConfigError(f"step={number} is below 0: give the number of the step")
        self._next_number = number

    def backward(self, closure: Callable[..., Any], batch: Any = None) -> Tensor:
        """Runs forward and backward of one micro-batch; `update` ends the step.

        As in PyTorch, gradients add up: divide each loss by the number of micro-batches. Arguments, return value and
        errors are those of `step`.
        """
        first = self._begun is None
        if self._begun is None:
            newest = _NEWEST.get(self._optimizer)
            if newest is None or newest() is not self:
                raise ConfigError("a newer Guard was made for this optimizer: use one guard for each optimizer")
            self._begun = self._begin()
        begun, part = self._begun, Part(closure, in_new_containers(batch))
        try:
            begun.versions += versions(batch)
            with self._scaling.autocast():
                value = self._run(part, begun)
            loss = loss_of(value)
            if first and any(parameter.grad is not None for parameter in self._parameters):
                raise ConfigError("the closure called .backward(): return the loss, and the guard differentiates it")
            self._scaling.scale(loss).backward()
        except BaseException:
            self._begun = None  # the step is given up; the next one begins anew
            put_back(begun.buffers, self._device)  # such as the statistics of a batch norm
            raise
        begun.parts.append(part)
        begun.losses.append(loss.detach())
        return loss.detach()

    def _run(self, part: Part, begun: Begun) -> Any:
        """Runs a closure. If it raises, tells where values were not finite before, which may be why."""
        try:
            return part()
        except ConfigError:
            raise
        except Exception as error:
            self._incidents.explain_error(error, self._rerun(replace(begun, parts=[*begun.parts, part]), 1.0))
            raise

    def update(self, *, step: SupportsIndex | None = None) -> Tensor:
        """Judges the step, clips, and applies the update, or changes nothing at all.

        Args:
            step: see `at`.

        Returns:
            the loss: the sum over the micro-batches, 0-d, detached.

        Raises:
            ConfigError: no `backward` came before, or no parameter got a gradient.
            TrainingHalted: see `step`.
        """
        begun, self._begun = self._begun, None
        if step is not None:
            self.at(step)
        if begun is None:
            raise ConfigError("guard.update() was called without guard.backward() before it")
        if all(parameter.grad is None for parameter in self._parameters):
            raise ConfigError("no parameter of the optimizer got a gradient: does the loss come from this model?")
        loss = sum(begun.losses[1:], begun.losses[0])
        changed, recheck = self._changed(begun), self._repeat(begun)
        self._settle(begun, self._judged(self._step + 1, loss, changed=changed, recheck=recheck))
        return loss

    def _repeat(self, begun: Begun) -> Number:
        """Returns how far this step's gradients differ from a second computation, if that is due; else 0."""
        recheck = self._policy.recheck
        if self.last is not None and not self._rehearsed:  # the step before this one has made the moments
            self._rehearsed = True
            recheck.rehearse(self._step)
        if not recheck.repeats(self._step) or self._agreement.ranks.distributed:
            return 0.0
        return repeat(recheck, self._rerun(begun, float(self._scaling.loss_scale())), self._step)

    def _settle(self, begun: Begun, reading: Reading) -> None:
        """Applies the update or withholds it, and follows the verdict."""
        reading = self._count(reading)
        try:
            self._conclude(begun, self._applied(begun, reading))
        finally:
            self._end_step()

    def _end_step(self) -> None:
        """Ends a step, whatever became of it."""
        self._say_what_is_not_trained()
        self._loaded.noticed = False  # what was loaded since was the guard's own doing

    def _applied(self, begun: Begun, reading: Reading) -> Reading:
        """Applies the update if the gate is open; returns the reading, changed if the update was undone."""
        if not reading.applied or self._apply():
            return reading
        begun.after_forward = buffers_of(self._model).save()
        return reading._replace(applied=False, bad_update=True)

    def _count(self, reading: Reading) -> Reading:
        """Counts the step; returns its reading with the lengths of the update before it."""
        if self._states.lengths:  # they are on the host when this step's reading is
            update, weights = torch.stack(self._states.lengths).tolist()
            reading = reading._replace(update=update, weights=weights)
        # The guard itself goes by its own count: the loop's numbers may repeat or go back.
        self._number = reading.step if self._next_number is None else self._next_number
        self._next_number, self._step = None, reading.step
        return reading

    def _conclude(self, begun: Begun, reading: Reading) -> None:
        """Judges a step whose update was applied or withheld, and follows the verdict."""
        policy, shown = self._policy, reading._replace(step=self._number)
        verdict = policy.judge(reading)
        if policy.recheck.gives_up(reading):
            self._incidents.note(
                f"step {self._number}: too little memory to compute a gradient twice, so no step is repeated any more; "
                "training is not affected"
            )
        if policy.recheck.wrong(reading):
            verdict = self._confirm(begun, reading, verdict)
        self.last, self.rolled_back = shown, 0
        if reading.applied:
            self._best = min(self._best, reading.loss)
            self._usual = begun.parts
        else:
            verdict = self._withhold(begun, shown, verdict)
        if verdict is Verdict.RESTORE and policy.kind != "state":
            self._take_again(begun, reading)
            return
        self._show(policy.new_alarms())
        self._remember_state()
        if verdict is Verdict.RESTORE:
            self._put_back()
        elif verdict is Verdict.ROLLBACK:
            self._roll_back()
        elif verdict is Verdict.HALT:
            raise TrainingHalted(f"step {self._number}: {policy.reason}")
        else:
            self._states.after_update(reading.step)

    def _take_again(self, begun: Begun, reading: Reading) -> None:
        """Takes a withheld step again, because its numbers were wrong and have changed nothing.

        If the update was wrong, it is applied again. Otherwise the closures run twice more, and the gradients of both
        runs must have the same bits.
        """
        self._incidents.note(f"step {self._number}: taken again, with the same batch and learning rate")
        if reading.bad_update:
            if begun.after_forward is not None:
                put_back(begun.after_forward, self._device)
            self._scaling.unscaled_again(self._optimizer)
            self._conclude(begun, self._applied(begun, reading._replace(applied=True, bad_update=False)))
            return
        first, second = self._run_again(begun), self._run_again(begun)
        loss = sum(begun.losses[1:], begun.losses[0])
        differs = torch.full((), 0.0 if torch.equal(first, second) else math.inf, device=self._device)
        again = self._judged(reading.step, loss, recheck=differs)
        self._conclude(begun, self._applied(begun, again))

    def _run_again(self, begun: Begun) -> Tensor:
        """Runs the closures of a step from where it began; returns the sums of the gradients' bits."""
        parts, begun.losses = begun.parts, []
        put_back(begun.buffers, self._device)
        begun.generators.set()
        self._optimizer.zero_grad(set_to_none=True)
        for part in parts:
            with self._scaling.autocast():
                loss = loss_of(part())
            self._scaling.scale(loss).backward()
            begun.losses.append(loss.detach())
        return sums([parameter.grad for parameter in self._parameters], self._device)

    def _confirm(self, begun: Begun, reading: Reading, verdict: Verdict) -> Verdict:
        """Returns the verdict on a step whose gradients came out differently: a third computation tells more."""
        recheck = self._policy.recheck
        if not recheck.compared:  # it was taken again, and differs again
            return verdict
        found = confirm(recheck, self._rerun(begun, 1.0))
        if found.third == "second" or found.agreed:
            recheck.found = found
            return verdict
        recheck.stop()
        self._incidents.note(
            f"step {self._number}: the closure never gives the same gradients again, so it depends on more than "
            "weights, buffers, batch and PyTorch's random numbers: no step is repeated any more"
        )
        return Verdict.SKIP

    def _changed(self, begun: Begun) -> Number:
        """Returns 1 if weights, moments or buffers are not what the last update left, else 0."""
        return self._policy.state_check.before_update(self._state, begun.buffers)

    def _remember_state(self) -> None:
        """Takes the checksums of the state after a step, if they are wanted."""
        if not self._policy.state_check.every:
            return
        self._state.step = self._state.executed_steps = self._step
        self._policy.state_check.after_update(self._state, buffers_of(self._model).save())

    def _show(self, alarms: list[Alarm]) -> None:
        """Prints alarms, and keeps them."""
        self.alarms += alarms
        for alarm in alarms:
            own = "" if self._number == self._step else f" (as the guard counts steps; this is its step {self._step})"
            self._incidents.note(f"step {self._number}: {alarm.text}{own}")

    @property
    def _scaling(self) -> Scaling:
        return self._judge.scaling

    def _begin(self) -> Begun:
        """Begins a step: drops the old gradients, and records what forward and backward change."""
        if self._loaded.noticed:
            self.state_replaced()
        self._look_at_parameters()
        if not self._known_start:
            note_start(self._model, self._optimizer)
            self._known_start = True
        self._states.before_first_update(self._step)
        if self.updates:
            self._optimizer.zero_grad(set_to_none=True)
        return Begun(Generators.now(self._device), buffers_of(self._model).save())

    def _look_at_parameters(self) -> None:
        """Looks again at what is trained, if the loop has added parameters or replaced some."""
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        if held != self._held:
            self._parameters, self._held = trained_parameters(self._model, self._optimizer), held

    def _say_what_is_not_trained(self) -> None:
        """Tells of parameters that the loop has put in the place of those that the optimizer trains."""
        idle = sum(parameter.grad is None for parameter in self._parameters)
        if idle == self._idle:  # as in the step before
            return
        self._idle = idle
        there = {id(parameter) for parameter in self._model.parameters()}
        if all(id(parameter) in there for parameter in self._parameters):
            return
        named = self._model.named_parameters()
        new = [name for name, each in named if each.requires_grad and id(each) not in self._held | self._first]
        if new:
            self._incidents.note(
                f"step {self._number}: {', '.join(new[:3])}: replaced since the optimizer was made, which has the old "
                "parameter still; fix: make optimizer and guard anew, or copy_ the new values into the old parameter"
            )

    def state_replaced(self) -> None:
        """Tells the guard that the loop has given weights, moments or buffers other values itself.

        `load_state_dict` of the model and of the optimizer tell it without this. The checksums from before no longer
        count, and the next step keeps a new state to go back to.
        """
        self._loaded.noticed = False
        self._policy.states.forget()
        self._policy.check_state_every(self._policy.state_check.every)
        self._known_start = False

    def _apply(self) -> bool:
        """Applies the update; returns whether it stays: one that is not finite is undone."""
        lengths, scaling = self._policy.lengths, self._scaling
        before, kept = lengths.before(self._model), self._copies()
        scale = None if kept is None else scaling.saved()
        self._updating = True
        try:
            with undone_if_raised(kept), self._lowered_rate():
                scaling.update(self._optimizer, True, False)
        finally:
            self._updating = False
        if not self._stays(kept):
            scaling.put_back(scale)
            return False
        self._states.lengths = [*lengths.after(before, summed).values()]
        return True

    def _judged(self, step: int, loss: Tensor, **numbers: Any) -> Reading:
        """Returns the reading of the step that was just computed; the arguments are those of `Judge`."""
        unproven = bool(self._policy.update_check.why(self._optimizer))
        return self._judge(step, loss, self._parameters, unproven=unproven, **numbers)

    def _copies(self) -> Copies | None:
        """Returns copies of what the update may write, to check and undo it; None if it needs no check."""
        return self._policy.update_check.copy(self._model, self._optimizer) if self._judge.unproven else None

    def _stays(self, kept: Copies | None) -> bool:
        """Returns whether the update that was just applied is finite, on all ranks; if not, undoes it."""
        if kept is None or not self._agreement.any_rank(not kept.are_finite_now()):
            return True
        kept.put_back()
        return False

    @contextlib.contextmanager
    def _lowered_rate(self) -> Generator[None]:
        """A context in which the learning rate is lower, for a while after a rollback."""
        factor = self._policy.lr_multiplier(self._step)
        groups = [group for group in self._optimizer.param_groups if factor != 1.0 and "lr" in group]
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _withhold(self, begun: Begun, reading: Reading, verdict: Verdict) -> Verdict:
        """Restores the buffers, lowers the loss scale after an overflow, and explains the step; returns the verdict."""
        put_back(begun.buffers, self._device)
        if not reading.bad_update:  # that one was applied, and then undone with all else
            self._scaling.update(self._optimizer, False, reading.overflow)
        policy = self._policy
        if reading.overflow:  # routine in fp16: an overflow only lowers the loss scale
            return verdict
        if policy.kind == "recheck" and policy.recheck.found is None:  # the closure never repeats: no fault
            return verdict
        new = policy.consecutive == 1 or (verdict is Verdict.HALT and policy.kind != self._newest_kind)
        if new or policy.kind in ("state", "recheck"):
            subject = self._subject(begun, reading)
            known = settings(
                self._scaling.name,
                self._optimizer.param_groups[0],
                clips=self._judge.clips,
                best_loss=self._best,
            )
            # Sharded moments are not whole on any rank.
            optimizer = None if subject.sharded else self._optimizer
            found = self._incidents.investigate(subject, IncidentRequest(policy.kind, optimizer, bounds(policy)), known)
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

    def _verdict_on_machine(self, begun: Begun, reading: Reading, verdict: Verdict, cause: str | None) -> Verdict:
        """Returns RESTORE for a withheld step if memory or arithmetic was at fault, and not data or settings.

        Args:
            cause: what the investigation found; None if there was none.
        """
        policy, step = self._policy, self._step
        if policy.kind == "recheck":
            return policy.on_machine_fault(step, policy.reason, damaged=False, otherwise=verdict)
        if policy.kind not in ("nonfinite", "spike", "update"):
            return verdict
        damaged = cause == "corrupt_state" or not state_is_finite(self._model, self._optimizer)
        if self._agreement.any_rank(damaged):
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

    def _can_take_again(self, begun: Begun, reading: Reading) -> bool:
        """Returns whether the step can be taken again: the update, or closures that have not changed their batches."""
        if self._agreement.ranks.distributed or reading.bad_update:
            return not self._agreement.ranks.distributed
        return self.updates and not any(tensor._version != version for tensor, version in begun.versions)

    def _subject(self, begun: Begun, reading: Reading) -> LoopSubject:
        """Collects what an investigation of the step needs."""
        ranks, own, step = self._agreement.ranks, None, self._step
        if ranks.distributed:
            own = RankPart(ranks.rank, float(sum(begun.losses[1:], begun.losses[0])))
        return LoopSubject(
            self._rerun(begun, reading.loss_scale),
            reading,
            step - 1,
            usual=self._usual,
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
        self._updating = True
        try:
            with self._lowered_rate():
                return update_fault(self._model, self._optimizer, self._run_own_step)
        finally:
            self._updating = False

    def _run_own_step(self) -> None:
        """Runs the optimizer's step, without judging it."""
        self._optimizer.step()

    def _gap(self, begun: Begun) -> str:
        """Returns why the closures do not compute the loop's own loss; empty if they do."""
        del begun
        return ""

    def _rerun(self, begun: Begun, loss_scale: float) -> Rerun:
        """Returns what runs a step's closures again."""
        buffers = buffers_of(self._model)
        return Rerun(self._model, self._outer, self._parameters, buffers, self._scaling, begun, loss_scale)

    def _roll_back(self) -> None:
        """Restores the newest healthy state."""
        reason = self._policy.reason
        self.rolled_back = self._states.roll_back(self._step, number=self._number)
        self._remember_state()
        self._incidents.note(
            f"step {self._number}: {reason}: rollback {self._policy.rollbacks}; pass over the batches of "
            f"{self.rolled_back} steps (guard.rolled_back)"
        )

    def _put_back(self) -> None:
        """Restores the newest intact state, because memory or arithmetic failed since."""
        reason = self._policy.reason
        self._policy.skips["state"] += 1  # a loop does not read the step's batch again by itself
        self._policy.state_check.put_back_buffers()  # the saved state lacks buffers that the model does not save
        self.rolled_back = self._states.put_back(self._number)
        self._remember_state()
        self._incidents.note(
            f"step {self._number}: {reason}: the newest intact state is put back; go on with any batch"
        )

    # ---- what has happened

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
            "scaling": self._scaling.state_dict(),
            "lengths": [float(length) for length in self._states.lengths],
            "best_loss": self._best,
            "newest_kind": self._newest_kind,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them. Snapshots are not part of the state: the next step takes a new one."""
        self._step = self._number = state["step"]
        self._policy.load_state_dict(state["policy"])
        # The loop loads its weights and moments too: checksums of those from before would report a memory fault.
        self.state_replaced()
        self._scaling.load_state_dict(state["scaling"])
        self._states.lengths = [torch.tensor(length, device=self._device) for length in state.get("lengths", [])]
        self._best, self._newest_kind = state.get("best_loss", math.inf), state.get("newest_kind", "")
        self._begun, self.last, self.rolled_back = None, None, 0


def summed(values: Tensor) -> Tensor:
    """Returns the elementwise sum over the ranks, of sharded parameters."""
    dist.all_reduce(values)
    return values


def check_caller(optimizer: Optimizer, *arguments: Any) -> None:
    """Refuses an `optimizer.step()` that the optimizer's guard did not ask for."""
    newest = _NEWEST.get(optimizer)
    guard = None if newest is None else newest()
    if guard is not None and guard.updates and not guard._updating:
        raise ConfigError(
            "optimizer.step() was called outside the guard: guard.step() and guard.update() apply the update; remove "
            "the call, or use Guard.attach(model, optimizer) for a loop that cannot be changed"
        )


@contextlib.contextmanager
def undone_if_raised(kept: Copies | None) -> Generator[None]:
    """A context in which an update runs: if it raises an error half-way, nothing of it stays."""
    try:
        yield
    except BaseException:
        if kept is not None:
            kept.put_back()
        raise


def put_back(saved: SavedBuffers, device: torch.device) -> None:
    """Gives the buffers the values that were saved."""
    saved.buffers.put_back()
    saved.buffers.restore_(saved, torch.zeros((), dtype=torch.bool, device=device))


def is_round(count: int) -> bool:
    """Returns whether a repeated message is logged at this count: at 1, 2, 3, 10, 100, 1000 and so on."""
    return count <= 3 or count in (10**power for power in range(1, 9))
