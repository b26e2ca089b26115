"""The gradient is not that of the loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.reliability.preflight.faults.fault import Fault, become
from tests.reliability.preflight.models import Attention, Autoencoder, Block, Convolutions, Regression, Towers

# ---- activation checkpointing that draws another dropout mask


class RedrawnBlock(Block):
    """A block that is recomputed without the random state."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


class RedrawnPart(Block):
    """A block whose feed-forward part is recomputed without the random state."""

    def mlp(self, x):
        return checkpoint(super().mlp, x, use_reentrant=False, preserve_rng_state=False)


class RedrawnMask(torch.autograd.Function):
    """Dropout that saves memory: the backward pass draws the mask again."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.p = p
        return F.dropout(x, p)

    @staticmethod
    def backward(ctx, grad):
        return F.dropout(grad, ctx.p), None


class RedrawnDropout(nn.Dropout):
    """Dropout by `RedrawnMask`."""

    def forward(self, x):
        return RedrawnMask.apply(x, self.p) if self.training else x


class CheckpointedBlocks(Fault):
    """Blocks are recomputed with `preserve_rng_state=False`."""

    kind, loops = "fresh_dropout", ("checkpointed",)
    says = "the recomputation draws other dropout masks than the forward pass: pass preserve_rng_state=True"
    points_at = ("blocks",)

    def make_model(self):
        model = super().make_model()
        model.checkpointed = False
        for block in model.blocks:
            become(block, RedrawnBlock)
        return model


class CheckpointedParts(Fault):
    """The feed-forward parts are recomputed with `preserve_rng_state=False`."""

    kind, loops = "fresh_dropout", ("gpt",)
    says = "the recomputation draws other dropout masks than the forward pass: pass preserve_rng_state=True"
    points_at = ("blocks.0", "blocks.1")

    def make_model(self):
        model = super().make_model()
        for block in model.blocks:
            become(block, RedrawnPart)
        return model


class OwnRecomputation(Fault):
    """An autograd function of the user's draws the dropout mask again in the backward pass."""

    kind, loops = "fresh_dropout", ("rnn", "gpt")
    says = "RedrawnMask's backward pass draws another mask than its forward pass"
    points_at = ("gru", "embed", "blocks", "RedrawnMask")

    def make_model(self):
        model = super().make_model()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                become(module, RedrawnDropout)
        return model


# ---- a backward pass of the user's own, wrong by a factor


class HalfGELU(torch.autograd.Function):
    """GELU; the backward pass returns half of the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad):
        [x] = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return 0.5 * torch.autograd.grad(F.gelu(x), x, grad)[0]  # here


class UnscaledScores(torch.autograd.Function):
    """Attention scores; the backward pass forgets the scale."""

    @staticmethod
    def forward(ctx, q, k, scale):
        ctx.save_for_backward(q, k)
        return (q @ k.transpose(-1, -2)) * scale

    @staticmethod
    def backward(ctx, grad):
        q, k = ctx.saved_tensors
        return grad @ k, grad.transpose(-1, -2) @ q, None  # here


class SumOfPlaces(torch.autograd.Function):
    """The mean over places of an image; the backward pass is that of the sum."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.mean((2, 3))

    @staticmethod
    def backward(ctx, grad):
        return grad[:, :, None, None].expand(ctx.shape)  # here


class HalvedRegression(Regression):
    """With `HalfGELU`."""

    def forward(self, x):
        return self.head(HalfGELU.apply(self.second(HalfGELU.apply(self.first(x)))))


class UnscaledAttention(Attention):
    """With `UnscaledScores`."""

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mask = torch.ones(time, time, dtype=torch.bool).triu(1)
        weights = UnscaledScores.apply(q, k, self.scale).masked_fill(mask, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))


class SummedConvolutions(Convolutions):
    """With `SumOfPlaces`."""

    def features(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return SumOfPlaces.apply(F.relu(self.bn2(self.conv2(x))))


class HalfActivation(Fault):
    """An activation whose backward pass is half of the right one."""

    kind, loops = "wrong_factor", ("mlp",)
    says = "the gradient of `second` is half, that of `first` a quarter of the loss's: HalfGELU.backward"
    points_at = ("first", "second", "HalfGELU")

    def make_model(self):
        model = super().make_model()
        become(model, HalvedRegression)
        return model


class ScaleForgotten(Fault):
    """An attention kernel whose backward pass forgets 1 / sqrt(d)."""

    kind, loops = "wrong_factor", ("gpt", "checkpointed")
    says = "queries and keys get sqrt(d) times their gradient: UnscaledScores.backward"
    points_at = ("blocks.0", "blocks.1", "UnscaledScores")

    def make_model(self):
        model = super().make_model()
        for block in model.blocks:
            become(block.attention, UnscaledAttention)
        return model


class MeanAsSum(Fault):
    """A pooling whose backward pass forgets to divide."""

    kind, loops = "wrong_factor", ("cnn", "finetune")
    says = "the gradients of the convolutions are 16 times those of the loss: SumOfPlaces.backward"
    points_at = ("conv", "bn", "SumOfPlaces")

    def make_model(self):
        model = super().make_model()
        become(model, SummedConvolutions)
        return model


# ---- a backward pass of the user's own that misses a term


class ShortNorm(torch.autograd.Function):
    """LayerNorm without weights; the backward pass takes mean and variance for constants."""

    @staticmethod
    def forward(ctx, x, eps):
        inverse = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(inverse)
        return (x - x.mean(-1, keepdim=True)) * inverse

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None  # here


class FirstRowsBias(torch.autograd.Function):
    """A linear layer; the gradient of the bias is that of the first row."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x, grad[0]  # here


class NoiseForgotten(torch.autograd.Function):
    """Draws from a normal distribution; the backward pass forgets that its width is learned."""

    @staticmethod
    def forward(ctx, mean, log_variance, noise):
        return mean + (log_variance / 2).exp() * noise

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None  # here


class ShortLayerNorm(nn.LayerNorm):
    """With `ShortNorm`."""

    def forward(self, x):
        return ShortNorm.apply(x, self.eps) * self.weight + self.bias


class FirstRowsLinear(nn.Linear):
    """With `FirstRowsBias`."""

    def forward(self, x):
        return FirstRowsBias.apply(x, self.weight, self.bias)


class ForgetfulAutoencoder(Autoencoder):
    """With `NoiseForgotten`."""

    def latent(self, mean, log_variance, generator):
        return NoiseForgotten.apply(mean, log_variance, torch.randn(mean.shape, generator=generator))


class NormWithoutTerms(Fault):
    """A LayerNorm kernel whose backward pass leaves out the terms of mean and variance."""

    kind, loops = "missing_term", ("gpt", "checkpointed")
    says = "the gradient of what comes before `norm` has another direction: ShortNorm.backward"
    points_at = ("blocks", "norm", "embed", "place", "ShortNorm")

    def make_model(self):
        model = super().make_model()
        become(model.norm, ShortLayerNorm)
        return model


class BiasOfOneRow(Fault):
    """A linear layer whose backward pass does not sum the bias's gradient over the rows."""

    kind, loops = "missing_term", ("mlp",)
    says = "the gradient of second.bias has another direction: FirstRowsBias.backward"
    points_at = ("second.bias", "FirstRowsBias")

    def make_model(self):
        model = super().make_model()
        become(model.second, FirstRowsLinear)
        return model


class WidthWithoutGradient(Fault):
    """Latent variables whose backward pass leaves out the term of the learned width."""

    kind, loops = "missing_term", ("vae",)
    says = "the gradient of the encoder has another direction: NoiseForgotten.backward"
    points_at = ("encoder", "NoiseForgotten")

    def make_model(self):
        model = super().make_model()
        become(model, ForgetfulAutoencoder)
        return model


# ---- a part that is detached


class ItemTowers(Towers):
    """The temperature is read with `item`."""

    def scale(self):
        return self.log_scale.exp().item()  # here


class DetachedConvolutions(Convolutions):
    """The first convolution's output is detached."""

    def features(self, x):
        x = F.relu(self.bn1(self.conv1(x))).detach()  # here
        return F.relu(self.bn2(self.conv2(x))).mean((2, 3))


class DataRegression(Regression):
    """The first layer's weights are used through `data`."""

    def forward(self, x):
        x = F.gelu(F.linear(x, self.first.weight.data, self.first.bias.data))  # here
        return self.head(F.gelu(self.second(x)))


class TemperatureAsNumber(Fault):
    """A learned temperature that `item` turns into a number."""

    kind, loops = "detached", ("contrastive",)
    says = "the loss depends on log_scale, which gets no gradient: .item()"
    points_at = ("log_scale",)

    def make_model(self):
        model = super().make_model()
        become(model, ItemTowers)
        return model


class FeaturesDetached(Fault):
    """A `detach` between the convolutions, left over from an experiment."""

    kind, loops = "detached", ("cnn",)
    says = "the loss depends on conv1 and bn1, which get no gradient: .detach()"
    points_at = ("conv1", "bn1")

    def make_model(self):
        model = super().make_model()
        become(model, DetachedConvolutions)
        return model


class WeightsByData(Fault):
    """Weights that the forward pass reads through `data`."""

    kind, loops = "detached", ("mlp", "amp")
    says = "the loss depends on `first`, which gets no gradient: .data"
    points_at = ("first",)

    def make_model(self):
        model = super().make_model()
        become(model, DataRegression)
        return model


# ---- a `no_grad` too many


class SilentAutoencoder(Autoencoder):
    """The encoder runs without gradients."""

    @torch.no_grad()  # here
    def encode(self, x):
        return super().encode(x)


class SilentEmbedding(nn.Embedding):
    """Runs without gradients."""

    def forward(self, tokens):
        with torch.no_grad():  # here
            return super().forward(tokens)


class SilentFeatures(Convolutions):
    """The body runs without gradients, as if all of it were frozen."""

    def features(self, x):
        with torch.no_grad():  # here
            return super().features(x)


class EncoderWithoutGradients(Fault):
    """`encode` has a decorator that it needs for evaluation only."""

    kind, loops = "no_grad", ("vae",)
    says = "the loss depends on the encoder, which gets no gradient: no_grad"
    points_at = ("encoder",)

    def make_model(self):
        model = super().make_model()
        become(model, SilentAutoencoder)
        return model


class EmbeddingWithoutGradients(Fault):
    """The embedding is looked up under `no_grad`."""

    kind, loops = "no_grad", ("accumulation",)
    says = "the loss depends on 0.weight, which gets no gradient: no_grad"
    points_at = ("0",)

    def make_model(self):
        model = super().make_model()
        become(model[0], SilentEmbedding)
        return model


class BodyWithoutGradients(Fault):
    """A body of which one part is trained runs under `no_grad`."""

    kind, loops = "no_grad", ("finetune", "cnn")
    says = "the loss depends on conv2 and bn2, which get no gradient: no_grad"
    points_at = ("conv2", "bn2")

    def make_model(self):
        model = super().make_model()
        become(model, SilentFeatures)
        return model


# ---- compiled code that computes something else: `torch.compile` with a backend that changes the graph


def compiled(model, replace):
    """Returns the model, compiled by a backend that replaces functions by others: `replace(node)` or None."""

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            other = replace(node)
            if other is not None:
                node.op, node.target = "call_function", other
        graph.recompile()
        return graph.forward

    torch.compiler.reset()  # else PyTorch stops compiling after a few fresh models, and the fault is gone
    return torch.compile(model, backend=backend)


def quick_gelu(x):
    """An approximation of GELU that is off by up to 0.02."""
    return x * torch.sigmoid(1.702 * x)


def later(mask, diagonal):
    """A mask that lets a place see the next one."""
    return torch.triu(mask, diagonal + 1)


def frozen_statistics(x, mean, variance, weight, bias, training, momentum, eps):
    """Batch normalization whose backward pass takes the batch's statistics for constants."""
    F.batch_norm(x, mean, variance, None, None, training, momentum, eps)  # updates the running statistics
    center, width = x.detach().mean((0, 2, 3)), x.detach().var((0, 2, 3), correction=0)
    return F.batch_norm(x, center, width, weight, bias, False, momentum, eps)


class FusedActivation(Fault):
    """The compiler replaces GELU by an approximation."""

    kind, loops = "compiler", ("mlp",)
    says = "the compiled model computes another loss than the plain one: beyond what fp32 explains"
    points_at = ("first", "second", "head")

    def make_optimizers(self):
        super().make_optimizers()
        self.compiled, self.network = (
            True,
            compiled(self.model, lambda node: quick_gelu if node.target is F.gelu else None),
        )


class MaskShifted(Fault):
    """The compiler gets the causal mask wrong by one place."""

    kind, loops = "compiler", ("gpt",)
    says = "the compiled model computes another loss than the plain one: beyond what fp32 explains"
    points_at = ("blocks", "embed", "place", "norm")

    def make_optimizers(self):
        super().make_optimizers()
        self.compiled, self.network = True, compiled(self.model, lambda node: later if node.target == "triu" else None)


class FusedNormalization(Fault):
    """The compiler's backward pass of BatchNorm leaves out terms; the forward pass is right."""

    kind, loops = "compiler", ("cnn",)
    says = "the compiled model's loss is that of the plain one, its gradient is not"
    points_at = ("conv", "bn")

    def make_optimizers(self):
        super().make_optimizers()
        self.compiled, self.network = (
            True,
            compiled(self.model, lambda node: frozen_statistics if is_batch_norm(node) else None),
        )


def is_batch_norm(node):
    """Whether a node of a graph calls batch normalization."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "batch_norm"
