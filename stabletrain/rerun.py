"""An incident's step run again from its folder alone, as it was or with a fix to try.

The model and what acts in a step are built from the configuration that the folder keeps, without data: weights and
batch are there. Of a model's nulls that the data filled, the saved shapes tell the size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from stabletrain.agreement import FROM_DATA, vocabulary
from stabletrain.config import make, plain
from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.forensics import saved
from stabletrain.forensics.replay import Outcome, replay
from stabletrain.machine import hardware
from stabletrain.moved import updated
from stabletrain.overrides import changed
from stabletrain.parallel import Alone
from stabletrain.records import Reading, TrainState
from stabletrain.stability.chunks import in_chunks
from stabletrain.stability.guard import NoGuard
from stabletrain.stability.intake import Intake
from stabletrain.stability.objective import Objective
from stabletrain.stability.schedule import LearningRate
from stabletrain.tools import Tools
from stabletrain.tracking import metrics

ODD = 7919
"""A size that nobody chooses: where it turns up in a model's shapes, there stands what was left to the data."""


@dataclass(frozen=True)
class Again:
    """A step run again.

    Attributes:
        then: what the step measured; None if that is not known.
        now: what came of it.
        overrides: that were tried.
        fresh: parameters of the tried model that the incident knows nothing of, and that are as initialised.
        applied: whether the step's update is in the weights already, so that it is not the same step.
    """

    then: Reading | None
    now: Outcome
    overrides: Sequence[str]
    fresh: Sequence[str]
    applied: bool = False

    def as_json(self) -> dict[str, Any]:
        """The same for programs; a number that is not finite is a word."""
        then = None if self.then is None else {"loss": self.then.loss, "grad_norm": self.then.grad_norm}
        now = {"loss": self.now.loss, "grad_norm": self.now.grad_norm}
        return metrics.plain(
            {
                "same_bits": None if self.overrides else self.now.bitwise_equal_to_reading,
                "finite": self.now.finite,
                "then": then,
                "now": now,
                "zero_gradients": self.now.zero_gradients,
                "overrides": self.overrides,
                "fresh_parameters": self.fresh,
            }
        )

    def __str__(self) -> str:
        """A table and a sentence."""
        lines = [f"{'':<6}{'loss':>14}{'gradient norm':>16}"]
        for name, one in (("then", self.then), ("now", self.now)):
            if one is not None:
                lines.append(f"{name:<6}{one.loss:>14.8g}{one.grad_norm:>16.8g}")
        if self.fresh:
            lines.append(f"new    {', '.join(self.fresh[:3])}: untrained, the incident's weights have no such part")
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        """One sentence: the same bits, or what the overrides did."""
        finite = "finite" if self.now.finite else "not finite"
        if self.applied and self.now.finite and self.now.zero_gradients is not None:
            finite += f", and {self.now.zero_gradients:.1%} of its gradients are 0"
        if self.overrides:
            return f"with {' '.join(self.overrides)} the step is {finite}"
        if self.applied:
            return f"run again, on the weights that it has made, the step is {finite}"
        if self.now.bitwise_equal_to_reading is None:
            why = "is not known" if self.then is None else "was computed by a compiled model, whose bits differ"
            return f"run again the step is {finite}; what it was the first time {why}"
        if self.now.bitwise_equal_to_reading:
            return f"the same bits: the step is {finite}, as it was"
        return (
            f"other bits: run again the step is {finite}. Another machine or software computes others; on the same "
            "one, it was the machine, or a fault put in on purpose"
        )


def again(folder: Path, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Again:
    """Runs an incident's step again, on the device that the overrides, or else the run, chose.

    Args:
        folder: the incident's.
        overrides: `group=option` and `key=value`, as `train.py` takes them.
        config_dir: the user's own groups, if an override names one of their options.

    Raises:
        ConfigError: the folder is no incident that can be replayed, or an override cannot be tried.
        StabletrainError: the step could not be run.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder: name one of <run>/incidents/; `stabletrain diagnose <run>` lists them"
        )
    if not (folder / saved.SCENE).exists():
        raise ConfigError(f"{folder}: {why_not(folder)}")
    about = saved.about(folder)
    if not {"config", "choices"} <= set(about):
        raise ConfigError(f"{folder / saved.SCENE} holds no configuration: replay an incident of a run of train.py")
    torch.set_num_threads(saved.read(folder).get("threads") or torch.get_num_threads())  # sums are cut up by them
    recorded = DictConfig(updated(about["config"]))
    cfg = changed(recorded, about["choices"], overrides, config_dir) if overrides else recorded
    cfg.model = sized(cfg, folder)
    model, tools = built(cfg)
    other = plain(cfg)["model"] != plain(recorded)["model"]
    scene = saved.load_scene(folder, model, tools, strict=not other)
    if cfg.grad_accum_steps != recorded.grad_accum_steps:
        scene = replace(scene, micro_batches=cfg.grad_accum_steps)
    if cfg.precision.get("init_scale") != recorded.precision.get("init_scale"):  # else the scale is the step's own
        scene = replace(scene, loss_scale=float(tools.precision.loss_scale()))
    outcome = replay(scene, "same")
    if outcome.not_run:
        raise StabletrainError(f"{folder}: the step cannot be run: {outcome.not_run}")
    known = saved.read(folder)[saved.STATE]["parameters"]
    fresh = [name for name, _ in model.named_parameters() if name not in known]
    return Again(scene.reading, outcome, tuple(overrides), fresh, scene.applied)


def why_not(folder: Path) -> str:
    """Why a folder cannot be replayed."""
    if (folder / "diagnosis.json").exists():
        return "weights and batch were not kept, so it cannot be replayed: train with forensics.keep_state=true"
    return "it holds no incident: name one of <run>/incidents/; `stabletrain diagnose <run>` lists them"


def built(cfg: DictConfig) -> tuple[nn.Module, Tools]:
    """The model on its device, with the weights it was made with, and what acts in a step."""
    determinism = make(cfg, "determinism")
    determinism.prepare()
    device = hardware.pick(cfg.device)
    precision = make(cfg, "precision", device=device)
    precision.prepare()
    determinism.seed_run(cfg.seed)
    model = make(cfg, "model").to(device)
    precision.islands(model)
    precision.attach(model, TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0)).optimizer)
    tools = Tools(
        intake=Intake(vocabulary(model, cfg.model)),
        precision=precision,
        objective=in_chunks(
            Objective(make(cfg, "zloss"), cfg.label_smoothing), cfg.get("loss_chunk", "none"), model, able=True
        ),
        clipping=make(cfg, "clipping"),
        after_update=make(cfg, "qkclip"),
        guard=NoGuard(),
        learning_rate=LearningRate(make(cfg, "warmup"), make(cfg, "schedule"), cfg.steps),
        determinism=determinism,
        seed=cfg.seed,
        parallel=Alone(),
    )
    return model, tools


def sized(cfg: DictConfig, folder: Path) -> DictConfig:
    """The model's configuration, with what was left to the data filled in from the incident's shapes.

    Raises:
        ConfigError: the shapes do not say it.
    """
    open_ones = [key for key in FROM_DATA if key in cfg.model and cfg.model[key] is None]
    if not open_ones:
        return cfg.model
    probe = DictConfig(plain(cfg))
    for number, key in enumerate(open_ones):
        probe.model[key] = ODD + 2 * number
    with torch.device("meta"):
        model = make(probe, "model")
    found = saved.read(folder)
    state = saved.tensors_of(folder, saved.STATE, found)
    then = {name: tensor.shape for part in ("parameters", "buffers") for name, tensor in state[part].items()}
    length = saved.tensors_of(folder, saved.BATCH, found)["inputs"].shape[-1]
    filled = DictConfig(plain(cfg)["model"])
    for number, key in enumerate(open_ones):
        odd = ODD + 2 * number
        here = [
            then[name][dim]
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            for dim, size in enumerate(tensor.shape)
            if size == odd and name in then and len(then[name]) == tensor.ndim
        ]
        if key == "block_size" and not here:
            here = [length]  # nothing is as long as a sample but the samples
        if not here:
            raise ConfigError(f"{folder}: model.{key} came from the data, and no shape tells it: add model.{key}=...")
        filled[key] = here[0]
    return filled
