"""What several ranks share in a step, whatever the kind: one small reduction, from which every rank judges alike.

Each rank runs its part of the batch, and puts a row of numbers into one `all_gather`: its loss terms, whether its data
were bad, its largest input, its gradient norm (or the squares of its part of every tensor), and whether it has been
asked to stop. All ranks then hold the same rows and compute the same sums of them in the same order, so a fault that
one rank alone has seen closes the gate on all of them.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stabletrain.parallel.ranks import Ranks, all_gather_object
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import IGNORE_INDEX, Batch, GradNorms, LossTerms, StepChecks

HEAD = 7
"""Numbers of a row before those of the gradients."""

OWN = 5
"""Of them the first, which are of this rank's part alone; the buffers have met the other ranks' before."""


class Distributed(SingleProcess):
    """Ranks that each have a part of the batch."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._wish, self._heard = "", False
        self._learnt: list[Tensor] | None = None

    def shard_batch(self, batch: Batch, size: int) -> Batch:
        """This rank's samples, in order, and how many targets count in the whole batch.

        A rank whose batch is empty runs with the others all the same, for they wait for it: on zeros, of which no
        target counts.
        """
        if not len(batch):
            inputs = batch.inputs.new_zeros(size, *batch.inputs.shape[1:])
            targets = batch.targets.new_full((size, *batch.targets.shape[1:]), IGNORE_INDEX)
            batch = Batch(inputs, targets, sources=["the batch is empty"] * size)
        size = len(batch) // self.ranks.world_size
        mine = batch.rows(slice(self.ranks.rank * size, (self.ranks.rank + 1) * size))
        return mine.counting(int((batch.targets != IGNORE_INDEX).sum()))

    def scale_for_averaging(self, loss: Tensor) -> Tensor:
        """The loss times the number of ranks: PyTorch takes the mean of the ranks' gradients, and the sum is wanted."""
        return loss * self.ranks.world_size

    @torch.no_grad()
    def average_buffers_(self, model: nn.Module, held: list[Tensor]) -> None:
        """Gives every rank the mean of what the ranks' parts have made of BatchNorm's statistics.

        Buffers that are in the model's state dict, and floats: others are tables that no forward pass writes. The
        changes are averaged, not the values, so that what has not changed keeps its bits.
        """
        names = model.state_dict().keys()
        changed = [
            (buffer, before)
            for (name, buffer), before in zip(model.named_buffers(), held, strict=True)
            if name in names and buffer.is_floating_point()
        ]
        if not changed:
            return
        change = torch.cat([(buffer - before).flatten().float() for buffer, before in changed])
        dist.all_reduce(change)
        change /= self.ranks.world_size
        for (buffer, before), mean in zip(changed, change.split([b.numel() for b, _ in changed]), strict=True):
            buffer.copy_(before + mean.view_as(before))

    @torch.no_grad()
    def max_over_ranks_(self, values: list[Tensor]) -> None:
        """The largest over the ranks, elementwise; where there are no values, nothing is sent."""
        if not values:
            return
        flat = torch.cat([value.flatten() for value in values])
        dist.all_reduce(flat, dist.ReduceOp.MAX)
        for value, largest in zip(values, flat.split([value.numel() for value in values]), strict=True):
            value.copy_(largest.view_as(value))

    def reduce_stats(
        self, terms: LossTerms, norms: GradNorms, checks: StepChecks
    ) -> tuple[LossTerms, GradNorms, StepChecks]:
        """See the module."""
        stop = torch.full_like(terms.total, float(bool(self._wish)))
        bad = checks.bad_data.float()
        head = torch.stack([terms.total, terms.ce, terms.zloss, bad, checks.inputs, checks.buffers, stop])
        row = torch.cat([head.float(), self.of_gradients(norms)])
        rows = row.new_empty(self.ranks.world_size * row.numel())
        dist.all_gather_into_tensor(rows, row)
        rows = rows.view(self.ranks.world_size, -1)
        total, ce, zloss = rows[:, :3].sum(dim=0).unbind()
        culprits = (rows[:, 3] > 0) | ~torch.isfinite(rows[:, :OWN]).all(dim=1)
        first = torch.where(culprits.any(), culprits.float().argmax(), -1)
        met = StepChecks(
            bad_data=(rows[:, 3] > 0).any(),
            inputs=rows[:, 4].amax(),
            buffers=rows[:, 5].amax(),
            stop=(rows[:, 6] > 0).any(),
            rank=first,
        )
        return LossTerms(total, ce, zloss), self.norms_of(norms, rows[:, HEAD:]), met

    def of_gradients(self, norms: GradNorms) -> Tensor:
        """What a row says of the gradients."""
        raise NotImplementedError

    def norms_of(self, norms: GradNorms, rows: Tensor) -> GradNorms:
        """The norms of the whole gradient."""
        raise NotImplementedError

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, elementwise."""
        dist.all_reduce(values)
        return values

    def gather_samples(self, samples: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """With the rank of each, and its place in the whole batch; what is so of the whole batch is said once."""
        found, of_whole = [], {}
        for rank, part in enumerate(all_gather_object(samples)):
            for each in part:
                if each["index"] is None:
                    of_whole.setdefault(each["what"], each)
                else:
                    found.append({**each, "index": rank * size + each["index"], "rank": rank})
        return [*found, *of_whole.values()]

    def any_rank(self, here: bool) -> bool:
        """As every rank says, told among the hosts."""
        return any(all_gather_object(here))

    def request_stop(self, signal: str) -> None:
        """Goes into the next row."""
        self._wish = signal

    def note_stop(self, stop: bool) -> None:
        """Remembered until the run stops."""
        self._heard = self._heard or stop

    def stopping(self, signal: str) -> str:
        """Empty until every rank has read that one of them has been asked to stop."""
        return (signal or "a signal to another rank") if self._heard else ""


def forked() -> AbstractContextManager:
    """Random numbers drawn within it leave no trace in the generators of the CPU and of this process's card."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])
