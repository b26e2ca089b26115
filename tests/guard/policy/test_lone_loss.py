"""What counts as a spike in a user's loop: a high gradient norm, or a high loss with a rather high norm."""

import math

import pytest
import torch

from stabletrain.guard.options import make_policy
from stabletrain.guard.policy import SkipGuard
from stabletrain.records import GradNorms, LossTerms, StepChecks
from tests.forensics.diagnosis.given import READING


def policy_after(steps, loss=2.0, norm=1.0, **options):
    """A policy that has seen so many steps, with a little noise."""
    policy = make_policy(SkipGuard(**options))
    for step in range(steps):
        wobble = 1 + 0.01 * math.sin(step)
        policy.judge(READING._replace(loss=loss * wobble, grad_norm=norm * wobble, buffers=0.0, applied=True))
    return policy


def opened(policy, loss, norm, buffers=0.0):
    """Whether a step with these numbers is applied."""
    total = torch.tensor(float(loss))
    norms = GradNorms(torch.tensor(float(norm)), torch.tensor([float(norm)]))
    held = torch.tensor(buffers) if buffers else 0.0
    return bool(policy.gate(LossTerms(total), norms, StepChecks(0.0, 0.0, held)))


@pytest.mark.parametrize("loss", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("steps", [0, 1, 30, 200])
def test_ordinary_steps_pass_whatever_the_sign_of_the_loss(steps, loss):
    policy = policy_after(steps, loss)
    assert opened(policy, loss, 1.0)
    assert opened(policy, loss - 1e3, 1.0), "a loss that falls is no spike"
    assert opened(policy, loss + 1e3, 1.0), "and a loss alone is none"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps", [0, 200])
def test_what_is_not_finite_never_passes(steps, value):
    policy = policy_after(steps, sigma=math.inf)
    assert opened(policy, 2.0, 1.0, 1.0)
    assert not opened(policy, value, 1.0)
    assert not opened(policy, 2.0, abs(value))
    assert not opened(policy, 2.0, 1.0, abs(value))


@pytest.mark.parametrize("sigma", [6.0, math.inf])
@pytest.mark.parametrize("steps", [0, 200])
def test_a_gradient_whose_square_a_second_moment_cannot_hold_never_passes(steps, sigma):
    policy = policy_after(steps, norm=9e17, sigma=sigma)
    assert opened(policy, 2.0, 9.9e17)
    assert not opened(policy, 2.0, 1.1e18)


def test_a_gradient_far_above_the_recent_ones_is_a_spike():
    for steps, limit in ((1, 100.0), (200, 20.0)):
        policy = policy_after(steps)
        assert opened(policy, 2.0, 0.9 * limit)
        assert not opened(policy, 2.0, 1.1 * limit)
    assert opened(policy_after(200, sigma=math.inf), 2.0, 1e6)


def test_a_high_loss_counts_if_the_gradient_is_large_too():
    warm, cold = policy_after(64), policy_after(20)
    assert warm.bounds[0] < 2.2
    assert not opened(warm, 3.0, 11.0)
    assert opened(warm, 3.0, 9.0)
    assert opened(warm, 2.0, 11.0)
    assert opened(cold, 30.0, 11.0)
    assert not opened(policy_after(64, loss=-2.0), -0.5, 11.0), "for a negative loss, the same"


def test_by_default_a_high_loss_alone_is_a_spike():
    policy = policy_after(64)
    assert opened(policy, 3.0, 1.0)
    policy.lone_loss_is_spike = True
    assert not opened(policy, 3.0, 1.0)
    assert policy.bounds == (policy.limits.loss.value, policy.limits.norm.value)
