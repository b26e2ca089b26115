"""The tools of a step: those that options describe, and the usual ones of tests and benchmarks."""

import pytest
import torch
from torch import nn

from stabletrain.guard.policy import NoGuard, SkipGuard
from stabletrain.machine.determinism import Seeded
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch, TrainState, Verdict
from stabletrain.stability.clipping import NoClip, NormClip
from stabletrain.stability.objective import CrossEntropy, NoZLoss
from stabletrain.stability.objective.chunked_loss import ChunkedLoss
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.stability.schedule import Constant, LearningRate, NoWarmup
from stabletrain.step import train_step
from stabletrain.trainer.stages import tools_from_options
from tests.runs import TINY_GPT, composed
from tests.trainer.given import FP32, batch, options_of, reading
from tests.workloads import build_tools


def test_the_defaults_are_the_usual():
    tools = build_tools(FP32)
    assert tools.precision is FP32
    assert tools.sanitizer == Sanitizer(None)
    assert isinstance(tools.clipping, NormClip)
    assert tools.clipping.max_norm == 1.0
    assert isinstance(tools.determinism, Seeded)
    assert isinstance(tools.parallel, SingleProcess)
    assert tools.seed == 0
    assert isinstance(tools.guard, SkipGuard)
    verdicts = [tools.guard.judge(reading(n, applied=False, loss=float("nan"))) for n in range(1, 11)]
    assert verdicts == [Verdict.SKIP] * 9 + [Verdict.HALT]


def test_with_the_defaults_the_learning_rate_stays_and_the_loss_is_plain_cross_entropy():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    given = batch()
    expected = nn.functional.cross_entropy(model(given.inputs), given.targets).item()
    numbers = train_step(state, [given], build_tools(FP32))
    assert numbers.loss == pytest.approx(expected, rel=1e-6)
    assert (numbers.terms["zloss"], numbers.lr, numbers.applied) == (0.0, 0.1, True)
    state.step = 5000
    assert train_step(state, [given], build_tools(FP32)).lr == 0.1


def test_every_tool_that_is_given_is_used():
    given = {
        "sanitizer": Sanitizer(7),
        "objective": CrossEntropy(NoZLoss(), 0.1),
        "clipping": NoClip(),
        "after_update": NoQKClip(),
        "guard": NoGuard(),
        "learning_rate": LearningRate(NoWarmup(), Constant(), 5),
        "determinism": Seeded(),
        "seed": 5,
        "parallel": SingleProcess(),
    }
    tools = build_tools(FP32, **given)
    assert all(getattr(tools, name) is value for name, value in given.items())


def test_a_configuration_decides_schedule_objective_and_bounds():
    chosen = ["steps=100", "warmup.steps=10", "schedule=constant", "zloss=palm", "label_smoothing=0.25"]
    model = nn.Linear(4, 3)
    with composed(*TINY_GPT, *chosen) as cfg:
        tools = tools_from_options(
            options_of(cfg),
            model,
            vocab_size=11,
            precision=FP32,
            guard=NoGuard(),
            seed=3,
            parallel=SingleProcess(),
        )
    assert tools.sanitizer.vocab_size == 11
    assert tools.seed == 3
    assert tools.learning_rate.total == 100
    assert tools.learning_rate.warmup.length(100) == 10
    logits, targets = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    terms = tools.objective(logits, Batch(targets, targets), torch.tensor(1))
    smoothed = nn.functional.cross_entropy(logits, targets, label_smoothing=0.25)
    assert terms.parts["ce"].item() == pytest.approx(smoothed.item(), rel=1e-6)
    assert terms.parts["zloss"].item() == pytest.approx(1e-4 * logits.logsumexp(-1).square().item(), rel=1e-5)
    assert not isinstance(tools.objective, ChunkedLoss)
