"""Tiny models, and one training step in parts, so that a test can inspect the middle of it."""

import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.models.gpt import GPT
from stabletrain.models.resnet import CifarResNet
from stabletrain.records import Batch
from stabletrain.stability import precision
from stabletrain.stability.objective import CrossEntropy
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.softcap import NoSoftcap

CPU = torch.device("cpu")
PRECISIONS = {
    "fp32": lambda: precision.fp32(CPU),
    "bf16": lambda: precision.bf16(CPU),
    "fp16": lambda: precision.fp16(CPU, init_scale=1024.0, growth_interval=2000, min_scale=1.0),
}


def tiny_gpt(**changed):
    chosen = {
        "vocab_size": 32,
        "block_size": 8,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "position": "rope",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": False,
        "tied_head": False,
        "dropout": 0.2,
        "qknorm": NoQKNorm(),
        "softcap": NoSoftcap(),
        "qkclip": NoQKClip(),
    }
    torch.manual_seed(0)
    return GPT(**(chosen | changed))


def tiny_resnet():
    torch.manual_seed(0)
    return CifarResNet(depth=8, num_classes=4, in_channels=1)


def tokens(seed=0, samples=4, time=8, vocab=32):
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(vocab, (samples, time + 1), generator=generator)
    return Batch(both[:, :-1].contiguous(), both[:, 1:].contiguous())


def images(seed=0, samples=8):
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(4, (samples,), generator=generator))


def features(seed=0, samples=16, width=8, classes=4):
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(samples, width, generator=generator), torch.randint(classes, (samples,), generator=generator)
    )


def adamw(model, lr=1e-3, fused=True):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=fused)


def backward(model, batch, mode):
    """Forward, backward and unscale; returns the loss."""
    for p in model.parameters():
        p.grad = None
    with mode.autocast():
        output = model(batch.inputs)
    loss = F.cross_entropy(output.float().flatten(0, -2), batch.targets.flatten())
    mode.scale(loss).backward()
    mode.unscale_([p.grad for p in model.parameters() if p.grad is not None])
    return loss.detach()


def look_at(monitors, model, optimizer, batch, mode, *, applied=True, clip=None):
    """Runs one step and inspects it before and after the update."""
    backward(model, batch, mode)
    monitors.before(model, optimizer, batch, mode, CrossEntropy())
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    if applied:
        optimizer.step()
    return monitors.after(model, optimizer, applied)
