"""The parts of a training step are called in a wrong order, or not all, or hold the wrong parameters."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.reliability.preflight.faults.fault import Fault, become
from tests.reliability.preflight.loops import warmup
from tests.reliability.preflight.models import Block, Regression

# ---- clipping before unscaling

SCALED = {"precision": "fp16", "max_norm": 0.5}


class ClipsScaled(Fault):
    """`unscale_` is never called, so that the norm that is clipped is a thousand times the gradient's."""

    kind, loops, options = "clip_before_unscale", ("amp", "gpt", "cnn"), SCALED
    says = "the gradients are clipped while they are scaled: call scaler.unscale_(optimizer) first"
    points_at = ("clip", "scaler")

    def unscale(self):
        pass  # here


class ClipsScaledValues(Fault):
    """`clip_grad_value_` comes before `unscale_`."""

    kind, loops, options = "clip_before_unscale", ("amp", "mlp"), SCALED
    says = "the gradients are clipped while they are scaled: call scaler.unscale_(optimizer) first"
    points_at = ("clip", "scaler")

    def unscale(self):
        nn.utils.clip_grad_value_(self.model.parameters(), 0.5)  # here
        super().unscale()

    def clip(self):
        pass


class ClipsInHooks(Fault):
    """Hooks clip each gradient as soon as it is there, in the backward pass."""

    kind, loops, options = "clip_before_unscale", ("amp", "cnn"), SCALED
    says = "the gradients are clipped while they are scaled: in a hook of the backward pass"
    points_at = ("clip", "hook", "scaler")

    def make_optimizers(self):
        super().make_optimizers()
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))  # here

    def clip(self):
        pass


# ---- the scaler is used twice


class UpdatedTwice(Fault):
    """`scaler.update` comes after each of two optimizers: it forgets that the second's gradients are unscaled."""

    kind, loops, options = "scaler_twice", ("amp", "mlp"), {"precision": "fp16"}
    says = "scaler.update() is called twice a step: the head's gradients are unscaled twice"
    points_at = ("scaler", "head", "optimizers.1")

    def make_optimizers(self):
        body = [*self.model.first.parameters(), *self.model.second.parameters()]
        self.optimizers = [torch.optim.AdamW(each, lr=1e-2) for each in (body, self.model.head.parameters())]
        self.schedulers = [warmup(each) for each in self.optimizers]

    def update(self):
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            self.scaler.update()  # here


class ScaledTwice(Fault):
    """The loss is scaled twice, and the gradient unscaled once."""

    kind, loops = "scaler_twice", ("amp", "cnn")
    says = "the gradient is as many times too long as the loss scale: the loss is scaled twice"
    points_at, options = ("scaler",), {"precision": "fp16", "init_scale": 8.0, "max_norm": 0.0}

    def scaled(self, loss):
        return super().scaled(super().scaled(loss))  # here


class UnscaledTwice(Fault):
    """The gradient is divided by the scale by hand, and then by `unscale_`."""

    kind, loops = "scaler_twice", ("amp", "cnn")
    says = "the gradient is as many times too short as the loss scale: it is unscaled twice"
    points_at, options = ("scaler",), {"precision": "fp16", "max_norm": 0.0}

    def unscale(self):
        for parameter in self.model.parameters():
            parameter.grad.div_(self.scaler.get_scale())  # here
        super().unscale()


# ---- the scheduler comes first, or twice


class SchedulerFirst(Fault):
    """The scheduler steps before the optimizer."""

    kind, loops, warns = "scheduler_first", ("mlp", "gpt", "vae"), True
    says = "the scheduler steps before the optimizer: the first learning rate is skipped"
    points_at = ("schedulers.0",)

    def zero_grad(self):
        super().zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()  # here

    def schedule(self):
        pass


class SchedulerInLoader(Fault):
    """The scheduler steps where batches are fetched, before the step."""

    kind, loops, warns = "scheduler_first", ("cnn", "contrastive"), True
    says = "the scheduler steps before the optimizer: the first learning rate is skipped"
    points_at = ("schedulers.0",)

    def next_batch(self):
        for scheduler in self.schedulers:
            scheduler.step()  # here
        return super().next_batch()

    def schedule(self):
        pass


class SchedulerTwice(Fault):
    """The scheduler steps in the loop, and a library of the user's steps it too."""

    kind, loops = "scheduler_first", ("gpt", "finetune")
    says = "the scheduler steps twice a step"
    points_at = ("schedulers.0",)

    def schedule(self):
        super().schedule()
        super().schedule()  # here


# ---- the scheduler never steps


class NoSchedule(Fault):
    """`scheduler.step` is never called."""

    kind, loops = "scheduler_never", ("mlp", "contrastive", "checkpointed")
    says = "the scheduler is never stepped: the learning rate stays where it is"
    points_at = ("schedulers.0",)

    def schedule(self):
        pass  # here


class ScheduleOfAnother(Fault):
    """The optimizer was made anew after its scheduler."""

    kind, loops = "scheduler_never", ("vae", "mlp")
    says = "the scheduler steps an optimizer that is not the loop's: the learning rate stays where it is"
    points_at = ("schedulers.0",)

    def make_optimizers(self):
        super().make_optimizers()
        kept = self.schedulers
        super().make_optimizers()
        self.schedulers = kept  # here
        self.schedulers[0].optimizer.step()  # the other optimizer steps too, so that PyTorch does not warn


class RateSetBack(Fault):
    """The loop sets the learning rate of its options before each step."""

    kind, loops = "scheduler_never", ("vae", "cnn")
    says = "the scheduler's learning rate is overwritten: each step has the first one"
    points_at = ("schedulers.0", "optimizers.0.param_groups[0].lr")

    def zero_grad(self):
        super().zero_grad()
        for group in self.optimizers[0].param_groups:
            group["lr"] = group["initial_lr"]  # here


# ---- gradients are not zeroed


class NeverZeroed(Fault):
    """`zero_grad` is never called."""

    kind, loops = "not_zeroed", ("mlp", "rnn", "accumulation", "vae")
    says = "the gradients of the step before are still there: call optimizer.zero_grad()"
    points_at = ("zero_grad", "gradient", "optimizers.0")

    def zero_grad(self):
        pass  # here


class HeadZeroed(Fault):
    """Only the head's gradients are zeroed."""

    kind, loops = "not_zeroed", ("cnn", "finetune")
    says = "the gradients of the step before are still there, but for the head's"
    points_at = ("conv", "bn", "zero_grad")

    def zero_grad(self):
        self.model.head.zero_grad()  # here


class ZeroedEverySecond(Fault):
    """Gradients are zeroed every second step: left over from two micro-batches a step."""

    kind, loops = "not_zeroed", ("contrastive", "gpt")
    says = "in every second step the gradients of the step before are still there"
    points_at = ("zero_grad", "gradient", "optimizers.0")

    def zero_grad(self):
        if self.position % 2:  # here
            super().zero_grad()


# ---- gradients are not zeroed after a step that the loop skips because it is not finite


class SkipsBeforeZeroing(Fault):
    """A step whose loss is not finite is left before the gradients are zeroed, at its end."""

    kind, loops = "nan_stays", ("mlp", "vae")
    says = "after a step that was skipped for its NaN, the next ones are NaN too: its gradients are not zeroed"
    points_at = ("zero_grad", "gradient", "optimizers.0")

    def step(self, batch):
        loss = self.backward(batch)
        if not loss.isfinite():
            return loss  # here
        self.clip()
        self.update()
        self.schedule()
        self.zero_grad()
        return loss


class SkipsByNorm(Fault):
    """A step whose gradient norm is not finite keeps its gradients."""

    kind, loops = "nan_stays", ("contrastive", "mlp")
    says = "after a step that was skipped for its NaN, the next ones are NaN too: its gradients are not zeroed"
    points_at = ("zero_grad", "gradient", "optimizers.0")

    def step(self, batch):
        loss = self.backward(batch)
        if nn.utils.clip_grad_norm_(self.model.parameters(), 1e9).isfinite():
            self.clip()
            self.update()
            self.schedule()
            self.zero_grad()  # here
        return loss


class ZeroedIfApplied(Fault):
    """Gradients are zeroed before a step only if the one before was applied."""

    kind, loops = "nan_stays", ("mlp", "contrastive")
    says = "after a step that was skipped for its NaN, the next ones are NaN too: its gradients are not zeroed"
    points_at = ("zero_grad", "gradient", "optimizers.0")
    applied = True

    def zero_grad(self):
        if self.applied:  # here
            super().zero_grad()

    def step(self, batch):
        self.zero_grad()
        loss = self.backward(batch)
        self.applied = bool(all(each.grad.isfinite().all() for each in self.model.parameters()))
        if self.applied:
            self.clip()
            self.update()
            self.schedule()
        return loss


# ---- the optimizer holds parameters that the model no longer has


class HeadMadeAnew(Fault):
    """The head is replaced after the optimizer was made."""

    kind, loops = "stale_parameters", ("finetune", "mlp")
    says = "the optimizer holds 2 parameters that are not the model's; head.weight and head.bias are in no group"
    points_at = ("head",)

    def make_optimizers(self):
        super().make_optimizers()
        self.model.head = copy.deepcopy(self.model.head)  # here


class AssignedState(Fault):
    """`load_state_dict(assign=True)` of a pretrained model after the optimizer was made."""

    kind, loops = "stale_parameters", ("mlp", "contrastive")
    says = "the optimizer holds no parameter of the model: load_state_dict(assign=True) replaced them"
    points_at = ("first", "second", "head", "image", "text", "log_scale")

    def make_optimizers(self):
        super().make_optimizers()
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()), assign=True)  # here


class CopiedModel(Fault):
    """The loop trains a copy of the model that the optimizer was made of."""

    kind, loops = "stale_parameters", ("gpt", "vae")
    says = "the optimizer holds no parameter of the model that the loss uses"
    points_at = ("embed", "place", "blocks", "norm", "head", "encoder", "decoder")

    def make_optimizers(self):
        super().make_optimizers()
        self.model = self.network = copy.deepcopy(self.model)  # here


# ---- a parameter in no group


class NormsLeftOut(Fault):
    """The groups are chosen by name, and no group takes the norms."""

    kind, loops = "in_no_group", ("gpt", "checkpointed")
    says = "norm.weight, norm.bias and those of the blocks' norms are in no group of the optimizer"
    points_at = ("norm", "blocks.0.norm", "blocks.1.norm")

    def make_optimizers(self):
        named = [(name, each) for name, each in self.model.named_parameters() if "norm" not in name]  # here
        groups = [
            {"params": [each for _, each in named if each.ndim >= 2], "weight_decay": 0.1},
            {"params": [each for _, each in named if each.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizers = [torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))]
        self.schedulers = [warmup(self.optimizers[0])]


class TemperatureLeftOut(Fault):
    """The optimizer gets the towers, and not the temperature."""

    kind, loops = "in_no_group", ("contrastive",)
    says = "log_scale is in no group of the optimizer"
    points_at = ("log_scale",)

    def make_optimizers(self):
        parameters = [*self.model.image.parameters(), *self.model.text.parameters()]  # here
        self.optimizers = [torch.optim.AdamW(parameters, lr=2e-3)]
        self.schedulers = [torch.optim.lr_scheduler.LinearLR(self.optimizers[0], 0.1, total_iters=10)]


class LayersInList(Regression):
    """Keeps a layer in a plain list, where PyTorch does not see it."""

    def hide(self):
        """Moves the second layer into the list."""
        self.layers = [self._modules.pop("second")]  # here

    def forward(self, x):
        x = F.gelu(self.first(x))
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x)


class LayerInList(Fault):
    """A layer in a plain list is no parameter of the model."""

    kind, loops = "in_no_group", ("mlp", "amp")
    says = (
        "two tensors that require gradients are used by the loss and are no parameters of the model: use a ModuleList"
    )
    points_at = ("layers",)

    def make_model(self):
        model = super().make_model()
        become(model, LayersInList)
        model.hide()
        return model


# ---- a parameter in two groups


class HeadTwice(Fault):
    """The head's parameters are listed twice."""

    kind, loops, warns = "in_two", ("mlp", "vae"), True
    says = "parameters are in the optimizer's group twice, and updated twice a step"
    points_at = ("head", "decoder.2")

    def make_optimizers(self):
        super().make_optimizers()
        last = [*self.model.modules()][-1]
        rate = self.optimizers[0].param_groups[0]["lr"]
        parameters = [*self.model.parameters(), *last.parameters()]  # here
        self.optimizers = [torch.optim.AdamW(parameters, lr=rate)]
        self.schedulers = [warmup(self.optimizers[0])]


class TiedInBoth(Fault):
    """The embedding and the head, which is the embedding, get an optimizer each."""

    kind, loops = "in_two", ("gpt", "rnn")
    says = "embed.weight, which is head.weight, is in two optimizers, and updated twice a step"
    points_at = ("embed.weight", "head.weight")

    def make_optimizers(self):
        rest = [each for name, each in self.model.named_parameters() if "embed" not in name]
        self.optimizers = [
            torch.optim.AdamW([*rest, self.model.head.weight], lr=3e-3),  # here
            torch.optim.SGD([self.model.embed.weight], lr=0.1),
        ]
        self.schedulers = [warmup(each) for each in self.optimizers]


class PartAndAll(Fault):
    """An optimizer of one part was added, and the old one still has all parameters."""

    kind, loops = "in_two", ("finetune", "cnn", "contrastive")
    says = "parameters are in both optimizers, and updated twice a step"
    points_at = ("conv2", "text")

    def make_optimizers(self):
        super().make_optimizers()
        part = getattr(self.model, "conv2", None) or self.model.text
        self.optimizers.append(torch.optim.SGD(part.parameters(), lr=0.02))  # here


# ---- a parameter without gradient


class SkippingRegression(Regression):
    """The second layer is not called."""

    def forward(self, x):
        return self.head(F.gelu(self.first(x)))  # here


class BranchOff(Block):
    """The feed-forward part counts for nothing."""

    def mlp(self, x):
        return 0.0 * super().mlp(x)  # here


class LayerUnused(Fault):
    """A layer that `forward` does not call."""

    kind, loops = "without_gradient", ("mlp", "amp")
    says = "second.weight and second.bias are trained by the optimizer and get no gradient: the loss does not use them"
    points_at = ("second",)

    def make_model(self):
        model = super().make_model()
        become(model, SkippingRegression)
        return model


class DeadUnits(Fault):
    """All units of a layer are below 0, and ReLU's gradient is 0 there."""

    kind, loops = "without_gradient", ("cnn", "finetune")
    says = "the gradient of conv2 and bn2 is exactly 0: no unit behind bn2 is above 0"
    points_at = ("conv", "bn")

    def make_model(self):
        model = super().make_model()
        nn.init.constant_(model.bn2.bias, -50.0)  # here
        return model


class BranchTimesZero(Fault):
    """A branch is multiplied by 0, left over from an ablation."""

    kind, loops = "without_gradient", ("gpt", "checkpointed")
    says = "the gradient of the blocks' norm2, up and down is exactly 0: the branch is multiplied by 0"
    points_at = ("blocks",)

    def make_model(self):
        model = super().make_model()
        for block in model.blocks:
            become(block, BranchOff)
        return model


# ---- tied weights that a copy has split


class TiedByClone(Fault):
    """The head gets a copy of the embedding in place of the embedding."""

    kind, loops = "untied", ("gpt", "checkpointed", "rnn")
    says = "head.weight equals embed.weight and is another parameter: tied weights were split by a copy"
    points_at = ("head.weight", "embed.weight")

    def make_model(self):
        model = super().make_model()
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())  # here
        return model


class EmbeddingCopied(Fault):
    """The embedding is replaced by a copy after the weights were tied."""

    kind, loops = "untied", ("gpt", "rnn")
    says = "head.weight equals embed.weight and is another parameter: tied weights were split by a copy"
    points_at = ("head.weight", "embed.weight")

    def make_model(self):
        model = super().make_model()
        model.embed = copy.deepcopy(model.embed)  # here
        return model


class TiedByData(Fault):
    """Two parameters share their memory: each gets a part of the gradient, and the memory two updates."""

    kind, loops = "untied", ("gpt", "checkpointed")
    says = "head.weight and embed.weight are two parameters in the same memory: two updates a step"
    points_at = ("head.weight", "embed.weight")

    def make_model(self):
        model = super().make_model()
        model.head.weight = nn.Parameter(torch.empty_like(model.embed.weight))
        model.head.weight.data = model.embed.weight.data  # here
        return model


# ---- eval mode left on


class NeverTrain(Fault):
    """The model was put into eval mode when it was loaded."""

    kind, loops = "eval_mode", ("cnn", "gpt", "checkpointed")
    says = "the model is in eval mode: dropout does nothing and BatchNorm uses its running statistics; model.train()"
    points_at = ("model", "bn", "blocks")

    def make_model(self):
        return super().make_model().eval()  # here


class EvalAfterFirst(Fault):
    """An evaluation after the step leaves the model in eval mode."""

    kind, loops = "eval_mode", ("rnn", "cnn")
    says = "the model is in eval mode from the second step on: model.train() after the evaluation"
    points_at = ("model", "dropout", "bn")

    def average(self):
        super().average()
        self.model.eval()  # here


class PartInEval(Fault):
    """One part of the model is in eval mode, though it is trained."""

    kind, loops = "eval_mode", ("vae", "gpt")
    says = "a trained part of the model is in eval mode: its dropout does nothing"
    points_at = ("encoder", "blocks.0")

    def make_model(self):
        model = super().make_model()
        part = model.encoder if hasattr(model, "encoder") else model.blocks[0]
        part.eval()  # here
        return model
