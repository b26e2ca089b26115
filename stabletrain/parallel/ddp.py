"""DDP: every rank has the whole model, and gradients are averaged during the backward pass.

Source: Li et al., arXiv 2006.15704; `torch.nn.parallel.DistributedDataParallel`.

DDP averages gradients but never compares weights again. If a bit flips in one GPU's memory, that rank's replica differs
from then on without any sign: the losses of all ranks are summed, and rank 0's replica is saved. So before a state is
evaluated, kept as a snapshot or saved, every rank computes a checksum of each of its tensors, and the ranks compare a
hash of these checksums:

    sum of the bits of all elements, read as integers, modulo 2^64

A single flipped bit always changes it; several can cancel with a probability of 2^-64. The check reads the state once
(a fraction of a step), and each rank sends 64 characters. The checksums themselves are compared only if the hashes
differ.
"""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, group
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from stabletrain.checkpoint.tree import local_part
from stabletrain.errors import ConfigError
from stabletrain.machine.memory import within_memory
from stabletrain.parallel.distributed import Distributed
from stabletrain.parallel.owners import Replicas
from stabletrain.parallel.ranks import Ranks, Timeouts, all_gather_object
from stabletrain.records import GradNorms, RankPart, TrainState

SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)
"""The argument that makes every forward pass broadcast rank 0's buffers. Its name depends on the PyTorch version."""


class DDP(Distributed):
    """Whole model copies with averaged gradients.

    Attributes:
        find_unused_parameters: set it if a step may leave parameters without a gradient.
        compare: whether the ranks compare their states before one is evaluated or saved.
    """

    name = "ddp"

    def __init__(
        self,
        ranks: Ranks,
        find_unused_parameters: bool = False,
        compare: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        super().__init__(ranks, timeouts)
        self.compare = compare
        self.owners = Replicas(ranks)
        self.find_unused_parameters = find_unused_parameters
        self.head_apart = not find_unused_parameters  # DDP would count the head as unused
        self._wrapped: DistributedDataParallel | None = None
        self._own: list[Tensor] = []
        self._kept: dict[Tensor, Tensor] | None = None

    def check(self, choices: Mapping[str, str]) -> None:
        """Rejects options that replace the parameters, since DDP holds on to the original tensors.

        Raises:
            ConfigError: `precision=bf16_params`, which gives the optimizer other tensors.
        """
        if choices.get("precision") == "bf16_params":
            raise ConfigError(
                "precision=bf16_params trains in one process only: use precision=bf16, or start it without torchrun"
            )

    def wrap(self, model: nn.Module) -> None:
        """Wraps the model in DDP, which broadcasts rank 0's weights."""
        options: dict[str, Any] = {"find_unused_parameters": self.find_unused_parameters, SYNC_BUFFERS: False}
        # Buffers are not broadcast in each forward pass: `average_buffers_` makes them equal once, from all ranks.
        # The gradients are views of the buckets that are reduced: one copy of them less, in memory and in time.
        self._wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
        # The last moment in which a rank has gradients of its own: forensics compares them to find a faulty rank.
        self._wrapped.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Returns DDP's wrapper. Its forward pass prepares the averaging of the gradients."""
        assert self._wrapped is not None, "wrap(model) comes first"
        return self._wrapped

    def gradient_sync(self, model: nn.Module, last: bool) -> AbstractContextManager:
        """Returns a context that averages gradients after the last micro-batch only."""
        assert self._wrapped is not None, "wrap(model) comes first"
        return self._average_gradients(model) if last else self._wrapped.no_sync()

    @contextmanager
    def _average_gradients(self, model: nn.Module) -> Generator[None]:
        """Averages, and checks that every parameter got a gradient: DDP reduces a bucket only if it has all of its own.

        Raises:
            ConfigError: a parameter got none; names it.
        """
        self._own = []
        yield
        if self.find_unused_parameters:
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise ConfigError(
                    f"parallel.find_unused_parameters=false, but '{name}' got no gradient in a step: DDP would wait "
                    "for it; set parallel.find_unused_parameters=true, or remove the parameter from the model"
                )

    def _reduce(self, bucket: GradBucket) -> Any:
        """Measures this rank's gradients in a bucket, then averages them over the ranks, as DDP does without a hook.

        The gradients are views of the buckets, so after this their own values are gone.
        """
        if self._kept is not None:
            found = [*zip(bucket.parameters(), bucket.gradients(), strict=True)]
            # An error must not leave this hook: the other ranks wait for the bucket.
            kept = within_memory(lambda: {parameter: copied_as(parameter, each) for parameter, each in found})
            self._kept = None if kept is None else self._kept | kept
        # In fp32: squares of fp16 gradients would overflow, and bf16 would round the sum to 8 bits.
        self._own.append(torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float32))
        return allreduce_hook(group.WORLD, bucket)  # ty: ignore[invalid-argument-type]

    def keep_gradients(self) -> bool:
        """Keeps copies of the gradients in the next reduction."""
        self._kept = {}
        return True

    def own_gradients(self, parameters: list[Tensor]) -> list[Tensor | None] | None:
        """Returns the gradients from before the reduction; without one, those of `.grad`. None if memory ran out."""
        kept, self._kept = self._kept, None
        return None if kept is None else [kept.get(parameter, parameter.grad) for parameter in parameters]

    def own_grad_norm(self, norms: GradNorms) -> Tensor:
        """Returns the norm of this rank's gradients before they were averaged; 0 if the step had no backward pass."""
        own, self._own = self._own, []
        return torch.linalg.vector_norm(torch.stack(own)) if own else torch.zeros_like(norms.total)

    def with_grad_norm(self, part: RankPart, grad_norm: float, factor: float) -> RankPart:
        """Adds the norm of this rank's gradients."""
        # The loss was multiplied by the world size before the backward pass (`scale_for_averaging`).
        return part._replace(grad_norm=grad_norm * factor / self.ranks.world_size)

    def find_divergence(self, state: TrainState) -> str:
        """Returns which ranks' replicas differ; empty if none does, or with `compare=false`."""
        return find_divergence(state) if self.compare else ""

    def gradient_row(self, norms: GradNorms) -> Tensor:
        """Returns the gradient norm, which is the same on all ranks unless a reduction went wrong."""
        return norms.total[None]

    def norms_from_rows(self, norms: GradNorms, rows: Tensor) -> GradNorms:
        """Returns the largest norm over the ranks; NaN if any is NaN."""
        return GradNorms(total=torch.amax(rows[:, 0]), each=norms.each)


def copied_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Copies a gradient out of a bucket, where its values lie in the parameter's order, such as `channels_last`.

    `GradBucket.gradients` reads them in row-major order, whatever the parameter's is.
    """
    reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
    if gradient.layout == torch.strided and gradient.is_contiguous() and reach == parameter.numel():
        gradient = gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
    return gradient.clone()


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each element size in bytes."""


def find_divergence(state: TrainState, shards: int = 1) -> str:
    """Returns which ranks have a different state than the others, and in which tensors; empty if all agree.

    All ranks must call it, and all get the same answer.

    Args:
        state: the live state.
        shards: so many ranks in a row share one copy of it; each is compared with those that have the same shards.
    """
    mine = checksums(state)
    # Every rank compares the same hashes, so all take the same branch, and gather the checksums together or not at all.
    hashes = all_gather_object(hashlib.sha256(repr(mine).encode()).hexdigest())
    differ = [first for first in range(shards) if len(set(hashes[first::shards])) > 1]
    if not differ:
        return ""
    first, by_rank = differ[0], all_gather_object(mine)
    return describe(hashes[first::shards], by_rank[first::shards], range(first, len(hashes), shards))


@torch.no_grad()
def checksums(state: TrainState) -> dict[str, int]:
    """Returns the sum of bits of each weight, each moment, each BatchNorm statistic and each average, by name.

    Excludes non-persistent buffers and integer tensors, since a model may use them for anything.
    """
    tensors, device = tensors_of(state), next(state.model.parameters()).device
    if not tensors:
        return {}
    own = [local_part(tensor) for tensor in tensors.values()]
    found = [tensor.view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64).to(device) for tensor in own]
    return dict(zip(tensors, torch.stack(found).tolist(), strict=True))  # waits for the device once, not per tensor


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Returns the tensors that must be the same on every rank, by name."""
    saved = state.model.state_dict().keys()
    weights = dict(state.model.named_parameters())
    found = {name: weight.detach() for name, weight in weights.items()}
    found |= {name: buffer for name, buffer in state.model.named_buffers() if name in saved}
    for name, weight in weights.items():
        kept = state.optimizer.state.get(weight, {})
        found |= {f"{key} of {name}": value for key, value in kept.items() if isinstance(value, Tensor)}
    if state.average is not None:
        found |= {f"average of {name}": value for name, value in state.average.tensors.items()}
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


def describe(hashes: Sequence[str], by_rank: Sequence[Mapping[str, int]], ranks: Sequence[int] | None = None) -> str:
    """Returns the message for states that differ.

    Args:
        hashes: the hash of each rank's checksums.
        by_rank: the checksums of each rank.
        ranks: the numbers of these ranks, if they are not all.
    """
    common = max(set(hashes), key=lambda each: (hashes.count(each), -hashes.index(each)))
    others = [rank for rank, each in enumerate(hashes) if each != common]
    right = by_rank[hashes.index(common)]
    names = [name for name in right if any(by_rank[rank].get(name) != right[name] for rank in others)]
    more = f" and {len(names) - 1} more of its tensors" if len(names) > 1 else ""
    where = f"'{names[0]}'{more} {'differ' if more else 'differs'}" if names else "it has other tensors"
    if 2 * hashes.count(common) > len(hashes):
        who = (
            f"rank{'s' if len(others) > 1 else ''} {', '.join(str(ranks[each] if ranks else each) for each in others)}"
        )
        return f"{who} no longer {'have' if len(others) > 1 else 'has'} the state of the other ranks: {where}"
    return f"the ranks no longer have the same state: {where}, and no majority of them says which is right"
