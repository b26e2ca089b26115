"""fp32 modules: finite where fp16 overflows, equal to the fp32 reference, with unchanged names, types and state."""

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.models.gpt import GPT
from stabletrain.models.layers import DotProduct
from stabletrain.models.resnet import CifarResNet
from stabletrain.stability import precision
from stabletrain.stability.init import GPT2Init
from stabletrain.stability.precision.autocast import Fp32Module, check_patterns, widen
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.softcap import Gemma2Softcap, NoSoftcap
from tests.stability.precision.given import CPU

SCALE = {"init_scale": 1024.0, "growth_interval": 2000, "min_scale": 1.0}


def fp16(*patterns):
    return precision.fp16(CPU, **SCALE, fp32_modules=patterns)


def mode(name, *patterns):
    return fp16(*patterns) if name == "fp16" else precision.bf16(CPU, fp32_modules=patterns)


def gpt(tied_head=False):
    return GPT(
        vocab_size=32,
        block_size=16,
        n_layer=2,
        n_head=2,
        n_embd=16,
        position="rope",
        norm="layernorm",
        mlp="gelu",
        bias=False,
        tied_head=tied_head,
        dropout=0.0,
        qknorm=NoQKNorm(),
        softcap=NoSoftcap(),
        qkclip=NoQKClip(),
    )


class Seen(nn.Linear):
    """A linear layer that remembers the dtype its forward computed with."""

    def forward(self, x):
        self.dtypes = x.dtype, torch.is_autocast_enabled("cpu")
        return super().forward(x)


def test_logits_beyond_fp16s_range_are_infinite_in_fp16_and_exact_in_an_fp32_head():
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 4, bias=False))
    x = torch.full((2, 8), 128.0)
    nn.init.constant_(model[1].weight, 100.0)  # 8 * 128 * 100 = 102,400 > 65,504
    with fp16().autocast():
        assert torch.isinf(model(x)).all()
    acting = fp16("1")
    assert acting.wrap_fp32_modules(model) == ["1"]
    with acting.autocast():
        inside = model(x.half())
    assert inside.dtype == torch.float32
    assert torch.equal(inside, torch.full((2, 4), 102_400.0))


class WrittenOut(nn.Module):
    """Attention as a formula, its scores in the dtype autocast gives them."""

    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1).to(v.dtype) @ v


def queries_keys_values(scale):
    """fp16 queries and keys of this scale, and values."""
    torch.manual_seed(0)
    return [(factor * torch.randn(1, 1, 6, 16)).half() for factor in (scale, scale, 1.0)]


def test_scores_beyond_fp16s_range_are_nan_in_fp16_and_exact_in_an_fp32_module():
    model, inputs = nn.ModuleDict({"scores": WrittenOut()}), queries_keys_values(300.0)
    assert (inputs[0].double() @ inputs[1].double().mT).max() > 65_504
    wanted = WrittenOut()(*[x.double() for x in inputs])
    with fp16().autocast():
        assert model["scores"](*inputs).isnan().any()
    acting = fp16("scores")
    acting.wrap_fp32_modules(model)
    with acting.autocast():
        inside = model["scores"](*inputs)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sink", [None, nn.Parameter(torch.tensor([0.7]))], ids=["plain", "sink"])
@pytest.mark.parametrize("softcap", [NoSoftcap(), Gemma2Softcap(50.0, 30.0)], ids=["none", "gemma2"])
def test_the_gpts_attention_is_exact_in_fp32_modules(softcap, sink):
    model, inputs = nn.ModuleDict({"dot_product": DotProduct(softcap, 0.0, sink)}), queries_keys_values(1.0)
    wanted = model["dot_product"](*[x.double() for x in inputs])
    acting = fp16("dot_product")
    with acting.autocast():
        outside = model["dot_product"](*inputs)
    acting.wrap_fp32_modules(model)
    with acting.autocast():
        inside = model["dot_product"](*inputs)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside.double(), wanted, rtol=1e-5, atol=1e-5)
    assert (outside.double() - wanted).abs().max() > 1e-4, "fp16 would do as well: this test shows nothing"


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_an_fp32_module_computes_in_fp32_and_other_modules_do_not_change(name):
    model = nn.Sequential(Seen(4, 4), Seen(4, 4), Seen(4, 4))
    acting = mode(name, "1")
    acting.wrap_fp32_modules(model)
    outputs = []
    for layer in model:
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output.dtype))
    with acting.autocast():
        model(torch.randn(2, 4))
    assert outputs == [acting.dtype, torch.float32, acting.dtype]
    assert model[1].dtypes == (torch.float32, False)
    assert model[2].dtypes == (torch.float32, True)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(model[1].state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(model[1](x), plain(x)), "outside of autocast an fp32 module computes as before"


def test_inputs_are_cast_to_fp32_inside_nested_containers():
    half, double, count = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float64), torch.ones(2).long()
    pair = namedtuple("pair", "a b")
    given = {"x": [half, (double, half.bfloat16())], "y": pair(half, count), "z": "text"}
    wide = widen(given)
    assert wide["x"][0].dtype == wide["x"][1][1].dtype == wide["y"].a.dtype == torch.float32
    assert wide["x"][1][0] is double
    assert wide["y"].b is count
    assert type(wide["y"]) is pair
    assert type(wide["x"][1]) is tuple
    assert wide["z"] == "text"


def test_keyword_inputs_and_nested_fp32_modules():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Seen(4, 4)

        def forward(self, x, *, more):
            return self.layer(x + sum(more))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x.bfloat16(), more=[x.bfloat16()])

    model = nn.Sequential(Outer(), Seen(4, 4))
    acting = precision.bf16(CPU, fp32_modules=["0", "0.inner*"])
    assert acting.wrap_fp32_modules(model) == ["0", "0.inner", "0.inner.layer"]
    with acting.autocast():
        out = model(torch.randn(2, 4))
    assert model[0].inner.layer.dtypes == (torch.float32, False)
    assert model[1].dtypes == (torch.float32, True), "autocast is on again after the fp32 module"
    assert out.dtype == torch.bfloat16


def test_a_copy_computes_with_its_own_weights():
    model = nn.Sequential(nn.Linear(4, 4))
    acting = fp16("0")
    acting.wrap_fp32_modules(model)
    model_copy = copy.deepcopy(model)
    with torch.no_grad():
        model_copy[0].weight.zero_()
        model_copy[0].bias.fill_(7.0)
    with acting.autocast():
        assert torch.equal(model_copy(torch.randn(2, 4).half()), torch.full((2, 4), 7.0))
        assert model_copy(torch.randn(2, 4)).dtype == torch.float32
        assert not torch.equal(model(torch.ones(2, 4)), torch.full((2, 4), 7.0))


def test_names_types_and_state_stay():
    model = gpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text, types = repr(model), [type(module).__name__ for module in model.modules()]
    chosen = precision.bf16(CPU, fp32_modules=["head", "blocks.*.attention.dot_product"]).wrap_fp32_modules(model)
    assert chosen == ["blocks.0.attention.dot_product", "blocks.1.attention.dot_product", "head"]
    assert repr(model) == text
    assert [type(module).__name__ for module in model.modules()] == types
    assert isinstance(model.head, nn.Linear)
    assert isinstance(model.blocks[0].attention.dot_product, DotProduct)
    assert type(model.blocks[0].attention.dot_product) is type(model.blocks[1].attention.dot_product)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not isinstance(gpt().head, Fp32Module), "another model of the same class is none"


def test_a_second_call_changes_nothing_more():
    model, acting = gpt(), precision.bf16(CPU, fp32_modules=["head"])
    assert acting.wrap_fp32_modules(model) == acting.wrap_fp32_modules(model) == ["head"]
    assert type(model.head).__mro__.count(Fp32Module) == 1


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_gradients_flow_in_fp32_and_come_close_to_the_fp32_models(name):
    torch.manual_seed(0)
    model = gpt()
    GPT2Init(std=0.02)(model)
    tokens = torch.randint(32, (2, 16))

    def gradients(acting):
        model.zero_grad()
        with acting.autocast():
            logits = model(tokens)
        nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]), logits

    wanted, _ = gradients(precision.fp32(CPU))
    acting = mode(name, "head", "blocks.*.attention.dot_product")
    acting.wrap_fp32_modules(model)
    found, logits = gradients(acting)
    assert logits.dtype == found.dtype == torch.float32
    assert (found - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_fp32_modules_of_a_resnet(name):
    torch.manual_seed(0)
    model = CifarResNet(depth=8, num_classes=10, in_channels=1)
    acting = mode(name, "fc", "bn1", "stages.0.*")
    chosen = acting.wrap_fp32_modules(model)
    assert {"fc", "bn1", "stages.0.0.conv1"} <= set(chosen)
    x = torch.randn(2, 1, 8, 8)
    with acting.autocast():
        model(x).sum().backward()
        assert model(x).dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters())


def test_compiled_without_a_break_it_computes_the_same():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.scores, self.head = nn.Linear(16, 16), WrittenOut(), nn.Linear(16, 4)

        def forward(self, x):
            x = self.up(x)
            return self.head(self.scores(x, k=x, v=x))

    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 6, 16)
    acting = precision.bf16(CPU, fp32_modules=["head", "scores"])
    acting.wrap_fp32_modules(model)
    with acting.autocast():
        wanted = model(x)
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("hed", "'hed' names no module of GPT: did you mean head.*blocks.\\*.attention.dot_product"),
        ("blocks.*.attention.dotproduct", "did you mean blocks.\\*.attention.dot_product"),
        ("blocks", "'blocks' only holds other modules.*use 'blocks.\\*'"),
    ],
)
def test_a_pattern_without_a_module_is_refused(pattern, message):
    with pytest.raises(ConfigError, match=f"precision.fp32_modules.*{message}"):
        precision.bf16(CPU, fp32_modules=["norm", pattern]).wrap_fp32_modules(gpt())


def test_what_is_no_name_is_refused():
    with pytest.raises(ConfigError, match=r"precision\.fp32_modules=\[''\]: '' is not the name of a module"):
        fp16("")
    with pytest.raises(ConfigError, match="3 is not the name of a module"):
        check_patterns(["head", 3])


def test_a_tied_head_can_be_an_fp32_module():
    model, inputs = gpt(tied_head=True), torch.arange(16)[None]
    nn.init.constant_(model.embedding.weight, 1.0)
    nn.init.constant_(model.norm.weight, 0.0)
    model.norm.bias = nn.Parameter(torch.full((16,), 1e4))  # logits of 16 * 1e4 > 65,504
    with fp16().autocast():
        assert torch.isinf(model(inputs)).all()
    assert fp16("head").wrap_fp32_modules(model) == ["head"]
    with fp16().autocast():
        assert torch.equal(model(inputs), torch.full((1, 16, 32), 16e4))


def test_fp32_wraps_no_modules_and_notes_it(monkeypatch):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"avx2"}))
    acting = precision.auto(CPU, **SCALE, fp32_modules=["head"])
    assert acting.name == "fp32"
    assert acting.why.endswith("precision.fp32_modules does nothing: every module is fp32")
    model = gpt()
    assert acting.wrap_fp32_modules(model) == []
    assert not any(isinstance(module, Fp32Module) for module in model.modules())
    assert precision.auto(CPU, **SCALE).why == "auto: this CPU has no bf16 instructions"
