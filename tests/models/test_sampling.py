"""Sampling: the model's own distribution, the same tokens with a cache and without, and no trace left behind."""

from typing import Any

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.models.sampling import generate
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.softcap import Gemma2Softcap, NoSoftcap


class Plain(nn.Module):
    """A model of the contract's least: `forward(inputs) -> logits`, no cache, no block_size."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.longest = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, inputs.shape[1])
        return self.inner(inputs)


class Fixed(nn.Module):
    """The same logits at every position."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*inputs.shape, -1)


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    values: dict[str, Any] = {"position": "rope", "softcap": NoSoftcap(), "dropout": 0.0} | changes
    model = GPT(
        vocab_size=31,
        block_size=12,
        n_layer=2,
        n_head=2,
        n_embd=16,
        norm="layernorm",
        mlp="gelu",
        bias=False,
        tied_head=False,
        qknorm=NoQKNorm(),
        qkclip=NoQKClip(),
        **values,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def prompt(batch: int = 2, time: int = 3) -> torch.Tensor:
    return torch.randint(31, (batch, time), generator=torch.Generator().manual_seed(1))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("softcap", [NoSoftcap(), Gemma2Softcap(2.0, 3.0)], ids=["none", "gemma2"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_greedy_tokens_are_the_argmax_of_a_full_pass_with_and_without_a_cache(position: str, softcap: Any) -> None:
    model = gpt(position=position, softcap=softcap).eval()
    cached = generate(model, prompt(), 20, temperature=0.0)
    plain = Plain(model)
    assert torch.equal(generate(plain, prompt(), 20, temperature=0.0, block_size=12), cached)
    assert plain.longest == 12
    expected = prompt()
    for _ in range(20):  # on past the block of 12
        following = model(expected[:, -12:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, following], dim=1)
    assert torch.equal(cached, expected)
    assert len(expected.unique()) > 4  # else agreement would show little


def test_the_cache_is_used_while_the_block_lasts() -> None:
    model, read = gpt(), []
    model.register_forward_pre_hook(lambda _module, args: read.append(args[0].shape[1]))
    generate(model, prompt(time=3), 12, temperature=0.0)
    assert read == [3, *[1] * 9, 12, 12]


def test_a_prompt_longer_than_the_block_is_read_from_its_end() -> None:
    model = gpt()
    long = prompt(time=30)
    total = generate(model, long, 4, temperature=0.0)
    assert torch.equal(total[:, :30], long)
    assert torch.equal(total[:, 18:], generate(model, long[:, 18:], 4, temperature=0.0))


def test_the_same_generator_gives_the_same_tokens_and_leaves_the_global_one_alone() -> None:
    model = gpt()
    before = torch.get_rng_state()
    first = generate(model, prompt(), 30, generator=seeded(5))
    assert torch.equal(first, generate(model, prompt(), 30, generator=seeded(5)))
    assert not torch.equal(first, generate(model, prompt(), 30, generator=seeded(6)))
    assert torch.equal(torch.get_rng_state(), before)


def test_top_k_of_one_is_greedy() -> None:
    model = gpt()
    greedy = generate(model, prompt(), 20, temperature=0.0)
    assert torch.equal(generate(model, prompt(), 20, temperature=3.0, top_k=1, generator=seeded()), greedy)
    # A temperature near 0 as well, without an overflow on the way.
    assert torch.equal(generate(model, prompt(), 20, temperature=1e-40, generator=seeded()), greedy)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3), (1.0, 99)])
def test_tokens_come_as_often_as_softmax_says(temperature: float, top_k: int | None) -> None:
    logits = [0.0, 2.0, -1.0, 1.0, 1.5]
    draws = 40_000
    drawn = generate(Fixed(logits), torch.zeros(draws, 1, dtype=torch.int64), 1, temperature, top_k, generator=seeded())
    share = drawn[:, 1].bincount(minlength=5) / draws
    kept = torch.tensor(logits)
    if top_k == 3:
        kept[[0, 2]] = -torch.inf
    expected = torch.softmax(kept / temperature, dim=-1)
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()  # 5 standard errors


def test_the_mode_of_every_module_comes_back_and_dropout_is_off_meanwhile() -> None:
    model = gpt(dropout=0.5).train()
    model.blocks[0].eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    first = generate(model, prompt(), 10, temperature=0.0)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(first, generate(gpt(dropout=0.0), prompt(), 10, temperature=0.0))


def test_the_mode_comes_back_after_an_error() -> None:
    model = gpt().train()
    with pytest.raises(IndexError):
        generate(model, torch.full((1, 1), 99), 1)
    assert all(module.training for module in model.modules())


def test_no_graph_is_kept() -> None:
    model, seen = gpt(), []
    model.register_forward_hook(lambda _m, _i, logits: seen.append(logits.requires_grad))
    generate(model, prompt(), 2)
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, r"temperature=-1\.0 is outside \[0, inf\)"),
        ({"temperature": float("nan")}, r"temperature=nan is outside"),
        ({"top_k": 0}, r"top_k=0 is below 1"),
        ({"new_tokens": -1}, r"new_tokens=-1 is below 0"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.int64)}, r"the prompt is empty"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"prompt": prompt(), "new_tokens": 1} | arguments
    with pytest.raises(ConfigError, match=message):
        generate(gpt(), **given)
