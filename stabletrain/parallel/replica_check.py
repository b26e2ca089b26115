"""Whether ranks that each have the whole model still have the same one.

ddp averages gradients and never looks at weights again. A bit that flips in one card's memory makes its copy another
one, and nothing shows it: the losses of all ranks are summed, and rank 0's copy is what is saved. So before a state is
evaluated, put by or saved, every rank sums the bits of each of its tensors, and the ranks compare a hash of the sums:

    sum over the elements of the element's bits, read as a whole number, modulo 2^64

A single flipped bit always changes it; several may cancel, which chance does once in 2^64. It reads the state once (a
fraction of a step), and each rank tells 64 letters. Only where the hashes differ are the sums themselves compared.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stabletrain.parallel.ranks import all_gather_object
from stabletrain.records import TrainState

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""


def find_divergence(state: TrainState) -> str:
    """Which ranks have another state than the others, and where, in words; empty where all have the same.

    All ranks must call it, and all get the same answer.
    """
    mine = checksums(state)
    hashes = all_gather_object(hashlib.sha256(repr(mine).encode()).hexdigest())
    return describe(hashes, all_gather_object(mine)) if len(set(hashes)) > 1 else ""


@torch.no_grad()
def checksums(state: TrainState) -> dict[str, int]:
    """The sum of bits of each weight, each moment and each of BatchNorm's statistics, by name.

    Buffers that no checkpoint holds, and those that are no floats, are left out: a model may keep there what it likes.
    """
    tensors, device = tensors_of(state), next(state.model.parameters()).device
    if not tensors:
        return {}
    found = [tensor.view(WHOLE[tensor.element_size()]).sum(dtype=torch.int64).to(device) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(found).tolist(), strict=True))


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """What must be the same on every rank, by name."""
    saved = state.model.state_dict().keys()
    weights = dict(state.model.named_parameters())
    found = {name: weight.detach() for name, weight in weights.items()}
    found |= {name: buffer for name, buffer in state.model.named_buffers() if name in saved}
    for name, weight in weights.items():
        kept = state.optimizer.state.get(weight, {})
        found |= {f"{key} of {name}": value for key, value in kept.items() if isinstance(value, Tensor)}
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


def describe(hashes: Sequence[str], everyones: Sequence[Mapping[str, int]]) -> str:
    """The sentence for states of which not all are the same.

    Args:
        hashes: of each rank's sums.
        everyones: these sums.
    """
    common = max(set(hashes), key=lambda each: (hashes.count(each), -hashes.index(each)))
    others = [rank for rank, each in enumerate(hashes) if each != common]
    right = everyones[hashes.index(common)]
    names = [name for name in right if any(everyones[rank].get(name) != right[name] for rank in others)]
    more = f" and {len(names) - 1} more of its tensors" if len(names) > 1 else ""
    where = f"'{names[0]}'{more} {'differ' if more else 'differs'}" if names else "it has other tensors"
    if 2 * hashes.count(common) > len(hashes):
        who = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        return f"{who} no longer {'have' if len(others) > 1 else 'has'} the state of the other ranks: {where}"
    return f"the ranks no longer have the same state: {where}, and no majority of them says which is right"
