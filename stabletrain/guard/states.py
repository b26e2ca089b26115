"""Snapshots of a user's training state, to roll back to: weights, moments, limits of the guard, loss scale, loader."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.checkpoint.capture import Stateful, capture, restore
from stabletrain.checkpoint.snapshots import Snapshots, choose_memory
from stabletrain.checkpoint.tree import Tree
from stabletrain.errors import TrainingHalted
from stabletrain.guard.checks.written import state_is_finite
from stabletrain.guard.incidents import LOG
from stabletrain.guard.policy import RollbackGuard
from stabletrain.machine.memory import free_host_memory
from stabletrain.parallel.ranks import current_ranks
from stabletrain.records import TrainState
from stabletrain.stability.precision.base import FullPrecision


@runtime_checkable
class Loader(Protocol):
    """A data loader whose position can be saved, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class NoStates:
    """Keeps no snapshots: the guard skips steps, and never rolls back.

    Attributes:
        lengths: of the last update, and of the weights after it, for the next step's reading; empty if not measured.
    """

    def __init__(self) -> None:
        self.lengths: list[Tensor] = []

    def before_first_update(self, step: int) -> None:
        """Does nothing."""
        del step

    def after_update(self, step: int) -> None:
        """Does nothing."""

    def older(self, step: int) -> Tree | None:
        """Returns None: there is no older state."""
        del step

    def roll_back(self, step: int, *, number: int) -> int:
        """Never called: the guard does not ask for it."""
        del step
        raise TrainingHalted(f"step {number}: there is no state to go back to")

    def put_back(self, number: int) -> int:
        """Never called: the guard does not ask for it."""
        return self.roll_back(0, number=number)


class BesideSnapshot(NamedTuple):
    """What is kept beside a snapshot.

    Attributes:
        reference: the checksums that it must have when it is restored.
        read: number of steps whose batches the loop had read or passed over.
        lengths: see `NoStates`.
        position: of the loader; None if there is none.
    """

    reference: Any
    read: int
    lengths: list[Tensor]
    position: Any


class States(NoStates):
    """Keeps healthy snapshots in host memory.

    Args:
        model: without wrappers.
        policy: decides which states are healthy.
        precision: its loss scale belongs to the state.
        loader: its position belongs to the state; None if it has none.
        any_rank: returns whether its argument is true on any rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        policy: RollbackGuard,
        precision: FullPrecision,
        loader: Loader | None,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        super().__init__()
        self._any_rank, self._chosen = any_rank, False
        self._state, self._policy, self._loader = TrainState(model, optimizer), policy, loader
        self._parts: dict[str, Stateful] = {"guard": policy, "scaling": precision}
        self._snapshots = Snapshots()
        self._beside: dict[int, BesideSnapshot] = {}  # by step
        self._passed, self._first, self._groups = 0, -1, len(optimizer.param_groups)

    def before_first_update(self, step: int) -> None:
        """Takes the first snapshot, before the first judged step, and a new one if the parameter groups changed.

        `step` is the number of steps done.
        """
        if self._groups != (groups := len(self._state.optimizer.param_groups)):
            self._groups = groups
            self._policy.states.forget()
        if not self._policy.states.steps:
            # The loop has already read this step's batch, which the loader's position includes.
            self._first = step
            self._choose_memory()
            self._take(step)

    def _choose_memory(self) -> None:
        """Compares, once, the memory for snapshots with the host's free memory; warns if that is too little."""
        if self._chosen:
            return
        self._chosen, ranks = True, current_ranks()
        line = choose_memory(
            self._state,
            snapshots=self._policy.states.most_retained,
            checkpoints=0,
            ranks=ranks.local_world_size,
            free=free_host_memory(),
            fix="fewer snapshots: Guard(policy=RollbackGuard(snapshots=1))",
            any_rank=self._any_rank,
        )
        if line and ranks.local_rank == 0:
            LOG.warning("%s", line)

    def after_update(self, step: int) -> None:
        """Takes a snapshot if one is due after the step that was just judged."""
        if self._policy.states.due(step):
            self._take(step)

    def _take(self, step: int) -> None:
        retained = self._policy.states
        retained.retain(step, self._policy.healthy)
        self._snapshots.retain(retained.steps)
        self._state.step = step
        self._snapshots.take(step, capture(self._state, self._parts), self._state, only_optimizer_writes=False)
        self._snapshots.retain(retained.steps)
        self._beside[step] = BesideSnapshot(
            self._policy.state_check.reference(self._state),
            step + self._passed + (step == self._first),
            self.lengths,
            None if self._loader is None else copy.deepcopy(self._loader.state_dict()),
        )
        self._beside = {taken: each for taken, each in self._beside.items() if taken in retained.steps}

    def older(self, step: int) -> Tree | None:
        """Returns the newest snapshot of at most `step` steps, as it lies on the host; None if there is none."""
        return self._snapshots.newest(step)

    def roll_back(self, step: int, *, number: int) -> int:
        """Restores the newest healthy state.

        Args:
            step: the step at which the guard gave up on the present state.
            number: of the step as the loop counts, for the message.

        Returns:
            the number of steps whose batches are to be passed over: with a loader, which was put back, those that were
            read since the restored state too.

        Raises:
            TrainingHalted: no healthy state is left.
        """
        policy = self._policy
        before, target = policy.rollback_before, policy.states.target
        if before is not None:  # to before a slow spike, or as far back as there are states
            steps = policy.states.steps
            target = max((step for step in steps if step <= before), default=min(steps, default=None))
        tree = self._newest_intact(target)
        if tree is None:
            raise TrainingHalted(f"step {number}: {policy.reason}; no healthy state is left to go back to")
        # The learning rate stays lowered for `lr_steps` steps counted from now: the loop's steps only count up.
        detour = policy.begin_rollback(step, step)
        read = step + self._passed - self._beside[tree["step"]].read
        self._restore(tree)
        self._passed += detour.skip_batches
        return detour.skip_batches + (0 if self._loader is None else read)

    def put_back(self, number: int) -> int:
        """Restores the newest intact state, because memory or arithmetic failed since.

        Returns:
            0: no batches are to be passed over. With a loader, those since that state are read again.

        Raises:
            TrainingHalted: no intact state is left.
        """
        tree = self._newest_intact(max(self._policy.states.steps, default=None))
        if tree is None:
            raise TrainingHalted(f"step {number}: {self._policy.reason}; no intact state is left to go back to")
        self._restore(tree)
        return 0

    def _restore(self, tree: Tree) -> None:
        """Restores a snapshot, except the counts and budgets of the policy; puts the loader back."""
        kept = self._policy.cumulative_state()
        restore(tree, self._state, self._parts)
        self._policy.load_cumulative_state(kept)
        beside = self._beside[tree["step"]]
        self.lengths = beside.lengths
        self._snapshots.retain(self._policy.states.steps)
        if self._loader is not None:
            self._loader.load_state_dict(copy.deepcopy(beside.position))

    def _newest_intact(self, target: int | None) -> Tree | None:
        """Returns the newest snapshot of at most `target` steps that is finite and has its checksums; or None."""
        while target is not None and (tree := self._snapshots.newest(target)) is not None:
            restore(tree, self._state, {})  # the present state is lost in any case
            intact = self._policy.state_check.restored(self._state, self._beside[tree["step"]].reference)
            if intact and state_is_finite(self._state.model, self._state.optimizer):
                return tree
            self._snapshots.drop(tree["step"])
        return None
