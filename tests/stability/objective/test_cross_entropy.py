"""The objective against float64 references, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from stabletrain.records import IGNORE_INDEX, Batch, LossTerms
from stabletrain.stability.objective import CrossEntropy, NoZLoss, ZLoss, z_loss


def of(targets):
    """A batch with these targets; the cross-entropy does not look at its inputs."""
    return Batch(targets, targets)


def example(rows=12, classes=7, seed=0, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=generator)
    targets = torch.randint(classes, (rows,), generator=generator)
    return logits, targets


def test_z_loss_value_and_gradient_equal_the_closed_form():
    logits, _ = example()
    wide = logits.double().requires_grad_()
    value = z_loss(wide, 1e-4)
    log_z = torch.log(torch.exp(wide).sum(-1))
    torch.testing.assert_close(value, 1e-4 * log_z**2)
    (gradient,) = torch.autograd.grad(value.sum(), wide)
    torch.testing.assert_close(gradient, 2e-4 * log_z[:, None] * torch.softmax(wide, -1))  # d(c z^2) = 2 c z softmax


def test_z_loss_of_large_bf16_logits_is_computed_in_fp32():
    logits = torch.tensor([[200.0, 199.0]], dtype=torch.bfloat16)
    assert z_loss(logits, 1.0).dtype == torch.float32
    expected = torch.logsumexp(logits.double(), -1) ** 2
    torch.testing.assert_close(z_loss(logits, 1.0).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_terms_and_gradient_equal_a_float64_reference(smoothing):
    logits, targets = example()
    targets[3] = IGNORE_INDEX
    logits.requires_grad_()
    terms = CrossEntropy(ZLoss(1e-2), smoothing)(logits, of(targets), torch.tensor(11))
    terms.total.backward()

    wide = logits.detach().double().requires_grad_()
    log_p = wide - torch.log(torch.exp(wide).sum(-1, keepdim=True))
    hit = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    per_row = -((1 - smoothing) * hit + smoothing * log_p.mean(-1))
    keep = targets != IGNORE_INDEX
    ce = per_row[keep].sum() / 11
    z = 1e-2 * (torch.log(torch.exp(wide).sum(-1)) ** 2)[keep].sum() / 11
    (ce + z).backward()
    torch.testing.assert_close(terms.parts["ce"].double(), ce)
    torch.testing.assert_close(terms.parts["zloss"].double(), z)
    torch.testing.assert_close(terms.total, terms.parts["ce"] + terms.parts["zloss"])
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-5, atol=1e-7)
    assert not logits.grad[3].any(), "an ignored target has no gradient, through the z-loss neither"


def test_uneven_micro_batches_add_up_to_the_mean_over_all_valid_targets():
    logits, targets = example(rows=12)
    targets[:5] = IGNORE_INDEX  # the first micro-batch keeps one valid target, the second six
    objective = CrossEntropy(ZLoss(1e-3))
    n_valid = (targets != IGNORE_INDEX).sum()
    whole = objective(logits, of(targets), n_valid)
    parts = [objective(logits[rows], of(targets[rows]), n_valid) for rows in (slice(0, 6), slice(6, 12))]
    together: LossTerms = parts[0] + parts[1]
    torch.testing.assert_close(together.total, whole.total)
    torch.testing.assert_close(whole.parts["ce"], F.cross_entropy(logits, targets))
    mean_of_means = sum(F.cross_entropy(logits[r], targets[r]) for r in (slice(0, 6), slice(6, 12))) / 2
    assert abs(mean_of_means - whole.parts["ce"]) > 1e-3, "the example would not tell a mean of means apart"


def test_text_logits_are_read_position_by_position():
    logits, targets = example(rows=12)
    flat = CrossEntropy(NoZLoss())(logits, of(targets), torch.tensor(12))
    shaped = CrossEntropy(NoZLoss())(logits.view(3, 4, 7), of(targets.view(3, 4)), torch.tensor(12))
    assert torch.equal(flat.total, shaped.total)
    assert shaped.parts["zloss"] == 0


def test_no_valid_target_gives_zero_and_not_nan():
    logits, targets = example()
    terms = CrossEntropy(ZLoss(1e-4))(logits, of(torch.full_like(targets, IGNORE_INDEX)), torch.tensor(1))
    assert terms.total == 0
