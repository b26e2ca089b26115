"""Builds `Tools`, everything that acts in a step: from a configuration, or from objects with defaults."""

from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import DictConfig
from torch import nn

from stabletrain.config.make import make, target_of
from stabletrain.errors import ConfigError
from stabletrain.machine.determinism import Seeded
from stabletrain.parallel.single import SingleProcess
from stabletrain.protocols import Clipping, GuardPolicy, LearningRate, Parallel, Precision, Sanitizer, Seeding, Tools
from stabletrain.stability import sanitize
from stabletrain.stability.clipping import NormClip
from stabletrain.stability.guard import SkipGuard
from stabletrain.stability.objective import CrossEntropy, Custom, NoZLoss, Objective
from stabletrain.stability.objective.chunked_loss import with_loss_chunk
from stabletrain.stability.objective.cross_entropy import ZLossKind
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.schedule import Constant, NoWarmup, ScheduleKind, WarmupKind
from stabletrain.stability.schedule import LearningRate as ScheduledRate
from stabletrain.trainer.option_roles import QKClipOption


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


def objective_from_config(cfg: DictConfig) -> Objective:
    """Builds the objective: an `Objective`, or any callable of the user's, which may be a function or a class.

    Raises:
        ConfigError: the target cannot be built or called.
    """
    if "objective" not in cfg:  # the configuration of an older run or incident
        return CrossEntropy(
            make(cfg, "zloss", ZLossKind) if "zloss" in cfg else NoZLoss(), cfg.get("label_smoothing", 0.0)
        )
    target = target_of(cfg, "objective")
    a_function = target is not None and not isinstance(target, type)  # it is the loss itself, not what builds it
    objective = make(cfg, "objective", **({"_partial_": True} if a_function else {}))
    if a_function:  # Hydra's partial would check its target again in every step
        objective = partial(objective.func, **objective.keywords)
    if isinstance(objective, CrossEntropy):
        return replace(objective, zloss=make(cfg, "zloss", ZLossKind), label_smoothing=cfg.label_smoothing)
    if isinstance(objective, Objective):
        return objective
    if not callable(objective):
        raise ConfigError(
            f"objective: {cfg.objective._target_} gives a {type(objective).__name__}, which cannot be called with "
            "(outputs, batch, n_valid)"
        )
    return Custom(objective)


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
    learning_rate = ScheduledRate(make(cfg, "warmup", WarmupKind), make(cfg, "schedule", ScheduleKind), cfg.steps)
    objective = objective_from_config(cfg)
    return build_tools(
        precision,
        sanitizer=sanitize.Sanitizer(vocab_size),
        objective=with_loss_chunk(objective, cfg.get("loss_chunk", "none"), model, head_apart),
        clipping=clipping,
        after_update=make(cfg, "qkclip", QKClipOption),
        guard=guard,
        learning_rate=learning_rate,
        determinism=determinism,
        seed=seed,
        parallel=parallel,
    )
