"""Norm placement: each against its formula in float64, and what it does to the residual stream."""

import pytest
import torch
import torch.nn.functional as F

from stabletrain.models.layers import KVCache, RMSNorm
from stabletrain.stability.init import GPT2Init, SmallInit
from stabletrain.stability.norm_placement import PostNorm, PreNorm, ReorderedNorm, SandwichNorm
from tests.models.given import small

WIDTH, DEPTH = 32, 6
INPUTS = torch.randint(29, (3, 16), generator=torch.Generator().manual_seed(1))

FORMULAS = {
    PreNorm: lambda x, f, n, m: x + f(n(x)),
    SandwichNorm: lambda x, f, n, m: x + m(f(n(x))),
    ReorderedNorm: lambda x, f, n, m: x + n(f(x)),
    PostNorm: lambda x, f, n, m: n(x + f(x)),
}


def gpt(kind, **changes):
    model = small(norm_placement=kind(), **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1)
    return model


def norm(weights, name, rms):
    """Returns the norm of this name as a function; the identity if the model has none."""
    gain = weights.get(f"{name}.weight")
    if gain is None:
        return lambda x: x
    centred = (lambda x: x) if rms else (lambda x: x - x.mean(-1, keepdim=True))
    return lambda x: centred(x) / (centred(x).square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def by_hand(model, kind, inputs, rms):
    """Returns the logits from the formula, with the attention and the MLP of the model."""
    weights = model.state_dict()
    x = weights["embedding.weight"][inputs]
    for i, block in enumerate(model.blocks):
        for branch, f in (
            ("attention", lambda y, block=block: block.attention(y, model.position, None)),
            ("mlp", block.mlp),
        ):
            n, m = (norm(weights, f"blocks.{i}.{branch}_{each}", rms) for each in ("norm", "output_norm"))
            x = FORMULAS[kind](x, f, n, m)
    return F.linear(norm(weights, "norm", rms)(x), weights["head.weight"])


@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("kind", FORMULAS)
def test_a_block_is_its_formula_in_float64(kind, rms):
    model = gpt(kind, norm="rmsnorm" if rms else "layernorm").double()
    torch.testing.assert_close(model(INPUTS), by_hand(model, kind, INPUTS, rms), rtol=1e-10, atol=1e-10)
    others = {PreNorm, ReorderedNorm, PostNorm} - {kind}  # without an output norm, sandwich is pre
    assert not any(torch.allclose(model(INPUTS), by_hand(model, other, INPUTS, rms), rtol=1e-3) for other in others)


def test_pre_has_the_modules_and_the_bits_of_the_plain_block():
    model = gpt(PreNorm)
    names = ["attention_norm", "attention", "mlp_norm", "mlp", "dropout"]
    assert [name for name, _ in model.blocks[0].named_children()] == names
    x = torch.randn(2, 5, WIDTH)
    for block in model.blocks:
        y = x + block.attention(block.attention_norm(x), model.position, None)
        assert torch.equal(block(x, model.position, None), y + block.mlp(block.mlp_norm(y)))


def test_norms_are_added_or_left_out_as_the_placement_says():
    base = {*gpt(PreNorm).state_dict()}
    names = {kind: {*gpt(kind).state_dict()} for kind in FORMULAS}
    branches = [f"blocks.{i}.{branch}_output_norm.weight" for i in range(2) for branch in ("attention", "mlp")]
    assert names[SandwichNorm] == base | {*branches}
    assert names[ReorderedNorm] == base
    assert names[PostNorm] == base - {"norm.weight"}


def streams(kind, scale):
    """Returns the mean square of the residual stream after each block of a new model, whose matrices are scaled."""
    model, found = small(norm_placement=kind(), n_layer=DEPTH, norm="rmsnorm"), []
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.mul_(scale)
            block.mlp.down.weight.mul_(scale)
            block.register_forward_hook(lambda module, given, out: found.append(float(out.square().mean())))
        model(INPUTS)
    return found


def test_output_norms_bound_the_growth_of_the_stream_whatever_the_weights():
    start = float(small().embedding.weight.detach()[INPUTS].square().mean())
    for kind in (SandwichNorm, ReorderedNorm):
        for scale in (1.0, 100.0):
            for number, size in enumerate(streams(kind, scale), 1):
                assert size**0.5 <= start**0.5 + 2 * number + 1e-4  # each branch adds a vector with an RMS of 1
    assert streams(PostNorm, 100.0) == pytest.approx([1.0] * DEPTH, rel=1e-4)
    once, hundredfold = streams(PreNorm, 1.0), streams(PreNorm, 100.0)
    assert hundredfold[-1] > 1e3 * once[-1]
    assert hundredfold[-1] > 1e3 * streams(SandwichNorm, 100.0)[-1]


@pytest.mark.parametrize("kind", FORMULAS)
def test_cached_tokens_give_the_same_logits(kind):
    model = gpt(kind).double()
    cache: list[KVCache] = model.new_cache()
    parts = [model(INPUTS[:, start : start + 4], cache) for start in range(0, 16, 4)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(INPUTS), rtol=1e-9, atol=1e-9)


def test_a_norm_after_a_branch_of_zeros_multiplies_its_gradient_by_one_over_the_root_of_eps():
    drawn, same = torch.Generator().manual_seed(1), torch.nn.Identity()
    x = torch.randn(2, 3, WIDTH, generator=drawn, dtype=torch.float64)

    def gradient(placement, output_norm):
        branch = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(branch.weight)
        placement(x, branch, same, output_norm, same).square().sum().backward()
        return branch.weight.grad

    after = gradient(SandwichNorm(), RMSNorm(WIDTH, 1e-6, False).double())
    torch.testing.assert_close(after, 1e3 * gradient(PreNorm(), None), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("init", [GPT2Init(0.02), SmallInit()], ids=str)
@pytest.mark.parametrize("kind", FORMULAS)
def test_an_init_scales_the_last_weights_of_a_branch_only_if_no_norm_undoes_it(kind, init):
    model = small(norm_placement=kind())
    init(model)
    block = model.blocks[0]
    assert (len(model.residual_projections()) == 4) == (kind in (PreNorm, PostNorm))
    ratio = float(block.attention.value.weight.detach().std() / block.attention.out.weight.detach().std())
    assert ratio == pytest.approx(2 if kind in (PreNorm, PostNorm) else 1, rel=0.15)
