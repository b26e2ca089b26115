"""A resume does not restore everything."""

import math

import numpy as np
import torch

from tests.reliability.preflight.held_out.loops import (
    Diffusion,
    Embedder,
    Metric,
    QLearning,
    Recommender,
    Translation,
    ViT,
)
from tests.reliability.preflight.held_out.program import planted


@planted(
    "optimizer_not_restored",
    "the optimizer begins anew after load: its state was filed under numbers, which no parameter has",
    "optimizers.0",
)
class StateByNumber(Translation):
    """The saved state is put into `optimizer.state` by hand; `state_dict` then shows it, and no step uses it."""

    def load(self, state):
        fresh = self.optim.state_dict()
        super().load({**state, "optim": fresh})
        self.optim.state.update(state["optim"]["state"])  # here: keys are 0, 1, 2, not parameters
        for group, saved in zip(self.optim.param_groups, state["optim"]["param_groups"], strict=True):
            group["lr"] = saved["lr"]


@planted("optimizer_not_restored", "the second optimizer's state is empty after load", "optimizers.1")
class SecondNotRestored(Recommender):
    """An optimizer was added to the script, and not to what is loaded."""

    def load(self, state):
        fresh = self.optimizers[1].state_dict()
        fresh["param_groups"] = state["optimizers"][1]["param_groups"]
        super().load({**state, "optimizers": [state["optimizers"][0], fresh]})  # here


@planted(
    "scheduler_not_restored",
    "schedulers.0.T_cur is 3 and 0 after load: only last_epoch is restored",
    "schedulers.0",
)
class OnlyLastEpoch(Diffusion):
    """Warm restarts of which only the number of steps is restored, and not the place in the cycle."""

    def load(self, state):
        fresh = self.lr_scheduler.state_dict()
        super().load({**state, "lr_scheduler": {**fresh, "last_epoch": state["lr_scheduler"]["last_epoch"]}})  # here


@planted(
    "scaler_not_restored",
    "scaler.growth_interval is 2 and 2000 after load: a new scaler was made of the scale alone",
    "scaler",
)
class ScalerFromScale(Diffusion):
    """The scaler is made anew with the saved scale; its interval and its count are the defaults."""

    def load(self, state):
        super().load(state)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=state["scaler"]["scale"])  # here


@planted(
    "position_not_restored",
    "the first batch after load is the first of the epoch, not the next one",
    "position",
    "data",
    "batch",
)
class EpochBeginsAnew(ViT):
    """The epoch is restored, and the place in it is not."""

    def load(self, state):
        super().load({**state, "batch_idx": 0})  # here


@planted(
    "group_options_changed",
    "optimizers.0.param_groups[0].betas is another one after load: the script's own options win",
    "optimizers.0.param_groups",
)
class OptionsOfScript(ViT):
    """The options of the script win over those of the checkpoint, though OneCycleLR has changed beta 1."""

    def load(self, state):
        super().load(state)
        for group in self.optimizer.param_groups:
            group["betas"] = self.optimizer.defaults["betas"]  # here


class Cumulative(Metric):
    """BatchNorm whose running statistics are means over all batches."""

    def make_model(self):
        return Embedder(momentum=None)


@planted(
    "batchnorm_not_restored",
    "num_batches_tracked is 3 and 0 after load, so that the next batch replaces the running statistics",
    *("stem", "body"),
)
class OnlyFloats(Cumulative):
    """Only floating-point tensors are loaded; the count of batches, which a cumulative mean needs, is an integer."""

    def load(self, state):
        model = self.model.state_dict() | {name: each for name, each in state[0].items() if each.is_floating_point()}
        super().load([model, *state[1:]])  # here


@planted(
    "generator_not_restored",
    "a NumPy generator of the loop is not restored: the augmentation draws other numbers after load",
    *("random", "generator", "numpy", "augment"),
)
class NumpyAugments(Metric):
    """Images are made brighter by a generator of NumPy's that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.augment = np.random.default_rng(0)

    def loss(self, batch):
        images, labels = batch
        return super().loss((images * self.augment.uniform(0.5, 1.5), labels))  # here


@planted("ema_not_restored", "ema is that of a fresh model after load: no name matched, and strict=False", "ema")
class PrefixMismatch(ViT):
    """The average was saved with the prefix of a wrapper and is loaded with `strict=False`: no name matches."""

    def save(self):
        state = super().save()
        state["ema"]["module"] = {f"module.{name}": each for name, each in state["ema"]["module"].items()}
        return state

    def load(self, state):
        kept = self.ema.state_dict()["module"]
        super().load({**state, "ema": {**state["ema"], "module": kept}})
        self.ema.module.load_state_dict(state["ema"]["module"], strict=False)  # here


@planted("ema_not_restored", "the target network is the online one after load", *("target", "others"))
class TargetFromOnline(QLearning):
    """The target network is not loaded, but copied from the online one."""

    def load(self, state):
        super().load(state)
        self.target.load_state_dict(self.online.state_dict())  # here


@planted(
    "scheduler_not_restored",
    "the learning rate jumps after load: the loop counts its steps for the cosine from 0",
    "optimizers.0.param_groups",
)
class CosineByHand(QLearning):
    """A cosine by hand whose step is counted in a variable that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def step(self, batch):
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-3 * (0.1 + math.cos(math.pi * min(self.calls, 8) / 8) ** 2)
        self.calls += 1  # here: not saved
        return super().step(batch)
