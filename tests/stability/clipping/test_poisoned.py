"""Non-finite gradients in every kind of clipping: they enter no statistic and do not change finite gradients."""

from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.monitors.tensor_norms import measure
from stabletrain.records import GradNorms
from tests.stability.clipping.given import (
    CLOSED,
    KINDS,
    OPEN,
    as_tensors,
    called,
    clip,
    equal_trees,
    flat,
    give,
    grads,
    small,
    tensors,
)

NAN, INF = float("nan"), float("inf")


def one_element(value):
    def poison(model):
        model.conv.weight.grad[0, 0, 0, 0] = value
        return measure(model)

    return poison


def everywhere(value):
    def poison(model):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.fill_(value)
        return measure(model)

    return poison


def told(value):
    """Returns a poison that reports `value` for all norms; its square may be infinite."""

    def poison(model):
        each = torch.full_like(measure(model).each, value)
        return GradNorms(torch.tensor(value), each)

    return poison


POISONS = {
    "nan": one_element(NAN),
    "inf": one_element(INF),
    "1e30": one_element(1e30),
    "all nan": everywhere(NAN),
    "all inf": everywhere(-INF),
    "all 1e30": everywhere(1e30),
    "all zero": everywhere(0.0),
    "all 1e-30": everywhere(1e-30),
    "told 1e30": told(1e30),
    "told 1e38": told(1e38),
}


def run(kind, model, *, poison=None, gate=OPEN, at=(), steps=12):
    """Runs clean steps, with a poisoned one before those in `at`; returns what each clean step measured."""
    made = []
    for number in range(steps):
        if number in at:
            give(model, 1.0, seed=100 + number)
            norms = poison(model)
            was_finite = [torch.isfinite(g) for g in grads(model).values()]
            called(kind, model, norms, gate)
            for before, after in zip(was_finite, grads(model).values(), strict=True):
                assert torch.isfinite(after[before]).all(), "a finite value became non-finite"
            assert all(torch.isfinite(t).all() for t in tensors(kind.state_dict())), "a statistic is not finite"
        give(model, 0.5 + 0.1 * (number * 7 % 5) + 8.0 * (number in (2, 9)), seed=number)
        clipped = clip(kind, model)
        made.append([flat(model), clipped.coef, clipped.active])
    return made


@cache
def clean_run(name):
    """Returns a kind after clean steps only, and the results of these steps."""
    kind = KINDS[name]()
    return kind, run(kind, small())


@pytest.mark.slow(
    unless=lambda name, poison, gate: ([*KINDS].index(name) + [*POISONS].index(poison) + int(gate)) % 2 == 0
)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("gate", [OPEN, CLOSED], ids=["open", "closed"])
def test_clean_steps_are_clipped_as_if_the_poisoned_ones_had_never_been(name, poison, gate):
    """Runs with an open gate too, because with the guard off the gate is always open."""
    clean, expected = clean_run(name)
    poisoned = KINDS[name]()
    made = run(poisoned, small(), poison=POISONS[poison], gate=gate, at=(0, 1, 4, 5, 6, 11))
    for number, (ours, theirs) in enumerate(zip(made, expected, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), f"clean step {number}"
    assert equal_trees(poisoned.state_dict(), clean.state_dict())
    assert name == "none" or any(coef < 1 for _, coef, _ in expected), "the sequence must clip"


@pytest.mark.parametrize("name", [name for name in KINDS if name != "value"])
@pytest.mark.parametrize("poison", ["all nan", "all inf", "all 1e30"])
def test_a_norm_that_is_not_finite_decides_nothing(name, poison):
    """1e30 is finite, but its norm is not in fp32: a coefficient of 0 would mean that there was no gradient."""
    kind, model = KINDS[name](), small()
    run(kind, model, steps=6)
    model.gain.grad = None  # a single 1e30 has a norm
    norms = POISONS[poison](model)
    before = flat(model)
    clipped = as_tensors(called(kind, model, norms))
    torch.testing.assert_close(flat(model), before, rtol=0, atol=0, equal_nan=True)
    assert (clipped.coef, clipped.active) == (1, 0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("poison", POISONS)
def test_what_is_reported_of_a_poisoned_step_is_finite(name, poison):
    kind, model = KINDS[name](), small()
    run(kind, model, steps=6)
    give(model, 1.0)
    clipped = as_tensors(called(kind, model, POISONS[poison](model)))
    assert 0 <= clipped.coef <= 1
    assert 0 <= clipped.active <= 1


@pytest.mark.parametrize("name", KINDS)
def test_a_large_finite_spike_is_cut_and_moves_no_statistic_far(name):
    """1e10 has a finite square, so its clipped norm enters the statistics."""
    clean, spiked = KINDS[name](), KINDS[name]()
    run(clean, small())
    # Without `max_norm` nothing bounds a norm of the warm-up, which has a spike of 8 in every run.
    at, most = ((7,), 20.0) if name == "update_norm" else ((1, 7), 10.0)
    run(spiked, small(), poison=lambda model: (give(model, 1e10), measure(model))[1], at=at)
    for one, other in zip(tensors(clean.state_dict()), tensors(spiked.state_dict()), strict=True):
        assert other.dtype == one.dtype
        if other.is_floating_point():
            assert torch.isfinite(other).all()
            assert (other <= most).all(), "the norms that entered are bounded"


@pytest.mark.parametrize("name", KINDS)
def test_restored_statistics_are_bitwise_equal_and_continue_as_before(name):
    whole, cut = KINDS[name](), KINDS[name]()
    model = small()
    run(cut, model)
    run(whole, model)
    again = KINDS[name]()
    again.load_state_dict({key: value.clone() if isinstance(value, torch.Tensor) else value
                           for key, value in cut.state_dict().items()})  # fmt: skip
    assert equal_trees(again.state_dict(), whole.state_dict())
    for ours, theirs in zip(run(again, small()), run(whole, small()), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def is_essential(name, other):
    """Whether a kind meets its own checkpoint, none, or that of a kind with other statistics."""
    return other in (name, "nothing", "adagc" if name == "zclip" else "zclip")


@pytest.mark.slow(unless=is_essential)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("other", [*KINDS, "nothing"])
def test_a_checkpoint_of_another_kind_or_none_starts_afresh(name, other):
    used = KINDS[name]()
    run(used, small())
    saved = {}
    if other != "nothing":
        source = KINDS[other]()
        run(source, small())
        saved = source.state_dict()
    used.load_state_dict(saved)
    fresh = KINDS[name]()
    if other == name:
        fresh.load_state_dict(saved)
    assert equal_trees(used.state_dict(), fresh.state_dict())
    for ours, theirs in zip(run(used, small()), run(fresh, small()), strict=True):
        assert torch.equal(ours[0], theirs[0])


class NoHostReads(TorchDispatchMode):
    """Raises on operations that make the host wait for a device."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        assert func._schema.name.removeprefix("aten::") not in self.READS, f"{func} reads from the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", KINDS)
def test_no_kind_reads_from_the_host(name):
    kind, model = KINDS[name](), small()
    for number in range(8):
        give(model, 1.0 + 5.0 * (number % 3), seed=number)
        norms = measure(model)
        with NoHostReads():
            called(kind, model, norms)
    with pytest.raises(AssertionError, match="reads from the host"), NoHostReads():
        norms.total.item()
