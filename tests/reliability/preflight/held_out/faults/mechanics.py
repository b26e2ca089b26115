"""The parts of a step are called in a wrong order, or not all, or hold the wrong parameters."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.reliability.preflight.held_out.loops import (
    BOS,
    Diffusion,
    Metric,
    MultiTask,
    PatchClassifier,
    Recommender,
    Seq2Seq,
    Translation,
    Trunk,
    TwoHeads,
    ViT,
)
from tests.reliability.preflight.held_out.program import planted

# ---- clip_before_unscale


@planted(
    "clip_before_unscale",
    "each gradient is clipped relative to its weights while it is scaled: unscale_ first",
    *("clip", "scaler"),
)
class AdaptiveClippingScaled(Diffusion):
    """Adaptive gradient clipping (NFNets) by hand, with the scaled gradients."""

    def scaled_step(self, loss):
        self.scaler.scale(loss).backward()
        for p in self.model.parameters():
            most = 0.05 * p.norm().clamp(min=1e-3)
            p.grad.mul_((most / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))  # here
        self.scaler.step(self.optimizer)
        self.scaler.update()


# ---- scaler_twice


@planted(
    "scaler_twice",
    "the gradient is as many times too short as the loss scale: hooks divide by it, and so does unscale_",
    "scaler",
)
class HooksUnscale(Diffusion):
    """Hooks unscale the gradients for a log of their norms, and `unscale_` does so again."""

    def __init__(self):
        super().__init__()
        for p in self.model.parameters():
            p.register_hook(lambda grad: grad / self.scaler.get_scale())  # here


@planted(
    "scaler_twice",
    "the optimizer steps with gradients that are as many times too long as the loss scale: they are never unscaled",
    "scaler",
)
class NeverUnscaled(Diffusion):
    """The loss is scaled and the optimizer steps directly; Adam hides it, and clipping is of scaled gradients."""

    def scaled_step(self, loss):
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm * 512)
        for p in self.model.parameters():
            p.grad.clamp_(-1.0, 1.0)
        self.optimizer.step()  # here: not scaler.step


# ---- scheduler_first


@planted(
    "scheduler_first",
    "the scheduler steps once a micro-batch: twice a step, and before the optimizer",
    *("schedulers.0", "scheduler"),
    warns=True,
)
class OnceAMicroBatch(Translation):
    """`scheduler.step` is within the loop over micro-batches."""

    def step(self, batch):
        self.model.train()
        self.optim.zero_grad()
        total = self.tokens(batch)
        for chunk in self.chunks(batch):
            (self.loss(chunk) * self.tokens(chunk) / total).backward()
            self.schedule.step()  # here
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optim.step()


# ---- scheduler_never


@planted("scheduler_never", "schedulers.1 is never stepped: the learning rate does not decay", "schedulers.1")
class SecondForgotten(Metric):
    """Of two schedulers, warmup and decay, only the first is stepped."""

    def step(self, batch):
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.warmup.step()  # here
        return float(loss.detach())


# ---- not_zeroed


@planted(
    "not_zeroed",
    "the gradients of mlp and mean of the step before are still there: only one of two optimizers zeroes its own",
    *("mlp", "mean", "zero_grad", "optimizers.1"),
)
class OneOfTwoZeroed(Recommender):
    """Only the first optimizer's gradients are zeroed."""

    def step(self, batch):
        self.optimizers[0].zero_grad()  # here
        loss = self.loss(batch)
        if not torch.isfinite(loss):
            return
        loss.backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()


# ---- nan_stays


@planted(
    "nan_stays",
    "after a step that was skipped for its NaN no step moves the weights: the running loss stays NaN",
    *("skip", "optimizers.0", "gradient", "no step", "weights"),
)
class SpikeDetector(MultiTask):
    """Skips steps whose loss is far above a running mean, which a NaN makes NaN for ever."""

    def __init__(self):
        super().__init__()
        self.running = None

    def step(self, batch):
        for each in self.optimizers:
            each.zero_grad()
        loss = self.accumulate(batch)
        self.running = loss if self.running is None else 0.9 * self.running + 0.1 * loss  # here: before the test
        if not loss < 5 * abs(self.running) + 5:
            return
        for each in (*self.optimizers, *self.schedulers):
            each.step()

    def save(self):
        return {**super().save(), "running": self.running}

    def load(self, state):
        super().load(state)
        self.running = state["running"]


@planted(
    "nan_stays",
    "after a step that was skipped for its NaN the running statistics of BatchNorm are NaN",
    *("stem", "body", "running"),
)
class StatisticsKeepNaN(Metric):
    """A step that is not finite is skipped, but its forward pass has updated the running statistics."""

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = self.loss(batch)  # here
        if not loss.isfinite():
            return
        loss.backward()
        self.optimizer.step()
        for each in self.schedulers:
            each.step()


# ---- stale_parameters


@planted(
    "stale_parameters",
    "the optimizer holds head.weight from before weight_norm; the new parameters are in no group",
    "head",
)
class NormedAfterwards(ViT):
    """`weight_norm` replaces the head's weight after the optimizer was made."""

    def build_schedulers(self):
        weight_norm(self.model.head)  # here
        return super().build_schedulers()


@planted(
    "stale_parameters",
    "the optimizer holds the embedding from before words were added; the larger one is in no group",
    *("source", "target", "out"),
)
class WordsAdded(Translation):
    """Embeddings are made larger for new words after the optimizer was made."""

    def __init__(self):
        super().__init__()
        larger = nn.Embedding(20, 16, padding_idx=0)
        with torch.no_grad():
            larger.weight[: len(self.model.source.weight)] = self.model.source.weight
        self.model.source = larger  # here


# ---- in_no_group


@planted(
    "in_no_group",
    "centers requires a gradient, is used by the loss, and is in no optimizer and in no model: it is never updated",
    *("centers", "criterion", "class_center"),
)
class CenterLoss(Metric):
    """The loss has learned centers of its own, which the optimizer never got (pytorch-center-loss, issue 22)."""

    def __init__(self):
        super().__init__()
        self.class_center = nn.Embedding(8, 12)

    def triplets(self, z, labels):
        return super().triplets(z, labels) + 0.5 * (z - self.class_center(labels)).square().sum(1).mean()  # here


@planted(
    "in_no_group",
    "layers.0 requires a gradient and is in no group: it was unfrozen after the optimizer was made",
    "layers.0",
)
class UnfrozenLater(ViT):
    """A layer was frozen while the optimizer was made of what is trained, and is unfrozen since."""

    def build_model(self):
        model = super().build_model()
        model.layers[0].requires_grad_(False)
        return model

    def build_schedulers(self):
        self.model.layers[0].requires_grad_(True)  # here
        return super().build_schedulers()


# ---- in_two


@planted("in_two", "the trunk's parameters are in both optimizers, and updated twice a step", "trunk")
class OptimizerPerTask(MultiTask):
    """Each task has an optimizer of its head and of the trunk, which both share."""

    def create_optimizers(self):
        trunk = [*self.model.trunk.parameters()]
        return [
            torch.optim.NAdam([*trunk, *self.model.classify.parameters(), self.model.log_var], lr=4e-3),
            torch.optim.NAdam([*trunk, *self.model.regress.parameters()], lr=4e-3),  # here
        ]


# ---- without_gradient


class Clamped(TwoHeads):
    """The uncertainty is clamped, and begins beyond the bound."""

    def uncertainty(self):
        return self.log_var.clamp(-2.0, 2.0)  # here


@planted(
    "without_gradient",
    "the gradient of log_var is exactly 0 and stays so: it begins at 3 and is clamped to 2",
    "log_var",
)
class BeyondClamp(MultiTask):
    """A parameter that begins where a clamp has no gradient."""

    def create(self):
        model = super().create()
        model.__class__ = Clamped
        nn.init.constant_(model.log_var, 3.0)
        return model


class LastLayerSkipped(PatchClassifier):
    """The last layer is not run, as in a copy that takes features of the layer before."""

    def forward(self, images):
        x = self.embed(images)
        for layer in self.layers[:-1]:  # here
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


@planted("without_gradient", "layers.1 is trained by the optimizer and gets no gradient: it is not used", "layers.1")
class OffByOneLayer(ViT):
    """A loop over layers that ends one too early."""

    def build_model(self):
        return LastLayerSkipped(self.classes)


# ---- untied


@planted(
    "untied",
    "out.weight equals target.weight and is another parameter: load_state_dict(assign=True) split the tied weights",
    *("out.weight", "target.weight"),
)
class AssignedCopies(Translation):
    """A checkpoint of copied tensors is assigned, which gives each of the tied weights a tensor of its own."""

    def build(self):
        model = super().build()
        state = {name: each.clone() for name, each in model.state_dict().items()}
        model.load_state_dict(state, assign=True)  # here
        return model


# ---- eval_mode


class StubbornTrunk(Trunk):
    """`train` sets its own flag and forgets its parts."""

    def train(self, mode=True):
        self.training = mode  # here: without super
        return self


@planted("eval_mode", "trunk.block is in eval mode though it is trained: its dropout does nothing", "trunk")
class TrainForgetsParts(MultiTask):
    """A trunk whose parts were put into eval mode when it was loaded, and whose `train` does not reach them."""

    def create(self):
        model = super().create()
        model.trunk.eval()
        model.trunk.__class__ = StubbornTrunk
        return model.train()

    def step(self, batch):
        self.model.train()
        return super().step(batch)


class Peeking(Seq2Seq):
    """Looks at its own greedy output first, in eval mode, and does not go back."""

    def forward(self, source, lengths, inputs):
        self.eval()  # here
        with torch.no_grad():
            seen = super().forward(source, lengths, inputs).argmax(-1)
        mixed = inputs.where(torch.arange(inputs.shape[1]) % 4 > 0, F.pad(seen[:, :-1], (1, 0), value=BOS))
        return super().forward(source, lengths, mixed)


@planted(
    "eval_mode", "the model is in eval mode from within forward: model.train() after decoding", *("model", "dropout")
)
class ScheduledSampling(Translation):
    """Scheduled sampling whose greedy pass leaves the model in eval mode."""

    def build(self):
        model = super().build()
        model.__class__ = Peeking
        return model
