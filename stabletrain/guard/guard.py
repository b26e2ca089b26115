"""`Guard`: no unsafe update reaches the weights of a user's own training loop, and a held step is explained.

    guard = Guard(model, optimizer)
    for x, y in loader:
        guard.step(lambda x, y: loss_fn(model(x), y), batch=(x, y))

A step runs forward and backward, judges loss and gradients, clips, and applies the update, or changes nothing at all.
Its verdict is known before it returns, which takes one host read: on CUDA the host waits for the backward pass.

Several optimizers of one step, such as Muon for matrices and AdamW for the rest, have one guard, which updates the
parameters of all or of none:

    guard = Guard(model, [muon, adamw])

Networks whose steps alternate, such as those of a GAN, have a guard each:

    guard_g, guard_d = Guard(generator, optimizer_g), Guard(discriminator, optimizer_d)

Guards whose steps alternate are coupled, from their third step on: a finite spike is applied with an alarm, because
skips would drive the two networks apart. NaN, Inf, and a gradient norm above 1000 times the recent ones are withheld.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.extension import extension
from stabletrain.guard.attached_guard import AttachedGuard
from stabletrain.guard.loop_guard import LoopGuard, guard_of
from stabletrain.guard.micro_batch import MicroBatch, in_new_containers, loss_of, map_tensors, versions
from stabletrain.guard.rerun import BegunStep, repeat
from stabletrain.guard.samples import NO_BATCH
from stabletrain.records import Number
from stabletrain.several_optimizers import optimizers_of


class Guard(LoopGuard):
    """Guards a training loop.

    Attributes:
        last: the reading of the last step (`records.py`); None before the first. `last.applied` says whether the
            update was applied: call `lr_scheduler.step()` only then.
        updates: whether the guard runs the optimizer's step; an attached loop does so itself.
        alarms: the slow spikes found so far, spikes that coupled guards applied (kind `coupled_spike`), and gradient
            norms that were accepted because they persisted (`norm_level`); each is also printed.
        rolled_back: number of steps whose batches the loop is to pass over, because the last step rolled back; else 0.

    Args:
        model: the model, also wrapped by DDP or `torch.compile`, or sharded by `fully_shard`; or a list of the tensors
            that the loop trains.
        optimizer: any `torch.optim.Optimizer` that holds only parameters of the model; or a list of several, which a
            step updates all or none. One that runs a closure in its step, such as LBFGS, gets the closure of `step`.
        folder: receives a folder for each incident, `step-XXXXXXXX`; it is made when needed.
        rollback: whether to keep snapshots, and go back to a healthy one if skipping steps does not help.
        keep: `all_but_guilty` takes a held step again without the samples at fault (`guard/guilty.py`), if they are at
            most half of its samples; every closure must then take the batch. `none` skips the step. None leaves it to
            `policy`.
        max_norm: largest gradient norm; larger gradients are scaled down, as by `clip_grad_norm_`. None or 0 clips
            nothing.
        name: what the guard's lines and events begin with, where several guards train together.
        precision: `bf16` or `fp16` runs closures under autocast, fp16 with a loss scale; `fp32` and None do not.
        scaler: the loop's own `torch.amp.GradScaler`. The guard scales the loss with it, steps and updates it.
        loader: an object with `state_dict` and `load_state_dict`, which a rollback puts back.
        checksum_every: updates between two checks that only steps changed weights, moments and buffers; 1
            checks every update, 0 never. Use 0 if the loop itself changes them, for example clamps weights.
        recheck_every: steps between two repetitions of a step's gradients, which must have the same bits
            (`guard/rerun.py`); 0 for none. The closure must take the batch, and runs a second time.
        check_update: whether updates of an optimizer that is not proven to keep weights and moments finite are checked,
            and undone if they are not (`guard/checks/update_check.py`). It copies what such a step may write.
        forecast_every: applied steps between two looks of a forecast, which says what will break and near which step
            (`guard/loop_forecast.py`); 25 is usual, 0 predicts nothing. It only watches.
        slow: what a slow spike does (`guard/policy/slow.py`): `off`, `alarm`, or with `rollback=True` `rollback`.
        loss: what the loop's loss is. `minimized` falls or stays, so a lasting rise is a slow spike. `policy` (policy
            gradients) and `adversarial` may rise while all goes well: no trend is judged.
        policy: a `SkipGuard` or `RollbackGuard` with limits of your own, in place of `rollback` and `slow`.
        max_incidents: how many incidents are investigated; 0 for none.
        max_seconds: approximate time limit for each.
        keep_state: whether weights are saved with an incident that can be replayed from its folder.

    Raises:
        ConfigError: model and optimizer do not belong together, or an argument is out of bounds.
    """

    _begun: BegunStep | None = None
    _rehearsed = False

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        **options: Any,
    ) -> "AttachedGuard":
        """Guards a loop that cannot be edited: judges whenever the loop calls `optimizer.step()`.

        The loop keeps its own forward, backward, clipping and loss scale. If it clips, one NaN has spread to every
        gradient before the guard sees them; the step is held all the same.

        Args:
            scaler: the loop's own `GradScaler`; the loop calls `scaler.step(optimizer)` as before.
            options: as for `Guard`, except `precision` and `max_norm`.

        Returns:
            the guard. Its `last.loss` is the sum of what the loop's backward calls differentiated; 0 if unknown.
        """
        return AttachedGuard(model, optimizer, scaler=scaler, **options)

    @staticmethod
    def check(make: Callable[[], Any], only: Sequence[str] = ()) -> Any:
        """Proves what is wrong with a loop before its first step: gradient, resume, data, order of the step's parts.

        `docs/preflight.md` lists the checks and what they are given.

        Args:
            make: builds everything anew, as the script does when it starts, and returns an object or a dictionary with
                `model`, `optimizers`, `loss(batch)` and `batch(step)`; the more of `step`, `save`, `load`, `schedulers`
                and so on it has, the more is checked.
            only: names of checks; empty for all.

        Returns:
            a report: print it, or read its `faults`.

        Raises:
            ConfigError: `make` returned something else, or there is no such check.
        """
        return extension().check_loop(make, only)

    # ---- a step

    def step(self, closure: Callable[..., Any], batch: Any = None, *, step: SupportsIndex | None = None) -> Any:
        """Runs one step: forward, backward, judge, clip, and update, or nothing at all.

        Args:
            closure: runs the forward pass and returns the loss, a scalar; or a tuple with the loss first, and after it
                whatever the loop needs. It must not call `backward`. It is run again if the step is held.
            batch: what the closure is called with: `closure(*batch)` for a tuple or list, else `closure(batch)`. With
                the batch, the guard can also find the samples at fault. A closure without parameters gets none.
            step: see `at`.

        Returns:
            the loss, 0-d, detached, on its device; or the closure's tuple, with all its tensors detached.

        Raises:
            ConfigError: the closure returned no scalar loss, or called `backward` or `optimizer.step` itself.
            TrainingHalted: neither skipping nor rolling back ended the trouble.
        """
        if self._begun is not None:
            raise ConfigError("guard.step() was called after guard.backward(): end such a step with guard.update()")
        value = self.backward(closure, batch)
        loss = self.update(step=step)
        return (loss, *value[1:]) if isinstance(value, tuple) else loss

    def backward(self, closure: Callable[..., Any], batch: Any = None) -> Any:
        """Runs forward and backward of one micro-batch; `update` ends the step.

        As in PyTorch, gradients add up: divide each loss by the number of micro-batches. Arguments, return value and
        errors are those of `step`.
        """
        # Without `_begun` an error gives the step up, and the next one starts from the beginning.
        begun, self._begun = self._begun, None
        first = begun is None
        if begun is None:
            if any(guard_of(each) is not self for each in optimizers_of(self._loop.optimizer)):
                raise ConfigError("a newer Guard was made for this optimizer: use one guard for each optimizer")
            begun = self._loop.begin()
        with begun:
            # Keep the closure with its batch: if the step is held, they run again.
            micro_batch = MicroBatch(closure, in_new_containers(batch))
            if self._loop.policy.keeps and not micro_batch.takes_batch:
                raise ConfigError(f"Guard(keep='all_but_guilty'): {NO_BATCH}")
            begun.versions += versions(batch)
            with self._loop.precision.autocast():
                value = self._run(micro_batch, begun)
            loss = loss_of(value)
            if first and any(parameter.grad is not None for parameter in self._loop.parameters):
                raise ConfigError("the closure called .backward(): return the loss, and the guard differentiates it")
            self._loop.precision.scale(loss).backward()
        self._begun, loss = begun, loss.detach()
        begun.micro_batches.append(micro_batch)
        begun.losses.append(loss)
        return (loss, *map_tensors(Tensor.detach, value[1:])) if isinstance(value, tuple) else loss

    def _run(self, micro_batch: MicroBatch, begun: BegunStep) -> Any:
        """Runs a closure. If it raises an error, logs the first non-finite values before it, a likely reason."""
        try:
            return micro_batch()
        except ConfigError:
            raise
        except Exception as error:
            failed = replace(begun, micro_batches=[*begun.micro_batches, micro_batch])
            self._incidents.explain_error(error, self._loop.rerun(failed, 1.0))
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
        loop, loss = self._loop, begun.loss
        with begun:
            if all(parameter.grad is None for parameter in loop.parameters):
                raise ConfigError("no parameter of the optimizer got a gradient: does the loss come from this model?")
            # Check the machine before the numbers are used: has memory changed since the last update, and does this
            # step's gradient come out with the same bits a second time?
            changed, recheck = loop.state_changed(begun), self._recheck(begun)
            # Judge on the unscaled, unclipped gradients; this waits for the device. Then update, if the gate is open.
            reading = loop.judge(
                loop.steps + 1, loss, loop.parameters, changed=changed, recheck=recheck, lengths=loop.states.lengths
            )
            self._count(reading)
            reading = loop.apply(begun, reading)
        # Follow the policy's verdict on the step.
        try:
            self._follow(begun, reading)
        finally:
            self._end_step()
        return begun.loss  # of the second try, if there was one

    def _recheck(self, begun: BegunStep) -> Number:
        """Returns how far this step's gradients differ from a second computation, if that is due; else 0."""
        recheck = self._loop.policy.recheck
        if self.last is not None and not self._rehearsed:  # the step before this one has made the moments
            self._rehearsed = True
            recheck.rehearse(self._loop.steps)
        if not recheck.repeats(self._loop.steps) or self._loop.parallel.ranks.distributed:
            recheck.forget()
            return 0.0
        return repeat(recheck, self._loop.rerun(begun, float(self._loop.precision.loss_scale())), self._loop.steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Snapshots are not part of it: the next step takes a new one."""
        super().load_state_dict(state)
        self._begun = None
