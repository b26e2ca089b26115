"""Builds `Tools`, everything that acts in a step, from the options of a run."""

from torch import nn

from stabletrain.guard.policy import NoGuard
from stabletrain.parallel.single import SingleProcess
from stabletrain.stability.objective.chunked_loss import with_loss_chunk
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.stability.schedule import LearningRate
from stabletrain.tools import Tools
from stabletrain.trainer.options import StepOptions


def tools_from_options(
    options: StepOptions,
    model: nn.Module,
    *,
    vocab_size: int | None,
    precision: FullPrecision,
    guard: NoGuard,
    seed: int,
    parallel: SingleProcess,
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
    return Tools(
        sanitizer=Sanitizer(vocab_size),
        precision=precision,
        objective=with_loss_chunk(options.objective, options.loss_chunk, model, head_apart),
        clipping=options.clipping,
        after_update=options.qkclip,
        guard=guard,
        learning_rate=LearningRate(options.warmup, options.schedule, options.steps),
        determinism=options.determinism,
        seed=seed,
        parallel=parallel,
    )
