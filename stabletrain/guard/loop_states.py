"""The states of a user's own loop that a rollback restores: snapshots, and the position of the data loader."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.checkpoint.snapshots import choose_memory
from stabletrain.checkpoint.tree import Tree
from stabletrain.extension import NoForecast
from stabletrain.guard.policy import RollbackGuard
from stabletrain.guard.states import KeptStates
from stabletrain.machine.memory import free_host_memory
from stabletrain.parallel.ranks import current_ranks
from stabletrain.records import TrainState
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.tracking.tracker import NoTracker


@runtime_checkable
class Loader(Protocol):
    """A data loader whose position can be saved, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class WentBack(NamedTuple):
    """What going back did.

    Attributes:
        step: number of steps of the restored state, as the guard counts.
        pass_over: number of steps whose batches the loop is to pass over.
    """

    step: int
    pass_over: int


class NoStates:
    """Keeps no snapshots: the guard skips steps, and never rolls back.

    Attributes:
        lengths: of the last update, and of the weights after it, for the next step's reading; empty if not measured.
    """

    def __init__(self) -> None:
        self.lengths: list[Tensor] = []

    def before_first_update(self, step: int) -> None:
        """Does nothing."""

    def after_update(self, step: int) -> None:
        """Does nothing."""

    def older(self, step: int) -> Tree | None:
        """Returns None: there is no older state."""

    def roll_back(self, step: int, *, number: int) -> WentBack | None:
        """Returns None: there is no state to go back to."""

    def put_back(self, number: int) -> WentBack | None:
        """Returns None: there is no state to put back."""


class BesideSnapshot(NamedTuple):
    """What is kept beside a snapshot.

    Attributes:
        read: number of steps whose batches the loop had read or passed over.
        lengths: see `NoStates`.
        position: of the loader; None if there is none.
    """

    read: int
    lengths: list[Tensor]
    position: Any


class LoopStates(KeptStates, NoStates):
    """Keeps healthy snapshots of a user's loop.

    Args:
        model: without wrappers.
        policy: decides which states are healthy.
        precision: its loss scale belongs to the state.
        loader: its position belongs to the state; None if it has none.
        tracker: receives events and lines.
        forecast: its series belong to the state.
        any_rank: returns whether its argument is true on any rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        policy: RollbackGuard,
        precision: FullPrecision,
        loader: Loader | None,
        tracker: NoTracker,
        forecast: NoForecast,
        any_rank: Callable[[bool], bool],
    ) -> None:
        super().__init__(
            TrainState(model, optimizer),
            {"guard": policy, "scaling": precision, "forecast": forecast},
            guard=policy,
            tracker=tracker,
            any_rank=any_rank,
            only_optimizer_writes=False,  # the loop may write weights at any time
        )
        self.lengths = []
        self._loader, self._chosen = loader, False
        self._beside: dict[int, BesideSnapshot] = {}  # by step
        self._passed, self._first = 0, -1

    def before_first_update(self, step: int) -> None:
        """Takes the first snapshot, before the first judged step; `step` is the number of steps done."""
        if not self._guard.states.steps:
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
            self.state,
            snapshots=self._guard.states.most_retained,
            checkpoints=0,
            ranks=ranks.local_world_size,
            free=free_host_memory(),
            fix="fewer snapshots: Guard(policy=RollbackGuard(snapshots=1))",
            any_rank=self._any_rank,
        )
        if line:
            self._tracker.note(line)

    def after_update(self, step: int) -> None:
        """Takes a snapshot if one is due after the step that was just judged."""
        if self.snapshot_due(step):
            self._take(step)

    def _take(self, step: int) -> None:
        self.state.step = step
        position = None if self._loader is None else copy.deepcopy(self._loader.state_dict())
        self._beside[step] = BesideSnapshot(step + self._passed + (step == self._first), self.lengths, position)
        self.take_snapshot()

    def retain(self) -> None:
        """Frees the snapshots that the policy no longer retains, and what is kept beside them."""
        super().retain()
        self._beside = {step: each for step, each in self._beside.items() if step in self._guard.states.steps}

    def older(self, step: int) -> Tree | None:
        """Returns the newest snapshot of at most `step` steps, as it lies on the host; None if there is none."""
        return self.snapshots.newest(step)

    def roll_back(self, step: int, *, number: int) -> WentBack | None:
        """Restores the newest healthy state; returns None if none is left.

        With a loader, which is put back, the batches that it gave since that state are passed over.

        Args:
            step: the step at which the guard gave up on the present state.
            number: of the step as the loop counts, for the report of a damaged snapshot.
        """
        tree = self.newest_intact(self.before_trouble(), step=number)
        if tree is None:
            return None
        # The learning rate stays lowered for `lr_steps` steps counted from now: the loop's steps only count up.
        plan = self._guard.begin_rollback(step, step)
        read = step + self._passed - self._beside[tree["step"]].read
        self._put_in_place(tree)
        self._passed += plan.skip_batches
        return WentBack(tree["step"], plan.skip_batches + (0 if self._loader is None else read))

    def put_back(self, number: int) -> WentBack | None:
        """Restores the newest intact state, because memory or arithmetic failed since; returns None if none is left.

        No batches are passed over. With a loader, those since that state are read again.
        """
        tree = self.newest_intact(max(self._guard.states.steps, default=None), step=number)
        if tree is None:
            return None
        self._put_in_place(tree)
        return WentBack(tree["step"], 0)

    def _put_in_place(self, tree: Tree) -> None:
        """Restores a snapshot, except the counts and budgets of the policy; puts the loader back."""
        self.restore(tree, self.cumulative_states())
        beside = self._beside[tree["step"]]
        self.lengths = beside.lengths
        self.retain()
        if self._loader is not None:
            self._loader.load_state_dict(copy.deepcopy(beside.position))
