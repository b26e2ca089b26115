"""Sampling: generates a continuation of a prompt, token by token.

Works with any model whose `forward(inputs)` returns logits `[batch, time, vocab]`. The model's attribute `block_size`
is the maximum number of tokens that it can read at once; without it, `stabletrain sample` uses the data's. A model with
`new_cache()` computes only the new token, by `forward(inputs, cache)`, while the sequence fits into `block_size`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from stabletrain.errors import ConfigError


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
    """Returns the prompt and `new_tokens` sampled tokens; runs the model in evaluation mode and restores its mode.

    Args:
        model: its logits may have any floating-point dtype; they are converted to fp32.
        prompt: at least one token per row, on the model's device.
        new_tokens: number of tokens to append.
        temperature: divisor of the logits; 0 always takes the most likely token.
        top_k: number of most likely tokens to sample from; None for all.
        generator: random generator on the model's device; None for PyTorch's default.
        block_size: maximum sequence length of the model; None for its attribute `block_size`, or no limit without one.

    Raises:
        ConfigError: an argument is out of range.
    """
    if prompt.shape[1] < 1:
        raise ConfigError("the prompt is empty: give at least one token to continue")
    if new_tokens < 0:
        raise ConfigError(f"new_tokens={new_tokens} is below 0")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature={temperature} is outside [0, inf): 0 takes the most likely token, 1 samples")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k} is below 1: no token would be left")
    if block_size is None:
        block_size = getattr(model, "block_size", prompt.shape[1] + new_tokens)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        cache = getattr(model, "new_cache", lambda: None)()
        tokens = unread = prompt
        for _ in range(new_tokens):
            if cache is not None and tokens.shape[1] <= block_size:
                logits = model(unread, cache)
            else:  # the window slides: every position changes, so the cache is no longer valid
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
    """Samples one token per row from `softmax(logits / temperature)` over the `top_k` largest logits."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    kept, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    # Subtract the maximum first: with a small temperature, logits / temperature could overflow, and inf - inf is NaN.
    probabilities = torch.softmax((kept - kept[:, :1]) / temperature, dim=-1)
    return ids.gather(1, torch.multinomial(probabilities, 1, generator=generator))
