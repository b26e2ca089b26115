"""`BitFlip` flips exactly one bit of one weight or moment."""

import pytest
import torch

from stabletrain.beside.faults import BitFlip
from stabletrain.errors import ConfigError
from tests.beside.faults.given import Scaled, differing, fresh, step, weights


def adamw(fused):
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=fused)


@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
def test_one_bit_of_one_weight_flips(bit):
    state = fresh()
    BitFlip(at=[1], bit=bit).state(state, Scaled())
    step(state)
    before = weights(state)
    state.optimizer.zero_grad()
    changed = [a.view(torch.int32) ^ b.view(torch.int32) for a, b in zip(before, weights(state), strict=True)]
    flipped = torch.cat([bits.flatten() for bits in changed])
    assert flipped.count_nonzero() == 1
    assert flipped.sum().item() & 0xFFFFFFFF == 1 << bit


def test_one_bit_of_a_bf16_weight_flips_and_there_are_sixteen():
    state = fresh(dtype=torch.bfloat16)
    BitFlip(at=[0], bit=15, parameter="2.weight").state(state, Scaled())
    before = state.model[2].weight.detach().clone()
    state.optimizer.zero_grad()
    changed = before != state.model[2].weight
    assert changed.sum() == 1
    assert (before[changed] == -state.model[2].weight[changed]).all()
    with pytest.raises(ConfigError, match="faults.bit=16 is above 15"):
        BitFlip(at=[0], bit=16).state(fresh(dtype=torch.bfloat16), Scaled())


@pytest.mark.parametrize(
    ("optimizer", "where", "key"),
    [
        (adamw(True), "moment", "exp_avg"),
        (adamw(False), "exp_avg_sq", "exp_avg_sq"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "moment", "momentum_buffer"),
    ],
    ids=["fused adamw", "adamw", "sgd"],
)
def test_one_bit_of_one_moment_flips(optimizer, where, key):
    state = fresh(optimizer)
    BitFlip(at=[0, 2], where=where, bit=30).state(state, Scaled())
    step(state)  # at 0 there is no moment yet, or only zeros
    step(state)
    before = weights(state), [state.optimizer.state[p][key].clone() for p in state.model.parameters()]
    state.optimizer.zero_grad()
    after = weights(state), [state.optimizer.state[p][key] for p in state.model.parameters()]
    assert differing(before[0], after[0]) == 0
    assert differing(before[1], after[1]) == 1
