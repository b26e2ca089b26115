"""The loop of a configured run, as the checks see it: each fresh one is built as `stabletrain train` builds it."""

import io
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stabletrain.beside.preflight.loop import Loop
from stabletrain.beside.preflight.recording import replaced
from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.tree import Tree, map_tensors
from stabletrain.machine import compiling
from stabletrain.records import Batch
from stabletrain.several_optimizers import optimizers_of
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.step import train_step
from stabletrain.tracking.progress import Progress
from stabletrain.trainer import stages
from stabletrain.trainer.build import build
from stabletrain.trainer.run import TrainingRun

QUIET = ("wandb=disabled", "checkpoint=off", "report=false", "forecast=off", "check=off", "resume=none")
"""Overrides of a run that is only checked: nothing is written, and it begins anew."""

PRECISIONS = {"tf32": "fp32", "bf16_params": "bf16", "fp8": "bf16"}
"""Modes of precision as a check knows them, where the name differs."""


def maker(cfg: Any, folder: Path, ranks: int = 1) -> Callable[[], Loop]:
    """Returns a function that makes fresh runs of a configuration.

    Args:
        cfg: checked by `config.checks.check`, inside a Hydra job, with the overrides of `QUIET`.
        folder: receives a folder for each run.
        ranks: number of ranks that divide a batch among them.
    """
    numbers = count()
    counted: list[Any] = []  # the FLOPs of a sample: the same in each run, and a tenth of the time to build one

    def count_once(inner: Callable[..., Any], *args: Any) -> Any:
        if not counted:
            counted.append(inner(*args))
        return counted[0]

    def make() -> Loop:
        with replaced(stages, "cost", count_once):
            run = build(cfg, folder / str(next(numbers)), Progress(cfg.log_every, io.StringIO()))
        # Nothing is logged, and batches are looked up one by one.
        run.data.batches.close()
        run.output.tracker.close(0)
        return loop_of_run(run, ranks)

    return make


def loop_of_run(run: TrainingRun, ranks: int = 1) -> Loop:
    """Returns a built run as the checks see it."""
    state, tools, parts = run.state, run.tools, run.saved.parts

    def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
        whole = run.data.load(step).to(run.device)
        size = len(whole) // ranks
        own = whole.rows(slice(rank * size, (rank + 1) * size))
        return own.inputs, own.targets

    def loss(tensors: tuple[Tensor, Tensor]) -> Tensor:
        whole = Batch(*tensors)
        tools.determinism.seed_step(tools.seed, state.step)
        inputs, _, _ = tools.sanitizer.inputs(whole.inputs)
        with tools.precision.autocast():
            outputs = tools.wrap_alone(state.model)(inputs)
        targets, _ = tools.sanitizer.targets(whole.targets, tools.objective.classes(outputs))
        return tools.objective(outputs, whole.having(inputs, targets), whole.n_valid()).total

    def step(tensors: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tensor(train_step(state, Batch(*tensors).split(run.plan.grad_accum_steps), tools).loss)

    def load(tree: Tree) -> None:
        restore(tree, state, parts)
        # A step sets its rate by its number: until then, show the one that the state was saved with.
        tools.learning_rate.set_(state.optimizer.param_groups, max(state.step - 1, 0))

    return Loop(
        model=state.model,
        optimizers=optimizers_of(state.optimizer),
        loss=loss,
        batch=batch,
        step=step,
        next_batch=lambda: batch(state.step),
        save=lambda: map_tensors(lambda tensor: tensor.detach().clone(), capture(state, parts)),
        load=load,
        scaler=LossScale(tools.precision) if tools.precision.name == "fp16" else None,
        others={name: each for name, each in parts.items() if name in ("clipping", "guard")},
        precision=mode_of(tools.precision),
        compiled=compiling.compiled_shape(state.model) is not None,
        ranks=ranks,
    )


def mode_of(precision: FullPrecision) -> str:
    """Returns a run's mode of precision as the checks name it."""
    return PRECISIONS.get(precision.name, precision.name)


class LossScale:
    """The loss scale of a run, with the names of a `GradScaler`.

    Args:
        precision: of the run, fp16.
    """

    def __init__(self, precision: FullPrecision) -> None:
        self._precision = precision

    def is_enabled(self) -> bool:
        """Returns True."""
        return True

    def get_scale(self) -> float:
        """Returns the loss scale."""
        return float(self._precision.loss_scale())

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale, and the count of applied steps towards its next doubling."""
        return {**self._precision.state_dict(), "scale": self.get_scale()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them."""
        self._precision.load_state_dict({**state, "scale": torch.tensor(state["scale"])})
