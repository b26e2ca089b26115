"""Sampling: a language model continues a prompt, one token after the other.

Any model with `forward(inputs) -> logits [batch, time, vocab]` will do. One that also offers `new_cache()` is asked for
the new token only, as long as the sequence fits its block; beyond that, all models read the last `block_size` tokens
afresh, because every position in the window has moved.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from stabletrain.errors import ConfigError


@runtime_checkable
class Remembers(Protocol):
    """A model whose `forward(inputs, cache)` continues what the cache has read."""

    def new_cache(self) -> Any: ...


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Int[Tensor, "batch time"],
    new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    block_size: int | None = None,
) -> Int[Tensor, "batch total"]:
    """The prompt and `new_tokens` more, drawn from the model in evaluation mode, which is undone afterwards.

    Args:
        model: its logits may have any floating dtype; they are read as fp32.
        prompt: at least one token a row, on the model's device.
        new_tokens: how many to append.
        temperature: the logits are divided by it; 0 takes the likeliest token each time.
        top_k: only so many of the likeliest tokens are drawn from; None: all.
        generator: source of the randomness, on the model's device; None: PyTorch's own. The same generator state gives
            the same tokens.
        block_size: longest sequence the model reads; None: its attribute `block_size`, or no bound if it has none.

    Raises:
        ConfigError: an argument outside its bound.
    """
    if prompt.shape[1] < 1:
        raise ConfigError("the prompt is empty: give at least one token to continue")
    if new_tokens < 0:
        raise ConfigError(f"new_tokens={new_tokens} is below 0")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature={temperature} is outside [0, inf): 0 takes the likeliest token, 1 samples")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k} is below 1: no token would be left")
    if block_size is None:
        block_size = getattr(model, "block_size", prompt.shape[1] + new_tokens)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        cache = model.new_cache() if isinstance(model, Remembers) else None
        tokens = unread = prompt
        for _ in range(new_tokens):
            if cache is not None and tokens.shape[1] <= block_size:
                logits = model(unread, cache)
            else:
                logits = model(tokens[:, -block_size:])
            unread = draw(logits[:, -1].float(), temperature, top_k, generator).to(prompt.dtype)
            tokens = torch.cat([tokens, unread], dim=1)
        return tokens
    finally:
        for module, training in modes:
            module.training = training


def draw(
    logits: Float[Tensor, "batch vocab"], temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Int[Tensor, "batch 1"]:
    """One token a row from `softmax(logits / temperature)` over the `top_k` largest logits."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    kept, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    # Relative to the largest, so that a small temperature cannot overflow to inf - inf.
    probabilities = torch.softmax((kept - kept[:, :1]) / temperature, dim=-1)
    return ids.gather(1, torch.multinomial(probabilities, 1, generator=generator))
