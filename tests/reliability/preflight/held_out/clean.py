"""Programs that look wrong and are right, as experienced people write them, each with a line on what looks wrong."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from tests.reliability.preflight.held_out.loops import (
    WORDS,
    Diffusion,
    Embedder,
    Layer,
    Metric,
    MultiTask,
    PatchClassifier,
    Recommender,
    Seq2Seq,
    Translation,
    ViT,
    drawn,
)
from tests.reliability.preflight.held_out.loops import QLearning as Q
from tests.reliability.preflight.held_out.program import clean

# ---- models


class SharedByCall(Seq2Seq):
    """The last layer uses the embedding in a functional call."""

    def __init__(self):
        super().__init__()
        self.out = nn.Identity()
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, source, lengths, inputs):
        return F.linear(super().forward(source, lengths, inputs), self.target.weight, self.bias)


@clean
class TiedByCall(Translation):
    """Tied weights without a second name."""

    def build(self):
        return SharedByCall()


@clean
class FrozenEncoder(Translation):
    """A pretrained encoder runs under `no_grad`; its weights are in the optimizer and require no gradient."""

    def build(self):
        model = super().build()
        model.source.requires_grad_(False)
        model.encoder.requires_grad_(False)
        model.encode = torch.no_grad()(model.encode)
        return model


class FixedStatistics(Embedder):
    """BatchNorm always uses its running statistics; scale and shift are trained."""

    def train(self, mode=True):
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
        return self


@clean
class FrozenStatistics(Metric):
    """Trained modules in eval mode, as is common where batches are small."""

    def make_model(self):
        return FixedStatistics().train()


class RecomputedLayer(Layer):
    """Recomputed in the backward pass, random numbers included."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Recomputed(PatchClassifier):
    """With `RecomputedLayer`."""

    layer = RecomputedLayer


@clean
class CheckpointedViT(ViT):
    """Checkpointing with stochastic depth: the random state is kept."""

    def build_model(self):
        return Recomputed(self.classes, drop_path=0.3)


class Rounded(torch.autograd.Function):
    """Rounds to 15 levels between -0.5 and 0.5; straight-through within, no gradient outside."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.abs() <= 0.5)
        return (x.clamp(-0.5, 0.5) * 14).round() / 14

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class QuantizedLinear(nn.Linear):
    """Uses its weights rounded."""

    def forward(self, x):
        return F.linear(x, Rounded.apply(self.weight), self.bias)


@clean
class QuantizationAware(ViT):
    """The loss is a step function of the weights, whose gradient is 0 or none; the one that is used is another."""

    def build_model(self):
        model = super().build_model()
        for layer in model.layers:
            layer.fc1.__class__ = layer.fc2.__class__ = QuantizedLinear
        return model


class Reversed(torch.autograd.Function):
    """The identity; the gradient is turned round (Ganin and Lempitsky)."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


@clean
class DomainAdversarial(MultiTask):
    """The trunk's gradient is not that of the loss, on purpose."""

    def create(self):
        model = super().create()
        model.domain = nn.Linear(24, 1)
        return model

    def sums(self, batch):
        first, second = super().sums(batch)
        guess = self.model.domain(Reversed.apply(self.model.trunk(batch[0])))[:, 0]
        return first, second + F.binary_cross_entropy_with_logits(guess, (batch[0][:, 9] > 0).float(), reduction="sum")


class Skipping(PatchClassifier):
    """Runs a layer with probability 0.5 only (LayerDrop)."""

    def forward(self, images):
        x = self.embed(images)
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = layer(x)
        return self.head(self.norm(x)[:, 0])


@clean
class LayerDrop(ViT):
    """Layers that get no gradient at all in some steps."""

    def build_model(self):
        return Skipping(self.classes)


@clean
class ReZero(ViT):
    """Gates of residual branches begin at 0: all that is in the branches gets a gradient of exactly 0 at first."""

    gate = 0.0

    def build_model(self):
        model = super().build_model()
        for layer in model.layers:
            nn.init.constant_(layer.gamma1, self.gate)
            nn.init.constant_(layer.gamma2, self.gate)
        return model


@clean
class TinyLayerScale(ReZero):
    """LayerScale of 1e-6, as in CaiT: gradients of the branches are a millionth of the others."""

    gate = 1e-6


@clean
class SpectralNormed(Q):
    """Spectral norm: the forward pass changes buffers, and two passes of one batch differ."""

    def build_optimizer(self, parameters):
        spectral_norm(self.online.advantage)
        spectral_norm(self.target.advantage).requires_grad_(False)
        return super().build_optimizer([*self.online.parameters()])


# ---- losses


@clean
class Imbalanced(ViT):
    """One row in sixteen is of the second class, with a focal loss: most batches have a single label."""

    classes = 2

    def tensors(self):
        g = drawn(21)
        labels = (torch.arange(96) % 16 == 5).long()
        patterns = torch.randn(2, 1, 8, 8, generator=g)
        return patterns[labels] + 0.5 * torch.randn(96, 1, 8, 8, generator=g), labels

    def loss(self, batch):
        images, labels = batch
        each = F.cross_entropy(self.net(images), labels, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


@clean
class Distillation(ViT):
    """A frozen teacher outside of the model and a temperature of 4; labels are not used."""

    def __init__(self):
        super().__init__()
        self.teacher = PatchClassifier(self.classes, width=24).requires_grad_(False).eval()

    def loss(self, batch):
        images, _ = batch
        with torch.inference_mode():
            soft = (self.teacher(images) / 4).log_softmax(1)
        return 16 * F.kl_div(
            (self.net(images) / 4).log_softmax(1), soft.clone(), log_target=True, reduction="batchmean"
        )


@clean
class GradientPenalty(Q):
    """A critic whose loss has the norm of its own gradient, by a backward pass within the forward pass."""

    def critic(self, states):
        return self.online(states)[:, 0]

    def loss(self, batch):
        real, _, _, fake, _ = batch
        middle = real.lerp(fake, torch.linspace(0, 1, len(real))[:, None]).requires_grad_()
        [slope] = torch.autograd.grad(self.critic(middle).sum(), middle, create_graph=True)
        return (self.critic(fake) - self.critic(real)).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


@clean
class WarmingLoss(MultiTask):
    """The second task's weight rises from 0: its head has no gradient at first, and the loss depends on the step."""

    def total(self, losses, counts, regular=1.0):
        first, second = losses
        return super().total((first, second * min(1.0, self.position / 3)), counts, regular)


@clean
class MeanTeacher(Metric):
    """The teacher is part of the model, has no gradients, and is an average that the loop updates by hand."""

    def make_model(self):
        model = super().make_model()
        model.teacher = copy.deepcopy(model).requires_grad_(False)
        return model

    def make_optimizer(self):
        students = [each for name, each in self.model.named_parameters() if not name.startswith("teacher")]
        return torch.optim.SGD(students, lr=self.lr, momentum=0.9)

    def loss(self, batch):
        images, labels = batch
        z = self.model(images)
        with torch.no_grad():
            goal = self.model.teacher(images.flip(-1))
        return self.triplets(z, labels) + (z - goal).square().sum(1).mean()

    def step(self, batch):
        loss = super().step(batch)
        with torch.no_grad():
            for name, each in self.model.named_parameters():
                if name.startswith("teacher."):
                    each.lerp_(self.model.get_parameter(name.removeprefix("teacher.")), 0.1)
        return loss


# ---- optimizers and steps


@clean
class LayerwiseRates(ViT):
    """Each layer has a learning rate of its own, the first ones a tenth of the head's."""

    def build_optimizer(self):
        model = self.model
        parts = [[model.cls_token, model.pos_embed, *model.patchify.parameters()]]
        parts += [[*layer.parameters()] for layer in model.layers]
        parts += [[*model.norm.parameters(), *model.head.parameters()]]
        groups = [{"params": each, "lr": 1e-2 * 0.4 ** (3 - i), "depth": i} for i, each in enumerate(parts)]
        return torch.optim.AdamW(groups, weight_decay=0.05)

    def build_schedulers(self):
        return [torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50, eta_min=1e-5)]


@clean
class SharpnessAware(Metric):
    """SAM by hand: the gradient is that at another point, after two backward passes; weights move and come back."""

    def step(self, batch):
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        parameters = [*self.model.parameters()]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
        moves = [0.05 * p.grad / norm for p in parameters]
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p.add_(move)
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p.sub_(move)
        self.optimizer.step()
        for each in self.schedulers:
            each.step()
        return float(loss.detach())


class Slow:
    """Slow weights, towards which the fast ones are set back."""

    def __init__(self, parameters):
        self.weights, self.count = [each.detach().clone() for each in parameters], 0

    def state_dict(self):
        return {"weights": [each.clone() for each in self.weights], "count": self.count}

    def load_state_dict(self, state):
        self.weights, self.count = [each.clone() for each in state["weights"]], state["count"]


@clean
class Lookahead(MultiTask):
    """Lookahead by hand: every second step the weights are set to something else than the optimizer's result."""

    def __init__(self):
        super().__init__()
        self.slow = Slow(self.model.parameters())
        self.others = {"slow": self.slow}

    def step(self, batch):
        logged = super().step(batch)
        self.slow.count += 1
        if self.slow.count % 2 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow.weights, self.model.parameters(), strict=True):
                    p.copy_(slow.lerp_(p, 0.5))
        return logged

    def save(self):
        return {**super().save(), "slow": self.slow.state_dict()}

    def load(self, state):
        super().load(state)
        self.slow.load_state_dict(state["slow"])


@clean
class StaticScale(Diffusion):
    """A fixed loss scale by hand, without a scaler: gradients are long until they are divided."""

    def new_scaler(self):
        return None

    def step(self, images):
        self.optimizer.zero_grad()
        loss = self.loss(images)
        (1024 * loss).backward()
        for p in self.model.parameters():
            p.grad.div_(1024)
        if all(p.grad.isfinite().all() for p in self.model.parameters()):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
        self.lr_scheduler.step()
        self.ema.update_parameters(self.model)
        return loss.detach()


@clean
class FractionalRestarts(Diffusion):
    """The scheduler is told the epoch as a fraction: `step(epoch + i / n)`, as the docs of warm restarts do."""

    def schedule(self):
        self.lr_scheduler.step(self.global_step / self.epoch)


@clean
class SparseTables(Recommender):
    """Sparse gradients and SparseAdam for the embeddings, Adam for the rest."""

    sparse = True

    def make_optimizers(self):
        tables = [*self.model.user.parameters(), *self.model.item.parameters()]
        return [
            torch.optim.SparseAdam(tables, lr=0.02),
            torch.optim.Adam([*self.model.mlp.parameters(), self.model.mean], lr=5e-3),
        ]


@clean
class FullBatchLBFGS(Recommender):
    """L-BFGS on all rows: the step needs a closure, and every batch is the same."""

    def __init__(self):
        super().__init__()
        self.schedulers, self.epoch = [], 1

    def make_optimizers(self):
        return [torch.optim.LBFGS(self.model.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")]

    def batch(self, step, rank=0):
        return tuple(column[rank::2] for column in self.table)

    def step(self, batch):
        def closure():
            self.optimizers[0].zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        return self.optimizers[0].step(closure)


class Factored(torch.optim.Optimizer):
    """Second moments by row and column (Adafactor), updates clipped by their root mean square; no first moment."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "eps": 1e-30, "least": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, square = self.state[p], p.grad.square() + group["eps"]
                state["step"] = state.get("step", 0) + 1
                decay = 1 - state["step"] ** -0.8
                if p.ndim == 2:
                    rows = state.setdefault("rows", torch.zeros(len(p))).lerp_(square.mean(1), 1 - decay)
                    columns = state.setdefault("columns", torch.zeros(p.shape[1])).lerp_(square.mean(0), 1 - decay)
                    second = (rows / rows.mean())[:, None] * columns
                else:
                    second = state.setdefault("second", torch.zeros_like(p)).lerp_(square, 1 - decay)
                update = p.grad * second.clamp(min=group["eps"]).rsqrt()
                update /= update.square().mean().sqrt().clamp(min=1.0)
                size = p.square().mean().sqrt().clamp(min=group["least"])
                p.sub_(group["lr"] * size * update)


@clean
class OwnAdafactor(Translation):
    """An optimizer of the user's own with eps=1e-30 and no first moment."""

    def __init__(self):
        super().__init__()
        self.optim = Factored(self.model.parameters())
        self.optimizers = (self.optim,)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda step: 1.0)
        self.schedulers = (self.schedule,)


class Lion(torch.optim.Optimizer):
    """Signs of an average: the length of the gradient does not count."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean.lerp(p.grad, 1 - fast).sign())
                mean.lerp_(p.grad, 1 - slow)


@clean
class OwnLion(Q):
    """An optimizer of the user's own that takes signs."""

    def build_optimizer(self, parameters):
        return Lion(parameters)


@clean
class MasterWeights(MultiTask):
    """The model is in bf16; the optimizer holds fp32 copies, none of them a parameter of the model."""

    def create(self):
        return super().create().bfloat16()

    def create_optimizers(self):
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.others = {"masters": self.masters}
        return [torch.optim.NAdam(self.masters, lr=4e-3)]

    def sums(self, batch):
        return super().sums([batch[0].bfloat16(), *batch[1:]])

    def step(self, batch):
        self.model.zero_grad()
        logged = self.accumulate(batch)
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = p.grad.float()
        for each in (*self.optimizers, *self.schedulers):
            each.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                p.copy_(master)
        return logged

    def save(self):
        return {**super().save(), "masters": [each.detach().clone() for each in self.masters]}

    def load(self, state):
        super().load(state)
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)


@clean
class GradientSurgery(MultiTask):
    """PCGrad: each task's gradient loses its part against the other, so that the sum is not that of the loss."""

    def accumulate(self, batch):
        log_var, (first, second), counts = self.model.uncertainty(), self.sums(batch), self.counts(batch)
        losses = [
            (-log_var[0]).exp() * first / counts[0] + log_var[0] / 2,
            (-log_var[1]).exp() * second / counts[1] + log_var[1] / 2,
        ]
        parameters = [*self.model.parameters()]
        grads = [torch.autograd.grad(each, parameters, retain_graph=True, materialize_grads=True) for each in losses]
        one, two = (torch.cat([g.flatten() for g in each]) for each in grads)
        against = torch.dot(one, two).clamp(max=0)
        total = one - against * two / two.dot(two) + two - against * one / one.dot(one)
        for p, g in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.view_as(p)
        return float(sum(losses).detach())


@clean
class Centralized(Metric):
    """Gradient centralization: hooks take the mean of each filter's gradient away."""

    def make_model(self):
        model = super().make_model()
        for p in model.parameters():
            if p.ndim > 1:
                p.register_hook(lambda g: g - g.mean(tuple(range(1, g.ndim)), keepdim=True))
        return model


@clean
class AcrossCalls(Recommender):
    """Accumulates over two calls of `step`: the first moves nothing, and the second finds gradients that are left."""

    def __init__(self):
        super().__init__()
        self.pending = 0

    def step(self, batch):
        (self.loss(batch) / 2).backward()
        self.pending += 1
        if self.pending < 2:
            return
        for each in (*self.optimizers, *self.schedulers):
            each.step()
        self.model.zero_grad()
        self.pending = 0

    def save(self):
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return {**super().save(), "pending": self.pending, "grads": grads}

    def load(self, state):
        super().load(state)
        self.pending = state["pending"]
        for p, grad in zip(self.model.parameters(), state["grads"], strict=True):
            p.grad = None if grad is None else grad.clone()


@clean
class RebuiltOnLoad(ViT):
    """`load` builds optimizer and scheduler anew before it loads their state, as the script does when it starts."""

    def load(self, state):
        self.optimizer = self.build_optimizer()
        self.optimizers, self.schedulers = [self.optimizer], self.build_schedulers()
        super().load(state)


@clean
class EachParameterClipped(Metric):
    """Hooks clip the gradient of each parameter in the backward pass; there is no scaler."""

    def make_model(self):
        model = super().make_model()
        for p in model.parameters():
            p.register_hook(lambda g: g * (0.1 / g.norm().clamp(min=1e-9)).clamp(max=1.0))
        return model


# ---- data


@clean
class OneBatchEpoch(ViT):
    """A shard is one batch: every batch has the same rows, in another order."""

    size = 32


@clean
class DrawnWithReplacement(Recommender):
    """A weighted sampler draws with replacement: rows repeat within a batch and among batches."""

    def batch(self, step, rank=0):
        weights = 0.2 + self.table[3]
        rows = torch.multinomial(weights, 16, replacement=True, generator=drawn(2 * step + rank))
        return tuple(column[rows] for column in self.table)


@clean
class RepeatedAugmentation(ViT):
    """Each image is in the batch twice, with other noise: labels repeat within a batch."""

    def batch(self, step, rank=0):
        images, labels = super().batch(step, rank)
        noise = 0.3 * torch.randn(len(images) * 2, 1, 8, 8, generator=drawn(5000 * rank + step))
        return images.repeat_interleave(2, 0) + noise, labels.repeat_interleave(2)


@clean
class Buckets(Translation):
    """Batches of sentences of like length: from 4 to 16 rows, so that a batch is short or long."""

    def rows(self, step, rank):
        order = self.examples["lengths"].argsort(stable=True)[rank::2]
        begin, end = [(0, 16), (16, 24), (24, 28), (28, 32)][step % 4]
        return order[begin:end]
