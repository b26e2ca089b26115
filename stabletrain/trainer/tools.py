"""Builds `Tools`, everything that acts in a step: from a configuration, or from objects with defaults."""

from typing import Any

from omegaconf import DictConfig
from torch import nn

from stabletrain.config.make import make
from stabletrain.machine.determinism import Seeded
from stabletrain.parallel.single import SingleProcess
from stabletrain.protocols import Clipping, GuardPolicy, LearningRate, Parallel, Precision, Sanitizer, Seeding, Tools
from stabletrain.stability import sanitize
from stabletrain.stability.chunked_loss import with_loss_chunk
from stabletrain.stability.clipping import NormClip
from stabletrain.stability.guard import SkipGuard
from stabletrain.stability.objective import NoZLoss, Objective
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.schedule import Constant, NoWarmup
from stabletrain.stability.schedule import LearningRate as ScheduledRate


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
        objective=objective or Objective(NoZLoss()),
        clipping=clipping or NormClip(1.0),
        after_update=after_update or NoQKClip(),
        guard=guard or SkipGuard(max_consecutive=10),
        learning_rate=learning_rate or ScheduledRate(NoWarmup(), Constant(), 10**6),
        determinism=determinism or Seeded(),
        seed=seed,
        parallel=parallel or SingleProcess(),
    )


def tools_from_config(
    cfg: DictConfig,
    model: nn.Module,
    *,
    vocab_size: int | None,
    precision: Precision,
    clipping: Clipping,
    guard: GuardPolicy,
    determinism: Seeding,
    seed: int,
    parallel: Parallel,
    head_apart: bool = True,
) -> Tools:
    """Builds the tools that a configuration describes, for training and for replay.

    Args:
        cfg: checked by `config.checks.check`.
        vocab_size: None if unknown.
        seed: seed of this rank.
        head_apart: whether the model's head may run outside the model's forward pass.

    Raises:
        ConfigError: a value is out of bounds.
    """
    learning_rate = ScheduledRate(make(cfg, "warmup"), make(cfg, "schedule"), cfg.steps)
    objective = Objective(make(cfg, "zloss"), cfg.label_smoothing)
    return build_tools(
        precision,
        sanitizer=sanitize.Sanitizer(vocab_size),
        objective=with_loss_chunk(objective, cfg.get("loss_chunk", "none"), model, head_apart),
        clipping=clipping,
        after_update=make(cfg, "qkclip"),
        guard=guard,
        learning_rate=learning_rate,
        determinism=determinism,
        seed=seed,
        parallel=parallel,
    )
