"""What a check is given of a training loop, and the training step that the loops of the proof set share."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

IGNORED = -100
"""The target that `cross_entropy` leaves out."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Data:
    """Rows in batches, in another order in each epoch; the last batch of an epoch may be smaller.

    Args:
        tensors: inputs and targets (if any), `[rows, ...]` each.
        size: rows of a batch.
        ranks: number of ranks that share the rows.
    """

    def __init__(self, *tensors: Tensor, size: int, ranks: int = 2) -> None:
        self.tensors, self.size, self.ranks = tensors, size, ranks

    def __len__(self) -> int:
        return -(-len(self.rows(0, 0)) // self.size)

    def rows(self, epoch: int, rank: int) -> Tensor:
        """Returns the numbers of a rank's rows of an epoch, in their order."""
        order = torch.randperm(len(self.tensors[0]), generator=torch.Generator().manual_seed(epoch))
        return order[rank :: self.ranks]

    def batch(self, step: int, rank: int = 0) -> tuple[Tensor, ...]:
        """Returns the batch of a step."""
        epoch, place = divmod(step, len(self))
        rows = self.rows(epoch, rank)[place * self.size :][: self.size]
        return tuple(each[rows] for each in self.tensors)


class Loop:
    """A training loop of a user's own.

    A check may use the names below, and a function that makes a fresh loop as the script does when it starts
    (`Program.make`); it knows nothing else of a loop. All of them a user has, most as a line of the script.

    Attributes:
        model: whose weights are trained.
        optimizers: one, or several that step one after the other.
        schedulers: of the learning rate.
        scaler: the `GradScaler`, or None.
        others: what else training changes and a resume must restore, by name, such as an average of the weights.
        precision: of `loss`: `fp32`, `bf16` or `fp16` under autocast, or `fp16_params` if the weights are in fp16.
        compiled: whether `loss` runs a compiled model.
        epoch: number of batches after which the data begin anew.
        ranks: number of ranks that the data are divided among.

    Functions:
        batch(step, rank=0): the tensors that `loss` takes, such as inputs and targets. Depends on nothing else.
        next_batch(): the batch at the loop's position in the data, which moves on.
        loss(batch): the mean loss over the batch's targets, without backward, in the loop's mode and precision.
        step(batch): one training step as the loop does it, with the batch of `next_batch`; returns the loss.
        save(): everything that a resume needs, as it would be written to a file.
        load(state): what a resume does with it, in a fresh loop.

    A subclass makes its parts in `make_data`, `make_model` and `make_optimizers`, in this order.
    """

    others: dict[str, Any]
    precision, compiled, ranks = "fp32", False, 2

    # The options of the loops of the proof set; a check does not know them.
    max_norm, micro_size, every, ema, init_scale = 0.0, 0, 1, False, 2.0**10

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        for name, value in options.items():
            assert hasattr(self, name), f"{type(self).__name__} has no option {name}"
            setattr(self, name, value)
        self.position, self.schedulers, self.others = 0, [], {}
        self.data: Any = self.make_data()
        self.model = self.network = self.make_model()
        self.make_optimizers()
        self.scaler = None
        if self.precision == "fp16":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale, growth_interval=2)
        if self.ema:
            self.others["ema"] = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def make_data(self) -> Data:
        """Returns the data."""
        raise NotImplementedError

    def make_model(self) -> nn.Module:
        """Returns the model."""
        raise NotImplementedError

    def make_optimizers(self) -> None:
        """Makes optimizers and schedulers of the model's parameters."""
        raise NotImplementedError

    def criterion(self, batch: Sequence[Tensor]) -> Tensor:
        """Returns the mean loss over the targets; runs the model as `self.network`."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        return len(self.data)

    def batch(self, step: int, rank: int = 0) -> tuple[Tensor, ...]:
        return self.data.batch(step, rank)

    def next_batch(self) -> tuple[Tensor, ...]:
        self.position += 1
        return self.batch(self.position - 1)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        dtype = DTYPES.get(self.precision)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return self.criterion(batch)

    # The training step, in parts: a fault replaces one of them.

    def step(self, batch: Sequence[Tensor]) -> Tensor:
        self.zero_grad()
        loss = self.backward(batch)
        self.unscale()
        self.clip()
        self.update()
        self.schedule()
        self.average()
        return loss

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, batch: Sequence[Tensor]) -> Tensor:
        """Adds up the gradients of micro-batches, each weighted by its number of targets."""
        total, loss = self.count(batch), torch.zeros(())
        for part in self.micro_batches(batch):
            share = self.loss(part) * (self.count(part) / total)
            self.scaled(share).backward()
            loss += share.detach()
        return loss

    def micro_batches(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Splits a batch into micro-batches of `micro_size` rows; 0 leaves it whole."""
        return [*zip(*(each.split(self.micro_size or len(each)) for each in batch), strict=True)]

    def count(self, batch: Sequence[Tensor]) -> int:
        """Returns the number of targets."""
        targets = batch[-1]
        return len(targets) if targets.is_floating_point() else int((targets != IGNORED).sum())

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self) -> None:
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)

    def clip(self) -> None:
        if self.max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def schedule(self) -> None:
        """Steps the schedulers after every `every` steps: `every=self.epoch` for a scheduler of epochs."""
        if self.position % self.every == 0:
            for scheduler in self.schedulers:
                scheduler.step()

    def average(self) -> None:
        if "ema" in self.others:
            self.others["ema"].update_parameters(self.model)

    # Checkpoints.

    def stateful(self) -> dict[str, Any]:
        """Returns all that has a `state_dict`, by name."""
        found = {"model": self.model, **self.others}
        found |= {f"optimizers.{index}": each for index, each in enumerate(self.optimizers)}
        found |= {f"schedulers.{index}": each for index, each in enumerate(self.schedulers)}
        return found if self.scaler is None else {**found, "scaler": self.scaler}

    def saved(self) -> dict[str, Any]:
        """Returns those of `stateful` that a checkpoint holds."""
        return self.stateful()

    def save(self) -> dict[str, Any]:
        state = {name: each.state_dict() for name, each in self.saved().items()}
        return copy.deepcopy({**state, "position": self.position, "random": torch.get_rng_state()})

    def load(self, state: dict[str, Any]) -> None:
        for name, each in self.saved().items():
            each.load_state_dict(copy.deepcopy(state[name]))
        self.position = state["position"]
        torch.set_rng_state(state["random"])
