"""Parts that a user might have written into a model: each fails from some step on, in the line marked `# here`.

With `mended`, a part is written correctly, as the diagnosis proposes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Part(nn.Module):
    """Passes its input on and adds some work, which fails from the `at`-th training step on.

    The count is a buffer, so that a replayed step fails again.
    """

    def __init__(self, at: int, mended: bool) -> None:
        super().__init__()
        self.at, self.mended = at, mended
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` plus a tenth of the work."""
        if self.training:
            self.calls += 1
        return x + 0.1 * self.work(x, int(self.calls) > self.at).to(x.dtype)

    def work(self, x: Tensor, late: bool) -> Tensor:
        """Computes the work, which fails if `late`."""
        raise NotImplementedError


class LogOfGate(Part):
    """The log of a gate that has closed."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        gate = F.relu(torch.tanh(x.float()) + (-2.0 if late else 2.0))
        if self.mended:
            gate = gate + 1e-6
        return gate.log()  # here


class LengthBackward(Part):
    """The derivative of a root at 0."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        total = (x.float() * (0.0 if late else 1.0)).square().sum(-1, keepdim=True)
        if self.mended:
            total = total + 1e-6
        return total.sqrt()  # here


class PowerBackward(Part):
    """The derivative of a fractional power at 0."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        size = x.float().square() * (0.0 if late else 1.0) + (0.0 if late else 1.0)
        if self.mended:
            size = size + 1e-6
        return size.pow(0.3)  # here


class WhereBackward(Part):
    """The log inside a `where`: not selected in the forward pass, but differentiated in the backward pass."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        size = F.relu(x.float()) * (0.0 if late else 1.0) + (0.0 if late else 1.0)
        safe = torch.where(size > 0, size, 1.0) if self.mended else size
        logs = safe.log()  # here
        return torch.where(size > 0, logs, 0.0)


class MaskedMean(Part):
    """A mean after a mask has removed every entry."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        mask = (x > (math.inf if late else -math.inf)).float()
        count = mask.sum()
        if self.mended:
            count = count.clamp(min=1)
        return (x.float() * mask).sum() / count + 0 * x  # here


class SoftmaxByHand(Part):
    """Softmax without subtracting the maximum."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        scores = torch.tanh(x.float()) + (1000.0 if late else 0.0)
        if self.mended:
            scores = scores - scores.amax(-1, keepdim=True)
        e = scores.exp()  # here
        return e / e.sum(-1, keepdim=True)


class MaskedRow(Part):
    """Attention with one fully masked row, beside the harmless -inf of a causal mask."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        flat = x.float().flatten(1)[:, :4]
        scores = flat @ flat.T
        mask = torch.ones_like(scores, dtype=torch.bool).triu(0 if late else 1)
        scores = scores.masked_fill(mask, -1e9 if self.mended else -math.inf)
        weights = scores.softmax(-1)  # here
        return (weights @ flat).mean() + 0 * x


class Angle(Part):
    """The derivative of acos at 1."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        cosine = torch.tanh(x.float()) * (0.0 if late else 0.5) + (1.0 if late else 0.0)
        if self.mended:
            cosine = cosine.clamp(-1 + 1e-6, 1 - 1e-6)
        return torch.acos(cosine)  # here


class StandardizeByHand(Part):
    """Division by a standard deviation of 0."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        x = x.float() * (0.0 if late else 1.0)
        spread = x.std(-1, keepdim=True) + (1e-6 if self.mended else 0.0)
        return (x - x.mean(-1, keepdim=True)) / spread  # here


class RMSByHand(Part):
    """RMSNorm without eps."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        x = x.float() * (0.0 if late else 1.0)
        mean = x.pow(2).mean(-1, keepdim=True)
        if self.mended:
            mean = mean + 1e-6
        return x * torch.rsqrt(mean)  # here


class RootOfVarianceBackward(Part):
    """eps outside the root: finite in the forward pass but not in the backward pass."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        x = x.float() * (0.0 if late else 1.0)
        variance = x.var(-1, keepdim=True)
        if self.mended:
            variance = variance + 1e-6
        root = variance.sqrt()  # here
        return (x - x.mean(-1, keepdim=True)) / (root + 1e-3)


class NormEpsInFP16(Part):
    """An eps that fp16 rounds to 0."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        x = (x * (0.0 if late else 1.0)).to(torch.float32 if self.mended else torch.float16)
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + 1e-9).sqrt()  # here


class LayerNormNoEps(Part):
    """PyTorch's LayerNorm with eps=0."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        x = x.float() * (0.0 if late else 1.0)
        return F.layer_norm(x, x.shape[-1:], eps=1e-6 if self.mended else 0.0)  # here


class SquareInHalf(Part):
    """A square that overflows fp16."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        x = torch.tanh(x.float()) + (300.0 if late else 1.0)
        x = x if self.mended else x.half()
        return 1e-6 * x.square().float()  # here


class ExpInHalf(Part):
    """An exp that overflows fp16 but not fp32."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        x = torch.tanh(x.float()) + (14.0 if late else 1.0)
        x = x if self.mended else x.half()
        return 1e-7 * x.exp().float()  # here


class LinearOverflow(Part):
    """A linear layer that overflows autocast's fp16."""

    def __init__(self, at: int, mended: bool) -> None:
        super().__init__(at, mended)
        self.register_buffer("weight", torch.full((8, 8), 100.0))

    def work(self, x: Tensor, late: bool) -> Tensor:
        some = torch.tanh(x.float().flatten(1)[:, :8]) + (2000.0 if late else 1.0)
        with torch.autocast(x.device.type, enabled=torch.is_autocast_enabled(x.device.type) and not self.mended):
            large = F.linear(some, self.weight)  # here
        return 1e-7 * large.float().mean() + 0 * x


class QuietGradient(Part):
    """Passes on a small share of the gradient, and later all of it, as when a layer is unfrozen."""

    before, after = 1e-3, 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, with its gradient scaled by a share."""
        if self.training:
            self.calls += 1
        share = self.after if int(self.calls) > self.at and not self.mended else self.before
        return share * x + (1 - share) * x.detach()


class SteepBackward(Part):
    """Finite activations whose gradients overflow fp16 at any loss scale."""

    def __init__(self, at: int, mended: bool) -> None:
        super().__init__(at, mended)
        self.register_buffer("one", torch.ones(1, 1))

    def work(self, x: Tensor, late: bool) -> Tensor:
        up, down = (1e4, 1e-4) if late and not self.mended else (1.0, 1.0)
        y = x.reshape(-1, 1)
        for factor in (down, down, up, up):
            y = F.linear(y, factor * self.one)  # here
        return y.view_as(x)


class FaintGradient(QuietGradient):
    """Passes on a millionth of the gradient from the `at`-th step on, which underflows in a format of small range."""

    before, after = 1.0, 1e-6


class WanderingOffset(Part):
    """Logits with a common offset, which softmax ignores until it costs the other logits their precision.

    Training drives the offset: its gradient comes only through the likelier half of the classes, so cross-entropy
    raises it without limit, ever faster. Anything that bounds log Z bounds the offset.
    """

    def __init__(self, at: int, mended: bool) -> None:
        super().__init__(at, mended)
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits, plus the offset from the `at`-th step on."""
        if self.training:
            self.calls += 1
        if int(self.calls) <= self.at:
            return x
        likely = x >= x.median(-1, keepdim=True).values
        offset = torch.sinh(self.offset)
        return x + torch.where(likely, offset, offset.detach()).to(x.dtype)


class CastByHand(Part):
    """A cast to e4m3 and back with a scale that no longer fits the values."""

    stale = 1.0

    def work(self, x: Tensor, late: bool) -> Tensor:
        values = x.detach().float()
        scale = torch.full((), self.stale if late else 100.0, device=x.device)
        if self.mended:
            scale = 448 / values.abs().max()
        small = (values * scale).to(torch.float8_e4m3fn)  # here
        return 10 * (small.float() / scale - values)  # the part adds a tenth: its output is the value after the casts


class ScaleTooLarge(CastByHand):
    """Saturates e4m3, or gives NaN, as PyTorch's cast does before 2.12."""

    stale = 1e6


class ScaleTooSmall(CastByHand):
    """Flushes every value to 0."""

    stale = 1e-6


class WideCast(Part):
    """A cast to e5m2 without a scale, of values beyond its largest, 57344."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        values = torch.tanh(x.float()) + (1e6 if late else 1.0)
        if self.mended:
            values = values / values.detach().abs().max()
        small = values.detach().to(torch.float8_e5m2)  # here
        return 1e-9 * small.float() + 0 * x


class ScaleOfNothing(Part):
    """A cast to e4m3 whose scale divides by the largest value of a gate that has closed."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        values = F.relu(torch.tanh(x.detach().float()) + (-2.0 if late else 2.0))
        largest = values.abs().max()
        if self.mended:
            largest = largest.clamp(min=1e-12)
        scale = 448 / largest  # here
        return 0.1 * (values * scale).to(torch.float8_e4m3fn).float() / scale + 0 * x


class OutlierToken(Part):
    """A linear layer in fp8 with one token far above all others: their scale flushes them to 0.

    The layer returns its first inputs. A frozen weight of 0 keeps the outlier out of the result.
    """

    def __init__(self, at: int, mended: bool) -> None:
        super().__init__(at, mended)
        self.mix = nn.Linear(32, 16, bias=False)
        with torch.no_grad():
            self.mix.weight.copy_(torch.eye(16, 32))
        self.mix.weight.requires_grad_(False)

    def work(self, x: Tensor, late: bool) -> Tensor:
        beside = torch.zeros_like(x)
        beside[:, 0, 0] = 1e8 if late and not self.mended else 1.0
        return 10 * (self.mix(torch.cat([x, beside], -1)).to(x.dtype) - x)
