"""A trial is the run made short: its weights, batches, schedule and loss; and each trial is a fresh one."""

import math

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from torch import nn

from stabletrain.beside.rate_finder import trials
from stabletrain.beside.rate_finder.trials import Trials, renew_batch_norm, shortened
from stabletrain.config.checks import check
from stabletrain.config.make import plain
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.schedule import CosineWarmup, LinearWarmup, NoWarmup
from tests.runs import TINY_GPT, TINY_RESNET, composed

QUIET = ["checkpoint=off", "monitors=none", "forecast=off", "report=false", "guard=off", "precision=fp32"]


def trials_of(config, seeds=(0,)):
    check(config)
    return Trials({seed: plain(config) for seed in seeds}, dict(HydraConfig.get().runtime.choices))


@pytest.mark.slow(unless=lambda more: bool(more))
@pytest.mark.parametrize("more", [[], ["clipping=zclip", "schedule=wsd", "grad_accum_steps=2"]])
def test_a_trial_of_the_whole_length_is_the_run(tmp_path, more):
    from stabletrain.trainer.build import build
    from stabletrain.trainer.loop import train

    with composed(*TINY_GPT, *QUIET, *more, "steps=20", "eval_every=20", "optimizer.lr=0.01") as config:
        run = build(config, tmp_path / "run")
        train(run)
        trial = trials_of(config)(0.01, 0, 20)
        assert trial.loss == run.history.val["val/loss"]
        assert trial.first == run.history.first_losses[0]
        assert trial.done == 20


@pytest.mark.parametrize("determinism", ["seeded", "off"])
def test_trials_do_not_depend_on_those_before_them(determinism):
    # Adaptive clipping, moments and the loss scale have a state; with determinism=off no seed is set for the weights.
    clipping = ["clipping=adagc", "clipping.warmup_steps=2"]
    overrides = [*TINY_GPT, *QUIET, *clipping, f"determinism={determinism}", "steps=30"]
    with composed(*overrides) as config:
        run = trials_of(config)
        first = run(1e-2, 0, 6)
        run(1.0, 0, 6)
        again = run(1e-2, 0, 6)
    assert (first.first, first.loss) == (again.first, again.loss)
    assert [trial.rate for trial in run.run] == [1e-2, 1.0, 1e-2]


def test_the_rate_and_the_seed_make_a_difference_and_faults_and_guard_none():
    with composed(*TINY_GPT, *QUIET, "steps=30") as config:
        run = trials_of(config)
        usual, other = run(1e-2, 0, 6), run(2e-2, 0, 6)
    with composed(*TINY_GPT, *QUIET, "steps=30", "seed=1") as config:
        reseeded = trials_of(config, (1,))(1e-2, 1, 6)
    faulty = [each for each in QUIET if each != "guard=off"]
    with composed(*TINY_GPT, *faulty, "steps=30", "faults=gradient", "faults.at=[2]") as config:
        guarded = trials_of(config)(1e-2, 0, 6)
    assert usual.first == other.first
    assert usual.loss != other.loss
    assert usual.first != reseeded.first
    assert guarded.loss == usual.loss


def test_a_rate_at_which_the_loss_is_not_finite_is_a_result():
    with composed(*TINY_GPT, *QUIET, "steps=30", "optimizer=sgd", "clipping=none") as config:
        trial = trials_of(config)(1e30, 0, 8)
    assert trial.loss == math.inf
    assert trial.done < 8
    assert math.isfinite(trial.first)


def test_an_optimizer_of_torch_takes_the_rate():
    with composed(*TINY_GPT, *QUIET, "steps=30", "optimizer._target_=torch.optim.Adagrad") as config:
        run = trials_of(config)
        assert run(1e-3, 0, 4).loss != run(1e-2, 0, 4).loss


def test_the_statistics_of_batch_norm_are_those_of_the_last_weights():
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), [torch.randn(64, 3) for _ in range(4)]
    renew_batch_norm(model, inputs, FullPrecision())
    outputs = torch.stack([model[0](each) for each in inputs])
    torch.testing.assert_close(model[1].running_mean, outputs.mean(dim=(0, 1)))
    assert model[1].momentum == 0.1
    assert model.training


@pytest.mark.slow
def test_without_them_the_loss_of_a_high_rate_is_not_that_of_its_weights(monkeypatch):
    with composed(*TINY_RESNET, *QUIET, "steps=30", "batch_size=32", "eval_batches=8") as config:
        renewed = trials_of(config)(0.4, 0, 12)
        monkeypatch.setattr(trials, "renew_batch_norm", lambda *given: None)
        lagging = trials_of(config)(0.4, 0, 12)
    assert renewed.loss < 0.7 * lagging.loss


@pytest.mark.parametrize(
    ("warmup", "total", "steps", "length"),
    [
        (LinearWarmup(), 1000, 40, 5),  # 50 steps are more than an eighth of 40
        (LinearWarmup(), 40, 40, 2),
        (LinearWarmup(3), 1000, 40, 3),
        (CosineWarmup(500), 1000, 80, 10),
        (LinearWarmup(), 10, 4, 1),
        (NoWarmup(), 1000, 40, 0),
    ],
)
def test_a_trial_has_as_much_warmup_as_the_run_up_to_an_eighth(warmup, total, steps, length):
    found = shortened(warmup, total, steps)
    assert found.length(steps) == length
    assert type(found) is type(warmup)


def test_a_warmup_of_the_users_own_stays():
    class Own(NoWarmup):
        def length(self, total):
            return total // 2

    own = Own()
    assert shortened(own, 100, 10) is own
