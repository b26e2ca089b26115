"""Output embedding centering: the loss against float64, its share of a step, and the change after an update."""

import copy

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.records import IGNORE_INDEX, Batch
from stabletrain.stability.objective import CrossEntropy, MuCentering, MuLoss, NoZLoss
from stabletrain.stability.objective.chunked_loss import ChunkedLoss
from stabletrain.stability.objective.cross_entropy import check_head
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.step import train_step
from stabletrain.trainer.before_after import Subject, loss_on
from stabletrain.trainer.build import build
from tests.runs import TINY_GPT, composed
from tests.stability.objective.test_chunked_loss import VOCAB, Run, chunk_example, gpt, gradients

OPEN, CLOSED = torch.tensor(True), torch.tensor(False)


def objectives(zloss):
    """Returns the cross-entropy of whole logits, and in chunks of four tokens."""
    return CrossEntropy(zloss), ChunkedLoss(CrossEntropy(zloss), 4, VOCAB)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_value_and_gradient_are_those_of_the_squared_mean_row_in_float64(tied, scale):
    model = gpt(tied)
    name = "embedding.weight" if tied else "head.weight"
    mu = model.classifier().weight.detach().double().mean(0)
    _, plain = gradients(Run(model, scale=scale), CrossEntropy())
    for objective in objectives(MuLoss(0.5)):
        terms, found = gradients(Run(model, scale=scale), objective)
        torch.testing.assert_close(terms.parts["zloss"].double(), 0.5 * mu @ mu, rtol=1e-6, atol=0)
        torch.testing.assert_close(terms.total, terms.parts["ce"] + terms.parts["zloss"])
        added = (found[name].double() - plain[name].double()) / scale
        torch.testing.assert_close(added, (2 * 0.5 * mu / VOCAB).expand_as(added), rtol=1e-3, atol=1e-8)
        for other in found.keys() - {name}:
            torch.testing.assert_close(found[other], plain[other], rtol=1e-4, atol=1e-5 * scale)


def test_micro_batches_add_up_to_the_term_once_whatever_their_targets():
    inputs, targets = chunk_example()
    targets[2] = IGNORE_INDEX
    model, n_valid = gpt(), (targets != IGNORE_INDEX).sum()
    whole = float(MuLoss(0.5).of_head(model.head.weight.detach()))
    for objective in objectives(MuLoss(0.5)):
        run = Run(model)
        forward = objective.wrap(model, model, run.tools)
        shares = [
            objective(forward(i), Batch(i, t), n_valid) for i, t in zip(inputs.split(1), targets.split(1), strict=True)
        ]
        assert [float(terms.detach().parts["zloss"]) > 0 for terms in shares] == [True, True, False]
        assert sum(float(terms.detach().parts["zloss"]) for terms in shares) == pytest.approx(whole, rel=1e-6)


def test_the_loss_before_and_after_a_changed_resume_has_the_term():
    model, (inputs, targets) = gpt(), chunk_example()
    found = [
        loss_on(Subject(model, Run(model).tools.precision, CrossEntropy(zloss), Sanitizer()), Batch(inputs, targets))
        for zloss in (NoZLoss(), MuLoss(100.0))
    ]
    mu = model.head.weight.detach().double().mean(0)
    assert found[1] - found[0] == pytest.approx(100 * float(mu @ mu), rel=1e-4)


def test_without_it_the_forward_pass_is_not_wrapped():
    model = gpt()
    assert CrossEntropy(NoZLoss()).wrap(model, model, Run(model).tools) is model


def test_the_mean_of_bf16_rows_is_taken_in_fp32():
    weight = (1 + torch.arange(4096)[:, None] % 2 * 2.0**-7).bfloat16()
    assert float(MuLoss(1.0).of_head(weight)) == pytest.approx((1 + 2.0**-8) ** 2, rel=1e-6)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_centering_leaves_the_probabilities_as_they_are_and_no_mean(tied):
    model = gpt(tied).double()
    features = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    before = copy.deepcopy(model)
    MuCentering.after_update(model, OPEN)
    weight = model.classifier().weight
    assert float(weight.detach().mean(0).abs().max()) < 1e-15
    assert not torch.equal(weight, before.classifier().weight)
    probabilities = [each.logits(features).softmax(-1) for each in (model, before)]
    torch.testing.assert_close(*probabilities, rtol=1e-12, atol=0)
    rest = [name for name, p in model.named_parameters() if p is not weight]
    assert all(torch.equal(model.get_parameter(name), before.get_parameter(name)) for name in rest)


@pytest.mark.parametrize("bad", [6e16, float("nan"), float("inf")])
def test_a_closed_gate_and_weights_near_the_bound_of_the_proofs_keep_every_bit(bad):
    model = gpt()
    with torch.no_grad():
        model.head.weight[0, 0] = -0.0
    before = model.head.weight.detach().clone()
    MuCentering.after_update(model, CLOSED)
    assert torch.equal(model.head.weight.view(torch.int32), before.view(torch.int32))
    with torch.no_grad():
        before[3, 5] = model.head.weight[3, 5] = bad
    MuCentering.after_update(model, OPEN)
    assert torch.equal(model.head.weight.view(torch.int32), before.view(torch.int32))


def test_a_step_centres_after_its_update_and_a_skipped_step_changes_nothing(tmp_path):
    with composed(*TINY_GPT, "zloss=mu_centering", "steps=2", "checkpoint=off") as cfg:
        run = build(cfg, tmp_path)
    weight = run.state.model.classifier().weight
    inputs, targets = (torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(n)) for n in range(2))
    assert float(weight.detach().mean(0).abs().max()) > 1e-4
    assert train_step(run.state, [Batch(inputs, targets)], run.tools).applied
    assert float(weight.detach().mean(0).abs().max()) < 1e-8
    moments = copy.deepcopy(run.state.optimizer.state[weight])
    with torch.no_grad():
        weight += 1  # a mean to subtract
    kept = weight.detach().clone()
    bad = torch.full_like(targets, IGNORE_INDEX)
    assert not train_step(run.state, [Batch(inputs, bad)], run.tools).applied
    assert torch.equal(weight, kept)
    assert all(torch.equal(value, run.state.optimizer.state[weight][name]) for name, value in moments.items())


def test_a_model_without_a_head_is_refused_by_name():
    headless: nn.Module = nn.Sequential(nn.Flatten())
    for zloss, option in ((MuLoss(1e-4), "mu"), (MuCentering(), "mu_centering")):
        with pytest.raises(ConfigError, match=f"zloss={option} needs the weight of the head, and Sequential has no"):
            check_head(zloss, option, headless)
    check_head(NoZLoss(), "none", headless)
    check_head(MuLoss(1e-4), "mu", nn.Linear(2, 2))


@pytest.mark.parametrize("coefficient", [0.0, -1.0, float("inf"), float("nan")])
def test_a_coefficient_is_a_finite_number_above_0(coefficient):
    with pytest.raises(ConfigError, match=f"zloss.coefficient={coefficient} is not a finite number above 0"):
        MuLoss(coefficient)
