"""The gradient is not that of the loss, or that of micro-batches is not that of the batch."""

import random

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.reliability.preflight.held_out.loops import (
    Embedder,
    Layer,
    Metric,
    MultiTask,
    PatchClassifier,
    PlainDiffusion,
    Residual,
    Seq2Seq,
    Translation,
    Trunk,
    ViT,
)
from tests.reliability.preflight.held_out.program import planted

# ---- fresh_dropout


class Recompute(torch.autograd.Function):
    """Checkpointing by hand, as in guided-diffusion: the random state is not restored (its issue 167)."""

    @staticmethod
    def forward(ctx, run, count, *args):
        ctx.run, ctx.inputs, ctx.parameters = run, args[:count], args[count:]
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx, *grads):
        inputs = [each.detach().requires_grad_() for each in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run(*inputs)  # here
        return None, None, *torch.autograd.grad(out, [*inputs, *ctx.parameters], grads)


class RecomputedResidual(Residual):
    """Its inner part is recomputed."""

    def inner(self, x, time):
        parameters = [each for name, each in self.named_parameters() if not name.startswith("skip")]
        return Recompute.apply(super().inner, 2, x, time, *parameters)


@planted(
    "fresh_dropout",
    "Recompute's backward pass draws other dropout masks than its forward pass",
    *("down", "middle", "up", "first", "time", "Recompute"),
)
class RecomputedByHand(PlainDiffusion):
    """Activation checkpointing by an autograd function of the user's own."""

    def unet(self):
        model = super().unet()
        for part in (model.down, model.middle, model.up):
            part.__class__ = RecomputedResidual
        return model


class PythonDropPath(Layer):
    """Whether the branch of a row is dropped is drawn by Python, whose state `checkpoint` does not keep."""

    def drop(self, x):
        kept = [float(random.random() > 0.3) / 0.7 for _ in x]  # here
        return x * torch.tensor(kept)[:, None, None]

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class PythonPatches(PatchClassifier):
    """With `PythonDropPath`."""

    layer = PythonDropPath


@planted("fresh_dropout", "the recomputation drops other branches than the forward pass: random.random", "layers")
class PythonInCheckpoint(ViT):
    """Stochastic depth by Python's `random` in a checkpointed layer."""

    def build_model(self):
        return PythonPatches(self.classes)

    def save(self):
        return {**super().save(), "python": random.getstate()}

    def load(self, state):
        super().load(state)
        random.setstate(state["python"])


# ---- wrong_factor


class FusedCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes its gradient in the forward pass and returns it whatever the loss is scaled with."""

    @staticmethod
    def forward(ctx, logits, targets):
        with torch.enable_grad():
            inner = logits.detach().requires_grad_()
            loss = F.cross_entropy(inner.transpose(1, 2), targets)
            ctx.save_for_backward(torch.autograd.grad(loss, inner)[0])
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None  # here: not multiplied by grad


@planted(
    "wrong_factor",
    "FusedCrossEntropy.backward ignores the gradient that it is given: a scaled loss has the unscaled one's gradient",
    *("source", "target", "encoder", "decoder", "combine", "out", "FusedCrossEntropy", "micro"),
)
class GradOutputIgnored(Translation):
    """A fused loss that is right as long as it is not scaled; micro-batches are weighted."""

    def token_loss(self, logits, targets):
        return FusedCrossEntropy.apply(logits, targets)


class EmbeddingScale(torch.autograd.Function):
    """Multiplies by the root of the width, as transformers do; backward divides."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.scale, None  # here


class ScaledPatches(PatchClassifier):
    """With `EmbeddingScale`."""

    def embed(self, images):
        return EmbeddingScale.apply(super().embed(images), 4.0)


@planted(
    "wrong_factor",
    "the gradients of patchify, cls_token and pos_embed are 1/16 of the loss's: EmbeddingScale.backward",
    *("patchify", "cls_token", "pos_embed", "EmbeddingScale"),
)
class DividedInBackward(ViT):
    """The backward pass of a scale divides in place of multiplying."""

    def build_model(self):
        return ScaledPatches(self.classes)


# ---- missing_term


class UnitLength(torch.autograd.Function):
    """Divides rows by their length; the backward pass takes the length for a constant."""

    @staticmethod
    def forward(ctx, x):
        length = x.norm(dim=1, keepdim=True).clamp(min=1e-12)
        ctx.save_for_backward(length)
        return x / length

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.saved_tensors[0]  # here: without the projection


class UnitEmbedder(Embedder):
    """With `UnitLength`."""

    def normalize(self, x):
        return UnitLength.apply(x)


@planted(
    "missing_term",
    "the gradient of what comes before the normalization has another direction: UnitLength.backward",
    *("fc", "body", "stem", "UnitLength"),
)
class LengthAsConstant(Metric):
    """A normalization of embeddings whose backward pass misses the projection."""

    def make_model(self):
        return UnitEmbedder()


# ---- detached


class NumpySeq2Seq(Seq2Seq):
    """The encoder's last state goes through NumPy, where rows are put in order."""

    def encode(self, source, lengths):
        memory, (hidden, cell) = super().encode(source, lengths)
        back = [torch.from_numpy(each.detach().numpy().copy()) for each in (hidden, cell)]  # here
        return torch.tensor(memory.tolist()), tuple(back)  # and here


@planted(
    "detached",
    "the loss depends on source and encoder, which get no gradient: .numpy() and torch.tensor(...)",
    *("source", "encoder"),
)
class ThroughNumpy(Translation):
    """The encoder's outputs are turned into lists and arrays and back."""

    def build(self):
        return NumpySeq2Seq()


# ---- no_grad


class ReentrantTrunk(Trunk):
    """Its inlet is recomputed by the old, reentrant kind, whose input is data and needs no gradient."""

    def forward(self, x):
        x = checkpoint(self.inlet, x, use_reentrant=True)  # here
        return x + self.block(x)


@planted(
    "no_grad",
    "the loss depends on trunk.inlet, which gets no gradient: checkpoint(use_reentrant=True) runs without gradients",
    "trunk.inlet",
    warns=True,
)
class ReentrantInlet(MultiTask):
    """The first layer's input needs no gradient, so that a reentrant checkpoint has none."""

    def create(self):
        model = super().create()
        model.trunk.__class__ = ReentrantTrunk
        return model


# ---- compiler: `torch.compile` with a backend that computes something else


def compiled(model, change):
    """Returns the model, compiled by a backend that changes nodes of the graph: `change(node)`."""

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            change(node)
        graph.recompile()
        return graph.forward

    torch.compiler.reset()
    return torch.compile(model, backend=backend)


def coarse_linear(x, weight, bias=None):
    """A linear layer in bf16."""
    return F.linear(x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16()).to(x.dtype)


@planted(
    "compiler",
    "the compiled model computes in bf16, the plain one in fp32: beyond what fp32 explains",
    *("patchify", "cls_token", "pos_embed", "layers", "norm", "head"),
)
class CompilesToBF16(ViT):
    """The compiler runs all linear layers in bf16, though the loop is in fp32."""

    compiled = True

    def __init__(self):
        super().__init__()

        def change(node):
            if node.op == "call_function" and getattr(node.target, "__name__", "") == "linear":
                node.target = coarse_linear  # here

        self.net = compiled(self.model, change)


def remembered(function):
    """Returns a function that computes once, and returns the same ever after."""
    first = {}

    def constant(x):
        return first.setdefault(x.shape, function(x).detach())

    return constant


@planted(
    "compiler",
    "the compiled model keeps the sines of the first batch's times: from the second batch on another loss",
    *("time", "down", "middle", "up", "first", "last"),
)
class StaleConstant(PlainDiffusion):
    """The compiler takes a part of the time embedding for a constant: right in the first call, wrong in all others."""

    def __init__(self):
        super().__init__()

        def change(node):
            if node.op == "call_method" and node.target in ("sin", "cos"):
                node.op, node.target = "call_function", remembered(getattr(torch, node.target))  # here

        self.compiled, self.forward = True, compiled(self.model, change)


# ---- mean_of_means


class ShortTargets(Translation):
    """Of most sentences only the first two words are targets."""

    def corpus(self):
        examples = super().corpus()
        examples["targets"][torch.arange(64) % 5 > 1, 2:] = -100
        return examples


@planted(
    "mean_of_means",
    "the gradient of the micro-batches is not that of the batch: they are weighted by the inputs' tokens",
    *("backward", "micro"),
)
class WeightedByInputs(ShortTargets):
    """Micro-batches are weighted by the words of the source, not by the targets."""

    def step(self, batch):
        self.model.train()
        self.optim.zero_grad()
        total = batch["lengths"].sum()
        for chunk in self.chunks(batch):
            (self.loss(chunk) * chunk["lengths"].sum() / total).backward()  # here
        self.apply()


# ---- not_divided


@planted(
    "not_divided",
    "one task's loss is not divided by the number of micro-batches",
    *("backward", "micro", "regress", "classify", "trunk"),
)
class OneTaskDivided(MultiTask):
    """Of two losses one is divided by the number of micro-batches."""

    def accumulate(self, batch):
        parts, logged = self.parts_of(batch), 0.0
        for part in parts:
            (classes, numbers), (labels, places) = self.sums(part), self.counts(part)
            log_var = self.model.uncertainty()
            first = (-log_var[0]).exp() * classes / labels + log_var.sum() / 2
            second = (-log_var[1]).exp() * numbers / places
            loss = first / len(parts) + second  # here
            loss.backward()
            logged += loss.item()
        return logged


# ---- last_partial


class AllLabelled(MultiTask):
    """No label is missing, so that a mean of means is right where micro-batches are of one size."""

    def read(self):
        x, labels, numbers = super().read()
        return x, labels.where(labels >= 0, 0), numbers


@planted(
    "last_partial",
    "the epoch's last batch has a micro-batch of one row, which counts as much as one of four",
    *("backward", "micro"),
)
class LastMicroBatchSmaller(AllLabelled):
    """Means of micro-batches, which are all of one size, but in the last batch."""

    def accumulate(self, batch):
        parts, logged = self.parts_of(batch), 0.0
        for part in parts:
            loss = self.loss(part) / len(parts)  # here
            loss.backward()
            logged += loss.item()
        return logged
