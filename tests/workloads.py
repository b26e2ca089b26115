"""The benchmarks' models and data: a GPT and a ResNet on random data, small on a CPU, of a common size on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.guard.policy import NoGuard, SkipGuard
from stabletrain.machine.determinism import Seeded
from stabletrain.models.gpt import GPT
from stabletrain.models.resnet import CifarResNet, TorchvisionResNet
from stabletrain.parallel.single import SingleProcess
from stabletrain.stability import precision
from stabletrain.stability.clipping import NormClip
from stabletrain.stability.objective import CrossEntropy
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.stability.schedule import Constant, LearningRate, NoWarmup
from stabletrain.stability.softcap import NoSoftcap
from stabletrain.tools import Tools


def gpt(n_layer: int, n_embd: int, block_size: int, batch: int, vocab: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a GPT with heads of 64 (of 32 if it is narrow), tokens and targets."""
    model = GPT(
        vocab_size=vocab,
        block_size=block_size,
        n_layer=n_layer,
        n_head=n_embd // (64 if n_embd >= 512 else 32),
        n_embd=n_embd,
        position="rope",
        norm="layernorm",
        mlp="gelu",
        bias=False,
        tied_head=False,
        dropout=0.0,
        qknorm=NoQKNorm(),
        softcap=NoSoftcap(),
        qkclip=NoQKClip(),
    )
    tokens = torch.randint(vocab, (batch, block_size + 1))
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def resnet(model: nn.Module, size: int, batch: int, classes: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns the model, with random images and labels."""
    return model, torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


WORKLOADS: dict[str, dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]]] = {
    "cpu": {
        "GPT 4 x 128, 16 x 128 tokens": lambda: gpt(4, 128, 128, 16, 256),
        "ResNet-20, 32 images of 32 px": lambda: resnet(
            CifarResNet(depth=20, num_classes=10, in_channels=3), 32, 32, 10
        ),
    },
    "cuda": {
        "GPT 12 x 768, 8 x 1024 tokens": lambda: gpt(12, 768, 1024, 8, 50257),
        "ResNet-50, 64 images of 224 px": lambda: resnet(
            TorchvisionResNet(depth=50, num_classes=1000, in_channels=3, stem="large"), 224, 64, 1000
        ),
    },
}


def build_tools(precision: FullPrecision, **given: Any) -> Tools:
    """Builds the tools of a step from objects.

    The defaults: cross-entropy, gradients clipped at norm 1, a `SkipGuard` that halts at the tenth skip in a row, a
    constant learning rate, randomness seeded by step number, one process.

    Args:
        given: fields of `Tools`; None for the default.
    """
    usual = {
        "sanitizer": Sanitizer(),
        "objective": CrossEntropy(),
        "clipping": NormClip(1.0),
        "after_update": NoQKClip(),
        "guard": SkipGuard(max_consecutive=10),
        "learning_rate": LearningRate(NoWarmup(), Constant(), 10**6),
        "determinism": Seeded(),
        "seed": 0,
        "parallel": SingleProcess(),
    }
    return Tools(precision=precision, **usual | {name: value for name, value in given.items() if value is not None})


def plain_tools(mode: str, device: torch.device, guard: NoGuard) -> Tools:
    """Returns the tools of a plain run: the given precision and guard, clipping at 1, everything else off."""
    acting = getattr(precision, mode)(device)
    acting.prepare()
    return build_tools(acting, guard=guard)
