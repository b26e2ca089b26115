"""A state that is made to fit another model or another optimizer: what is kept, made and dropped."""

import pytest
import torch
from torch import nn

from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.refit import fresh_optimizer, missing, refit
from stabletrain.models.gpt import GPT
from stabletrain.records import TrainState
from stabletrain.stability.optimizers import SGD, AdamW, Muon, StableAdamW
from stabletrain.stability.schedule import Cosine, LearningRate, LinearWarmup


def state(make, *, norm=False, steps=0, seed=0):
    """A small model with an optimizer, after some steps."""
    torch.manual_seed(seed)
    parts = {"a": nn.Linear(3, 4), **({"n": nn.LayerNorm(4)} if norm else {}), "b": nn.Linear(4, 2)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    made = TrainState(model, make(model))
    for _ in range(steps):
        made.optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        made.optimizer.step()
        made.step += 1
    return made


def adamw(model, **given):
    return AdamW(0.01, [0.9, 0.95], 1e-8, 0.1, **given)(model)


def own_adamw(model):
    return AdamW(0.01, [0.9, 0.95], 1e-8, 0.1, cautious_decay=True)(model)


def stable(model):
    return StableAdamW(0.01, [0.9, 0.95], 1e-8, 0.1)(model)


def sgd(model):
    return SGD(0.1, 0.9, False, 1e-4)(model)


def moved(old, new, weights=None):
    """Restores the state of `old` into `new`; returns what was said about it."""
    found = refit(capture(old, {}), new, weights or {}, fresh_optimizer(new))
    restore(found.tree, new, {})
    return found


def test_the_same_model_and_optimizer_keep_every_bit():
    old, new = state(adamw, steps=3), state(adamw, seed=1)
    found = moved(old, new)
    assert (found.made, found.dropped, found.moments_anew) == ([], [], False)
    assert str(capture(new, {})) == str(capture(old, {}))


def test_a_new_part_takes_the_given_values_and_has_no_moments_yet():
    old, new = state(adamw, steps=3), state(adamw, norm=True, seed=1)
    given = {"n.weight": torch.full((4,), 2.0), "n.bias": torch.full((4,), 3.0)}
    assert missing(capture(old, {}), new) == ["n.weight", "n.bias"]
    found = moved(old, new, given)
    assert found.made == ["n.weight", "n.bias"]
    named = dict(new.model.named_parameters())
    assert named["n.weight"].tolist() == [2.0] * 4
    assert named["n.weight"] not in new.optimizer.state
    assert torch.equal(
        new.optimizer.state[named["a.weight"]]["exp_avg"], old.optimizer.state[old.model.a.weight]["exp_avg"]
    )
    moments = state(adamw, norm=True)
    assert [len(group["params"]) for group in new.optimizer.param_groups] == [
        len(group["params"]) for group in moments.optimizer.param_groups
    ]


def test_a_dropped_part_leaves_the_rest():
    old, new = state(adamw, norm=True, steps=3), state(adamw, seed=1)
    found = moved(old, new)
    assert found.dropped == ["n.weight", "n.bias"]
    assert torch.equal(new.model.b.weight, old.model.b.weight)
    assert new.optimizer.state[new.model.b.bias]["step"].item() == 3


def test_another_kind_of_optimizer_starts_anew_also_with_momentum():
    old, new = state(adamw, steps=3), state(sgd, seed=1)
    assert moved(old, new).moments_anew
    assert not any(each["momentum_buffer"].any() for each in new.optimizer.state.values())
    assert len(new.optimizer.state) == 4
    back = state(adamw, seed=2)
    assert moved(new, back).moments_anew
    assert len(back.optimizer.state) == 0


def test_adamw_and_its_stable_kind_share_their_state():
    old, new = state(adamw, steps=3), state(stable, seed=1)
    assert not moved(old, new).moments_anew
    weight = new.model.a.weight
    assert torch.equal(new.optimizer.state[weight]["exp_avg_sq"], old.optimizer.state[old.model.a.weight]["exp_avg_sq"])
    assert new.optimizer.state[weight]["step"].item() == 3
    weight.grad = torch.ones_like(weight)
    new.optimizer.step()
    assert new.optimizer.state[weight]["step"].item() == 4


def test_fresh_zeros_take_no_memory_and_new_momentum_starts_at_them():
    new = state(sgd, norm=True)
    fresh = fresh_optimizer(new)
    buffers = [values["momentum_buffer"] for values in fresh["state"].values()]
    assert {buffer.untyped_storage().nbytes() for buffer in buffers} == {4}
    moved(state(sgd, steps=2), new, {"n.weight": torch.ones(4), "n.bias": torch.zeros(4)})
    assert not new.optimizer.state[new.model.n.weight]["momentum_buffer"].any()
    assert new.optimizer.state[new.model.a.weight]["momentum_buffer"].any()


@pytest.mark.parametrize("old", [adamw, own_adamw, stable])
@pytest.mark.parametrize("new", [adamw, own_adamw, stable])
def test_the_adamws_keep_each_others_moments_and_the_settings_of_the_new_one(old, new):
    before, after = state(old, steps=3), state(new, seed=1)
    assert not moved(before, after).moments_anew
    for a, b in zip(before.model.parameters(), after.model.parameters(), strict=True):
        assert str(before.optimizer.state[a]) == str(after.optimizer.state[b])
    cautious = [group.get("cautious", False) for group in after.optimizer.param_groups]
    assert new is adamw or cautious == [new is own_adamw] * len(cautious)
    after.optimizer.zero_grad()
    after.model(torch.randn(5, 3)).square().mean().backward()
    after.optimizer.step()
    assert {each["step"].item() for each in after.optimizer.state.values()} == {4}


def muon(model, **given):
    settings = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.2, "momentum": 0.95, "nesterov": True}
    return Muon(**settings, ns_steps=5, **given)(model)


@pytest.mark.parametrize(
    ("make", "before", "now"),
    [
        (adamw, {"schedule": "with_lr"}, {}),
        (adamw, {}, {"schedule": "with_lr"}),
        (adamw, {"schedule": "cosine"}, {"schedule": "with_lr"}),
        (adamw, {"decay": "corrected"}, {}),
        (adamw, {}, {"decay": "corrected"}),
        (adamw, {"no_decay": []}, {}),
        (adamw, {}, {"no_decay": ["matrices", "norms"]}),
        (muon, {"decay": "corrected", "schedule": "cosine"}, {"decay": "independent"}),
        (muon, {"momentum_warmup": 6}, {}),
        (muon, {}, {"momentum_warmup": 6}),
        (muon, {"per_head": True, "cautious_decay": True, "scale": "original"}, {}),
        (muon, {}, {"per_head": True, "cautious_decay": True, "scale": "original"}),
    ],
)
def test_a_resume_with_another_weight_decay_or_momentum_has_the_groups_of_a_new_run(make, before, now):
    """And keeps the moments of each parameter, in whichever group it was."""

    def begin(schedule="constant", **given):
        torch.manual_seed(0)
        model = GPT(vocab_size=7, block_size=4, n_layer=1, n_head=2, n_embd=8, bias=True)
        optimizer, rate = make(model, **given), LearningRate(LinearWarmup(2), Cosine(weight_decay=schedule), 8)
        rate.attach(optimizer.param_groups)
        return TrainState(model, optimizer), rate

    def go(state, rate, steps):
        for step in steps:
            for p in state.model.parameters():
                p.grad = torch.full_like(p, float(step + 1))
            rate.set_(state.optimizer.param_groups, step)
            state.optimizer.step()

    old, old_rate = begin(**before)
    go(old, old_rate, range(4))
    new, rate = begin(**now)
    restore(refit(capture(old, {}), new, {}, fresh_optimizer(new)).tree, new, {})
    for name, p in new.model.named_parameters():
        moments = old.optimizer.state[old.model.get_parameter(name)]
        assert all(torch.equal(value, moments[key]) for key, value in new.optimizer.state[p].items()), name
    unbroken, own_rate = begin(**now)
    for state, its in ((new, rate), (unbroken, own_rate)):
        its.set_(state.optimizer.param_groups, 4)
    groups = [
        [{k: v for k, v in g.items() if k != "params"} for g in s.optimizer.param_groups] for s in (new, unbroken)
    ]
    assert groups[0] == groups[1]
