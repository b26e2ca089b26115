"""A resume does not restore everything."""

import random

import torch

from tests.reliability.preflight.faults.fault import Fault
from tests.reliability.preflight.loops import warmup


def without(saved, part):
    """Returns what is saved, but for the objects whose names begin so."""
    return {name: each for name, each in saved.items() if not name.startswith(part)}


# ---- the optimizer's state


class OptimizerNotSaved(Fault):
    """Only the model is saved and loaded, and not the optimizer."""

    kind, loops = "optimizer_not_restored", ("mlp", "cnn", "gpt", "rnn", "amp")
    says = "optimizer state empty after load"
    points_at = ("optimizers.0",)

    def saved(self):
        return without(super().saved(), "optimizers")


class OptimizerMadeAnew(Fault):
    """The optimizer is made anew after its state was loaded."""

    kind, loops = "optimizer_not_restored", ("mlp", "vae")
    says = "optimizer state empty after load: the optimizer is made after load_state_dict"
    points_at = ("optimizers.0",)

    def load(self, state):
        super().load(state)
        self.make_optimizers()  # here
        self.schedulers[0].load_state_dict(state["schedulers.0"])


class LoadedIntoEmpty(Fault):
    """Only entries that the fresh optimizer has are filled, and it has none before its first step."""

    kind, loops = "optimizer_not_restored", ("gpt", "finetune", "accumulation")
    says = "optimizer state empty after load: the fresh optimizer had no entries to fill"
    points_at = ("optimizers.0",)

    def load(self, state):
        fresh, given = self.optimizers[0].state_dict(), state["optimizers.0"]
        known = {key: value for key, value in given["state"].items() if key in fresh["state"]}  # here
        super().load({**state, "optimizers.0": {**given, "state": known}})


# ---- the scheduler


class SchedulerNotSaved(Fault):
    """The scheduler is neither saved nor loaded."""

    kind, loops = "scheduler_not_restored", ("mlp", "gpt", "cnn", "contrastive", "rnn")
    says = "schedulers.0.last_epoch is 3 and 0 after load"
    points_at = ("schedulers.0",)

    def saved(self):
        return without(super().saved(), "schedulers")


class WarmupAnew(Fault):
    """The scheduler is made after the load, and the warmup begins again."""

    kind, loops = "scheduler_not_restored", ("mlp", "amp")
    says = "schedulers.0.last_epoch is 3 and 0 after load: the warmup begins anew"
    points_at = ("schedulers.0", "optimizers.0.param_groups[0].lr")

    def load(self, state):
        super().load(state)
        self.schedulers = [warmup(self.optimizers[0])]  # here


class RateOfOptions(Fault):
    """After the load, the learning rate is set to that of the options."""

    kind, loops = "scheduler_not_restored", ("vae", "cnn", "finetune")
    says = "optimizers.0.param_groups[0].lr is another one after load"
    points_at = ("optimizers.0.param_groups",)

    def load(self, state):
        super().load(state)
        for group in self.optimizers[0].param_groups:
            group["lr"] = group["initial_lr"]  # here


# ---- the loss scale

HALF = {"precision": "fp16"}


class ScalerNotSaved(Fault):
    """The scaler is neither saved nor loaded."""

    kind, loops, options = "scaler_not_restored", ("amp", "gpt"), HALF
    says = "scaler.scale is 2048 and 1024 after load"
    points_at = ("scaler",)

    def saved(self):
        return without(super().saved(), "scaler")


class AnotherScaler(Fault):
    """The state is loaded into a scaler that the loop does not use."""

    kind, loops, options = "scaler_not_restored", ("amp", "mlp"), HALF
    says = "scaler.scale is 2048 and 1024 after load"
    points_at = ("scaler",)

    def load(self, state):
        own = self.scaler
        self.scaler = torch.amp.GradScaler("cpu")
        super().load(state)
        self.scaler = own  # here


class OnlyTheScale(Fault):
    """The scale is restored; how many steps it has been without an overflow is not."""

    kind, loops, options = "scaler_not_restored", ("amp", "cnn"), HALF
    says = "scaler._growth_tracker is 1 and 0 after load"
    points_at = ("scaler",)

    def load(self, state):
        super().load({**state, "scaler": {**state["scaler"], "_growth_tracker": 0}})  # here


# ---- the position in the data


class DataFromTheStart(Fault):
    """The data begin from the start."""

    kind, loops = "position_not_restored", ("mlp", "gpt", "contrastive", "finetune")
    says = "the first batch after load is the first of the training"
    points_at = ("position", "data")

    def load(self, state):
        super().load({**state, "position": 0})  # here


class EpochForgotten(Fault):
    """The place in the epoch is restored and the epoch is not, so that the order is the first epoch's."""

    kind, loops = "position_not_restored", ("mlp", "rnn")
    says = "the first batch after load is that of another epoch"
    points_at = ("position", "data")

    def load(self, state):
        super().load({**state, "position": state["position"] % self.epoch})  # here


class OneBatchMore(Fault):
    """The position is that of a loader that had fetched one batch more."""

    kind, loops = "position_not_restored", ("cnn", "vae", "accumulation")
    says = "the load skips a batch"
    points_at = ("position", "data")

    def save(self):
        state = super().save()
        return {**state, "position": state["position"] + 1}  # here


# ---- the options of a group


class DecayOfOptions(Fault):
    """After the load, the weight decay of the options is set in every group."""

    kind, loops = "group_options_changed", ("gpt", "finetune", "checkpointed")
    says = "optimizers.0.param_groups[1].weight_decay is another one after load"
    points_at = ("optimizers.0.param_groups",)

    def load(self, state):
        super().load(state)
        for group in self.optimizers[0].param_groups:
            group["weight_decay"] = 0.1  # here


class GroupsSwapped(Fault):
    """The groups are restored in another order."""

    kind, loops = "group_options_changed", ("gpt", "finetune")
    says = "optimizers.0.param_groups[0].weight_decay and that of [1] are swapped after load"
    points_at = ("optimizers.0.param_groups",)

    def load(self, state):
        super().load(state)
        first, second = self.optimizers[0].param_groups
        first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]  # here


class DefaultsAfterLoad(Fault):
    """After the load, options that the user did not write down have PyTorch's defaults."""

    kind, loops = "group_options_changed", ("cnn", "gpt", "accumulation")
    says = "optimizers.0.param_groups[0].momentum (betas) is another one after load"
    points_at = ("optimizers.0.param_groups",)

    def load(self, state):
        super().load(state)
        for group in self.optimizers[0].param_groups:
            group.update({"betas": (0.9, 0.999)} if "betas" in group else {"momentum": 0.0, "nesterov": False})  # here


# ---- BatchNorm's statistics


class OnlyParameters(Fault):
    """The model's parameters are saved, and not its buffers."""

    kind, loops, options = "batchnorm_not_restored", ("cnn", "finetune"), {"ema": False}
    says = "bn2.running_mean and others are those of a fresh model after load"
    points_at = ("bn",)

    def save(self):
        state = super().save()
        return {**state, "model": {name: each.detach().clone() for name, each in self.model.named_parameters()}}

    def load(self, state):
        super().load({**state, "model": {**self.model.state_dict(), **state["model"]}})  # here


class StatisticsFiltered(Fault):
    """Running statistics are filtered out at load, as for other data."""

    kind, loops, options = "batchnorm_not_restored", ("cnn", "finetune"), {"ema": False}
    says = "bn2.running_mean and bn2.running_var are those of a fresh model after load"
    points_at = ("bn",)

    def load(self, state):
        kept = {name: each for name, each in state["model"].items() if "running" not in name}  # here
        super().load({**state, "model": {**self.model.state_dict(), **kept}})


class NotPersistent(Fault):
    """The statistics are buffers that `state_dict` leaves out."""

    kind, loops, options = "batchnorm_not_restored", ("cnn", "finetune"), {"ema": False}
    says = "bn2.running_mean and bn2.running_var are in no state_dict"
    points_at = ("bn",)

    def make_model(self):
        model = super().make_model()
        model.bn2._non_persistent_buffers_set |= {"running_mean", "running_var"}  # here
        return model


# ---- random numbers


class RandomNotRestored(Fault):
    """PyTorch's random state is not restored."""

    kind, loops = "generator_not_restored", ("gpt", "rnn", "checkpointed")
    says = "the random state of PyTorch is not restored: dropout draws other masks after load"
    points_at = ("random", "torch")

    def load(self, state):
        super().load({**state, "random": torch.get_rng_state()})  # here


class NoiseNotRestored(Fault):
    """The loop's own generator is not restored."""

    kind, loops = "generator_not_restored", ("vae",)
    says = "the loop's generator is not restored: the loss draws other noise after load"
    points_at = ("random", "noise", "generator")

    def load(self, state):
        super().load({**state, "noise": self.noise.get_state()})  # here


class PythonNotRestored(Fault):
    """Images are flipped by Python's `random`, whose state is not saved."""

    kind, loops = "generator_not_restored", ("cnn", "finetune")
    says = "the random state of Python is not restored: the augmentation draws other numbers after load"
    points_at = ("random",)

    def criterion(self, batch):
        x, y = batch
        return super().criterion((torch.roll(x, random.randrange(-3, 4), -1), y))  # here


# ---- the average of the weights

AVERAGED = {"ema": True}


class AverageNotSaved(Fault):
    """The average is neither saved nor loaded."""

    kind, loops, options = "ema_not_restored", ("cnn", "mlp"), AVERAGED
    says = "ema is that of a fresh model after load"
    points_at = ("ema",)

    def saved(self):
        return without(super().saved(), "ema")


class AverageMadeAnew(Fault):
    """The average begins anew from the weights that were loaded."""

    kind, loops, options = "ema_not_restored", ("cnn", "mlp"), AVERAGED
    says = "ema equals the weights after load"
    points_at = ("ema",)

    def load(self, state):
        super().load(state)
        self.others["ema"].module.load_state_dict(self.model.state_dict())  # here


class AverageUncounted(Fault):
    """The average's weights are restored and its count is not, so that its first update copies the weights."""

    kind, loops, options = "ema_not_restored", ("cnn", "gpt"), AVERAGED
    says = "ema.n_averaged is 3 and 0 after load"
    points_at = ("ema",)

    def load(self, state):
        super().load(state)
        self.others["ema"].n_averaged.zero_()  # here
