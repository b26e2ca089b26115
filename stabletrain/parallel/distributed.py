"""What DDP and FSDP share: one small all-gather per step, from which all ranks derive the same verdict.

Each rank runs its slice of the batch and contributes one row of numbers about its loss, data, buffers and gradients,
and whether it was asked to stop. All ranks compute the same sums of the same rows in the same order. If any rank sees a
fault, all ranks skip the update.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stabletrain.buffers import SavedBuffers
from stabletrain.machine.signals import NoStopRequest, StopRequest
from stabletrain.parallel.failure_report import wait_or_lose_rank
from stabletrain.parallel.ranks import (
    Ranks,
    Timeouts,
    all_gather_object,
    all_gather_tensor,
    broadcast_object,
    set_timeout,
)
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import IGNORE_INDEX, Batch, GradNorms, LossTerms, OwnNumbers, RankPart, StepChecks


class Distributed(SingleProcess):
    """Ranks that each train on a slice of the batch.

    Attributes:
        timeouts: how long the ranks wait for each other; None leaves it as it is.
    """

    def __init__(self, ranks: Ranks, timeouts: Timeouts | None = None) -> None:
        super().__init__(ranks)
        self.timeouts = timeouts
        self._signals: StopRequest | NoStopRequest = NoStopRequest()
        self._stop_signal, self._stop_agreed = "", False

    def rows(self, size: int) -> slice:
        """Returns which samples of a batch of `size` samples belong to this rank."""
        part = size // self.ranks.world_size
        return slice(self.ranks.rank * part, (self.ranks.rank + 1) * part)

    def shard_batch(self, batch: Batch, size: int) -> Batch:
        """Returns this rank's samples, in order, with the number of valid targets of the whole batch.

        A rank with an empty batch runs on zeros without valid targets: the other ranks wait for it.
        """
        empty = not len(batch)
        if empty:
            given = batch.transformed().inputs
            inputs = given.new_zeros(size, *given.shape[1:])
            targets = batch.targets.new_full((size, *batch.targets.shape[1:]), IGNORE_INDEX)
            batch = Batch(inputs, targets, sources=["the batch is empty"] * size)
        part = batch.shard(self.rows(len(batch)))
        return part.counting(0) if empty else part  # floats would all count

    def scale_for_averaging(self, loss: Tensor) -> Tensor:
        """Returns the loss times the world size: PyTorch averages gradients over ranks, but their sum is needed."""
        return loss * self.ranks.world_size

    @torch.no_grad()
    def average_buffers_(self, model: nn.Module, held: SavedBuffers) -> None:
        """Averages the changes of BatchNorm's statistics over the ranks: persistent floating-point buffers only."""
        names = model.state_dict().keys()
        changed = [
            (buffer, before)
            for (name, buffer), before in zip(model.named_buffers(), held.tensors(), strict=True)
            if name in names and buffer.is_floating_point()
        ]
        if not changed:
            return
        # Average the changes, not the values, so that a buffer that did not change keeps its bits.
        change = torch.cat([(buffer - before).flatten().float() for buffer, before in changed])
        dist.all_reduce(change)
        change /= self.ranks.world_size
        for (buffer, before), mean in zip(changed, change.split([b.numel() for b, _ in changed]), strict=True):
            buffer.copy_(before + mean.view_as(before))

    @torch.no_grad()
    def max_over_ranks_(self, values: list[Tensor]) -> None:
        """Takes the elementwise maximum over the ranks, in place. Without values, nothing is sent."""
        if not values:
            return
        flat = torch.cat([value.flatten() for value in values])
        dist.all_reduce(flat, dist.ReduceOp.MAX)
        for value, largest in zip(values, flat.split([value.numel() for value in values]), strict=True):
            value.copy_(largest.view_as(value))

    def on_any_rank(self, flag: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns 1 if a flag is 1 on any rank, else 0, and the first such rank; -1 if all flags are equal."""
        first, other = flag * (self.ranks.world_size - self.ranks.rank), 1 - flag
        self.max_over_ranks_([first, other])
        return (first > 0).float(), torch.where((first > 0) & (other > 0), self.ranks.world_size - first, -1)

    @torch.no_grad()
    def from_next_rank(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the next rank's tensors, of the same shapes and strides."""
        rank, count = self.ranks.rank, self.ranks.world_size
        received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        calls = [dist.P2POp(dist.isend, tensor.contiguous(), (rank - 1) % count) for tensor in tensors]
        calls += [dist.P2POp(dist.irecv, tensor, (rank + 1) % count) for tensor in received]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return [torch.empty_like(here).copy_(theirs) for here, theirs in zip(tensors, received, strict=True)]

    def all_gather(self, row: Tensor) -> Tensor:
        """Returns a row of each rank, `[ranks, numbers]`."""
        rows = row.new_empty(self.ranks.world_size * row.numel())
        all_gather_tensor(rows, row)
        return rows.view(self.ranks.world_size, -1)

    def reduce_stats(
        self, terms: LossTerms, norms: GradNorms, checks: StepChecks
    ) -> tuple[LossTerms, GradNorms, StepChecks]:
        """Combines the numbers of all ranks; see the module."""
        # One row per rank: the numbers of its own slice, then its buffers and stop request, then its gradient norms.
        mine = (terms.total, *terms.parts.values(), checks.bad_data, checks.state_changed, checks.inputs)
        unproven = () if checks.unproven is None else (checks.unproven,)
        head = [
            number if isinstance(number, Tensor) else torch.full_like(terms.total, number)
            for number in (*mine, checks.buffers, bool(self._stop_signal), *unproven)
        ]
        row = torch.cat([torch.stack(head).float(), self.gradient_row(norms)])
        rows = self.all_gather(row)
        # Every rank computes the same from the same rows, so all verdicts agree bit for bit.
        losses = 1 + len(terms.parts)
        total, *parts = self.terms_from_rows(rows[:, :losses]).unbind()
        bad, changed, inputs, buffers, stops, *unproven = rows[:, losses : len(head)].unbind(dim=1)
        # The culprit is the first rank with bad data, a changed state or a non-finite number of its own; -1 for none.
        culprits = (bad > 0) | (changed > 0) | ~torch.isfinite(rows[:, : len(mine)]).all(dim=1)
        first = torch.where(culprits.any(), culprits.float().argmax(), -1)
        met = StepChecks(
            bad_data=bad.amax(),
            inputs=inputs.amax(),
            buffers=buffers.amax(),
            state_changed=changed.amax(),
            recheck=checks.recheck,  # it is the same on every rank already
            stop=(stops > 0).any(),
            rank=first,
            own=OwnNumbers(terms.total, self.own_grad_norm(norms)),
            unproven=unproven[0].amax() if unproven else None,
        )
        all_terms = LossTerms(total, dict(zip(terms.parts, parts, strict=True)))
        return all_terms, self.norms_from_rows(norms, rows[:, len(head) :]), met

    def terms_from_rows(self, rows: Tensor) -> Tensor:
        """Returns the step's loss and its terms, from the shares of all ranks: their sums."""
        return rows.sum(dim=0)

    def gradient_row(self, norms: GradNorms) -> Tensor:
        """Returns the row's numbers about the gradients."""
        raise NotImplementedError

    def norms_from_rows(self, norms: GradNorms, rows: Tensor) -> GradNorms:
        """Returns the norms of the whole gradient, from those numbers of all ranks."""
        raise NotImplementedError

    def set_timeout(self, *, started: bool) -> None:
        """Sets the timeout of all process groups; `started` only after every rank has done its first step."""
        if self.timeouts is not None:
            set_timeout(self.timeouts.steady if started else self.timeouts.start)

    def own_grad_norm(self, norms: GradNorms) -> Tensor:
        """Returns the gradient norm of `OwnNumbers`."""
        return norms.total

    def rank_part(self, own: OwnNumbers | None, factor: float, loss_scale: float) -> RankPart | None:
        """Returns this rank's own numbers of a step, as means over its own part of the batch.

        Args:
            own: None if they are unknown.
            factor: the objective's `own_factor`: the step divides by the targets of the whole batch, a replay of this
                part by its own.
            loss_scale: the step's.
        """
        if own is None:
            return None
        part = RankPart(self.ranks.rank, factor * float(own.loss))
        return self.with_grad_norm(part, float(own.grad_norm), factor / loss_scale)

    def with_grad_norm(self, part: RankPart, grad_norm: float, factor: float) -> RankPart:
        """Adds the gradient norm: `grad_norm` is that of `OwnNumbers`, `factor` converts it to a replay's."""
        raise NotImplementedError

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Returns the elementwise sum over the ranks."""
        dist.all_reduce(values)
        return values

    def gather_samples(self, samples: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Returns the samples of all ranks, with their rank and their index in the whole batch.

        Entries without an index describe the whole batch and are returned once.
        """
        found, of_whole = [], {}
        for rank, part in enumerate(all_gather_object(samples)):
            for each in part:
                if each["index"] is None:
                    of_whole.setdefault(each["what"], each)
                else:
                    found.append({**each, "index": rank * size + each["index"], "rank": rank})
        return [*found, *of_whole.values()]

    def gather(self, here: Any) -> list[Any]:
        """Returns what each rank gives, by rank. Communicates over the hosts' network (gloo)."""
        return all_gather_object(here)

    def any_rank(self, here: bool) -> bool:
        """Returns whether `here` is true on any rank. Communicates over the hosts' network (gloo)."""
        return any(all_gather_object(here))

    def from_main(self, here: Any) -> Any:
        """Returns rank 0's value on every rank. Communicates over the hosts' network (gloo)."""
        return broadcast_object(here)

    def wait_for(self, event: Any) -> None:
        """Waits until the device has reached a CUDA event.

        Raises:
            RankLost: another rank has ended, so the device never will.
        """
        wait_or_lose_rank(event, self.ranks, lambda: self._signals.name == "SIGTERM")

    def request_stop(self, signals: StopRequest | NoStopRequest) -> None:
        """Puts a request to stop into the next step's row."""
        self._signals, self._stop_signal = signals, signals.name

    def note_stop(self, stop: bool) -> None:
        """Remembers the request until the run stops."""
        self._stop_agreed = self._stop_agreed or stop

    def stopping(self, signal: str) -> str:
        """Returns the signal to stop for; empty until every rank has read that one of them was asked to stop."""
        return (signal or "a signal to another rank") if self._stop_agreed else ""
