"""Builds `Tools`, everything that acts in a step: from the options of a run, or from objects with defaults."""

from typing import Any

from torch import nn

from stabletrain.machine.determinism import Seeded
from stabletrain.parallel.single import SingleProcess
from stabletrain.protocols import Clipping, GuardPolicy, LearningRate, Parallel, Precision, Sanitizer, Seeding, Tools
from stabletrain.stability import sanitize
from stabletrain.stability.clipping import NormClip
from stabletrain.stability.guard import SkipGuard
from stabletrain.stability.objective import CrossEntropy
from stabletrain.stability.objective.chunked_loss import with_loss_chunk
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.schedule import Constant, NoWarmup
from stabletrain.stability.schedule import LearningRate as ScheduledRate
from stabletrain.trainer.options import StepOptions


def build_tools(
    precision: Precision,
    *,
    sanitizer: Sanitizer | None = None,
    objective: Any = None,
    clipping: Clipping | None = None,
    after_update: Any = None,
    guard: GuardPolicy | None = None,
    learning_rate: LearningRate | None = None,
    determinism: Seeding | None = None,
    seed: int = 0,
    parallel: Parallel | None = None,
) -> Tools:
    """Builds the tools of a step from objects.

    The defaults: cross-entropy, gradients clipped at norm 1, a `SkipGuard` that halts at the tenth skip in a row, a
    constant learning rate, randomness seeded by step number, one process.
    """
    return Tools(
        sanitizer=sanitizer or sanitize.Sanitizer(),
        precision=precision,
        objective=objective or CrossEntropy(),
        clipping=clipping or NormClip(1.0),
        after_update=after_update or NoQKClip(),
        guard=guard or SkipGuard(max_consecutive=10),
        learning_rate=learning_rate or ScheduledRate(NoWarmup(), Constant(), 10**6),
        determinism=determinism or Seeded(),
        seed=seed,
        parallel=parallel or SingleProcess(),
    )


def tools_from_options(
    options: StepOptions,
    model: nn.Module,
    *,
    vocab_size: int | None,
    precision: Precision,
    guard: GuardPolicy,
    seed: int,
    parallel: Parallel,
    head_apart: bool = True,
) -> Tools:
    """Builds the tools that options describe, for training and for replay.

    Args:
        options: the run's, or those of a recorded step.
        vocab_size: None if unknown.
        seed: seed of this rank.
        head_apart: whether the model's head may run outside the model's forward pass.

    Raises:
        ConfigError: a value is out of bounds.
    """
    return build_tools(
        precision,
        sanitizer=sanitize.Sanitizer(vocab_size),
        objective=with_loss_chunk(options.objective, options.loss_chunk, model, head_apart),
        clipping=options.clipping,
        after_update=options.qkclip,
        guard=guard,
        learning_rate=ScheduledRate(options.warmup, options.schedule, options.steps),
        determinism=options.determinism,
        seed=seed,
        parallel=parallel,
    )
