"""Small models with one fault each, whose line is marked: `# here`."""

import inspect
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Around(nn.Module):
    """A model with the part in the middle."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 3)
        self.part = part
        self.head = nn.Linear(3, 2)

    def forward(self, inputs):
        return self.head(self.part(self.stem(inputs)))


def line(part):
    """`file:line` of the marked line of a class."""
    part = getattr(part, "marked", part)
    lines, first = inspect.getsourcelines(part)
    (offset,) = [number for number, text in enumerate(lines) if text.rstrip().endswith("# here")]
    return f"{inspect.getsourcefile(part)}:{first + offset}"


class Part(nn.Module):
    """Calls `work`, one stack frame deeper, on a constant value that does not depend on the weights."""

    value = 0.0

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        return self.work(self.inner(x.float() * 0 + self.value))


class LogOfZero(Part):
    def work(self, x):
        x = F.relu(x)
        return torch.log(x)  # here


class LogOfNegative(Part):
    value = -3.0

    def work(self, x):
        return x.log2()  # here


class Log1p(Part):
    value = -1.0

    def work(self, x):
        return torch.log1p(x)  # here


class LogInPlaceOnAView(Part):
    def work(self, x):
        y = x * 1
        y[0].log_()  # here
        return y + 1


class RootBackward(Part):
    def work(self, x):
        return x.sqrt() + 1  # here


class HandWrittenNormBackward(Part):
    def work(self, x):
        length = x.square().sum(-1, keepdim=True)
        length = length.sqrt()  # here
        return x + length


class RootOfNegative(Part):
    value = -1.0

    def work(self, x):
        return x.sqrt()  # here


class Direction(Part):
    def work(self, x):
        length = x.norm(dim=-1, keepdim=True)
        return x / length  # here


class Exp(Part):
    value = 100.0

    def work(self, x):
        return torch.exp(x)  # here


class ExpOfThousand(Part):
    value = 1000.0

    def work(self, x):
        return torch.exp(x)  # here


class SoftmaxByHand(Part):
    value = 90.0

    def work(self, x):
        e = x.exp()  # here
        return e / e.sum(-1, keepdim=True)


class SoftplusByHand(Part):
    value = 200.0

    def work(self, x):
        x = torch.exp(x)  # here
        return torch.log1p(x)


class NormWithoutEps(Part):
    value = 5.0

    def work(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / x.std(-1, keepdim=True)  # here


class LayerNormWithoutEps(Part):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3, eps=0.0)

    def work(self, x):
        return self.norm(x)  # here


class BatchOfOne(Part):
    def work(self, x):
        x = x[:1]
        return (x - x.mean(0)) / x.var(0)  # here


class PowBackward(Part):
    def work(self, x):
        return x.pow(0.7) + 1  # here


class PowForward(Part):
    def work(self, x):
        return x**-1.5  # here


class ArccosBackward(Part):
    value = 1.0

    def work(self, x):
        return torch.acos(x)  # here


class ArccosForward(Part):
    value = 1.5

    def work(self, x):
        return torch.acos(x)  # here


class MaskedRow(Part):
    def work(self, x):
        scores = x @ x.T
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[0] = True
        scores = scores.masked_fill(mask, -math.inf)
        return torch.softmax(scores, -1) @ x  # here


class MaskedByABuffer(Part):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -math.inf))

    def work(self, x):
        scores = x @ x.T + self.mask
        return scores.softmax(-1) @ x  # here


class MaskTimesInf(Part):
    def work(self, x):
        return x * -math.inf  # here


class InfMinusInf(Part):
    def work(self, x):
        high = x.masked_fill(x == 0, math.inf)
        return high - high  # here


class Reciprocal(Part):
    def work(self, x):
        return 1 / x  # here


class DivisionInPlace(Part):
    value = 2.0

    def work(self, x):
        x = x * 1
        x /= 0  # here
        return x


class Rsqrt(Part):
    def work(self, x):
        return torch.rsqrt(x.square().mean(-1, keepdim=True)) + x  # here


class WhereBackward(Part):
    def work(self, x):
        safe = x > 0
        logs = torch.log(x)  # here
        return torch.where(safe, logs, 0.0)


class MeanOfNothing(Part):
    def work(self, x):
        return x + x[:0].mean()  # here


class HugeResidual(Part):
    value = 3e38

    def work(self, x):
        return x + 0.5 * x  # here


class MatmulOverflow(Part):
    value = 300.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        nn.init.constant_(self.linear.weight, 300.0)

    def work(self, x):
        return self.linear(x)  # here


class MatmulOverflowBF16(MatmulOverflow):
    value = 2e38

    def work(self, x):
        return self.linear(x)  # here


class CastOverflow(MatmulOverflow):
    value = 70000.0

    def work(self, x):
        return self.linear(x)  # here


class EmbeddingOverflow(Part):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        nn.init.constant_(self.embedding.weight, 500.0)
        self.linear = nn.Linear(3, 3)
        nn.init.constant_(self.linear.weight, 100.0)

    def work(self, x):
        x = x + self.embedding(torch.arange(len(x)))
        return self.linear(x)  # here


class Scores(Part):
    value = 200.0

    def work(self, x):
        q, k = x[None], x[None]
        scores = torch.bmm(q, k.transpose(1, 2))  # here
        return torch.bmm(scores.softmax(-1), q)[0]


class Convolution(Part):
    value = 250.0

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        nn.init.constant_(self.conv.weight, 250.0)

    def work(self, x):
        return self.conv(x[:, None])[:, 0]  # here


class EpsLostInFP16(Part):
    def work(self, x):
        x = x.half()
        return (x / (x.abs() + 1e-8)).float()  # here


class Doubles(torch.autograd.Function):
    """Its backward divides by 0."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0  # here


class UsersFunction(Part):
    marked = Doubles

    def __init__(self):
        super().__init__()
        self.inner = nn.Tanh()

    def work(self, x):
        return Doubles.apply(x)


class Checkpointed(Part):
    reentrant = False

    def forward(self, x):
        return checkpoint(self.work, self.inner(x.float() * 0), use_reentrant=self.reentrant)

    def work(self, x):
        return x.sqrt() + 1  # here


class CheckpointedReentrant(Checkpointed):
    reentrant = True

    def work(self, x):
        return x.sqrt() + 1  # here


class CheckpointedForward(Checkpointed):
    def work(self, x):
        return torch.log(x)  # here


class WrittenNaN(Part):
    def work(self, x):
        return x.masked_fill(x == 0, math.nan)  # here


class ConstantInf(Part):
    def work(self, x):
        return x + torch.tensor(math.inf)  # here


class SumInFP16(Part):
    value = 2000.0

    def work(self, x):
        x = x.half()[:, :, None].expand(-1, -1, 64)
        return x.sum(-1).float()  # here


class SquareInFP16(Part):
    value = 300.0

    def work(self, x):
        return (x.half() ** 2).float()  # here


class DroppedInFP16(Part):
    value = 60000.0

    def work(self, x):
        return F.dropout(x.half(), 0.5).float()  # here


class WrittenInPlace(Part):
    """A masked row in place; the second row is masked whole."""

    def work(self, x):
        scores = x @ x.T
        scores[1] = -math.inf
        return scores.softmax(-1) @ x  # here


class HarmlessThenReal(Part):
    """log(0) = -Inf becomes exp(-Inf) = 0 without harm; the root does not."""

    def work(self, x):
        with torch.no_grad():
            logs = x.log()
        y = x + logs.exp()
        return y.sqrt()  # here
