"""Numbers near the edge of fp16, an eps of another size and one-hot softmaxes are found; usual ones pass."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.beside.preflight.checks import check_loop
from stabletrain.beside.preflight.headroom import headroom_of

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 4


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def classifier(scale=1.0):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        model[2].weight.mul_(scale)
    return model


def mean_loss(model, x, y):
    return F.cross_entropy(model(x).float(), y)


def loop(model=classifier, loss=mean_loss, optimizer=adam, precision="fp32", init_scale=1024.0, **parts):
    """Returns a function that makes a loop of one batch."""

    def make():
        net = model()
        opt = optimizer(net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale) if precision == "fp16" else None
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16

        def value(batch):
            with torch.autocast("cpu", dtype, enabled=precision in ("fp16", "bf16")):
                return loss(net, *batch)

        def step(batch):
            opt.zero_grad()
            if scaler is None:
                value(batch).backward()
                opt.step()
            else:
                scaler.scale(value(batch)).backward()
                scaler.step(opt)
                scaler.update()

        known = {"model": net, "optimizers": [opt], "loss": value, "step": step, "scaler": scaler}
        return {**known, "batch": lambda step, rank=0: (X, Y), "precision": precision, **parts}

    return make


def only(make):
    """Returns the only finding."""
    [finding] = check_loop(make, ["headroom"])
    return finding


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_usual_loop_passes_in_each_precision(precision):
    finding = only(loop(precision=precision))
    assert finding.verdict == "passed"
    assert finding.text.startswith("largest output of a layer ")


# ---- range


class Large(nn.Module):
    """Multiplies, and divides again."""

    def __init__(self, factor):
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(8, 8), nn.Linear(8, 4), factor

    def forward(self, x):
        return self.last(self.first(x * self.factor) / self.factor)


def test_outputs_near_the_largest_number_of_fp16_are_named_and_those_of_bf16_are_not():
    finding = only(loop(lambda: Large(1e4), precision="fp16"))
    assert finding.verdict == "fault"
    assert finding.text.startswith("outputs of first reach ")
    assert finding.text.endswith("in fp16, whose largest number is 65504")
    assert finding.places == ("first",)
    assert finding.line.startswith(__file__)
    assert only(loop(lambda: Large(1e4), precision="bf16")).verdict == "passed"
    assert only(loop(lambda: Large(100.0), precision="fp16")).verdict == "passed"


def test_an_input_near_the_largest_number_of_fp16_that_autocast_casts_is_named():
    def small():
        model = classifier()
        with torch.no_grad():
            model[0].weight.mul_(1e-4)
        return model

    def far(model, x, y):
        return mean_loss(model, 4e3 * x, y)

    finding = only(loop(small, far, precision="fp16"))
    assert finding.verdict == "fault"
    assert finding.text.startswith("inputs of 0 reach ")
    assert finding.places == ("0",)
    assert only(loop(small, far, precision="bf16")).verdict == "passed"
    assert only(loop(small, lambda model, x, y: mean_loss(model, 40 * x, y), precision="fp16")).verdict == "passed"


def test_weights_near_the_largest_number_of_fp16_are_named():
    model = classifier().half()
    with torch.no_grad():
        model[0].weight[0, 0] = 4e4
    [finding] = headroom_of(model, [torch.optim.SGD(model.parameters(), lr=0.1)], "fp16_params")
    assert finding.text == "0.weight reach 4e+04 in fp16, whose largest number is 65504"
    assert (finding.verdict, finding.places) == ("fault", ("0.weight",))
    [finding] = headroom_of(model.float(), [torch.optim.SGD(model.parameters(), lr=0.1)], "bf16")
    assert finding.verdict == "passed"


def test_gradients_that_fp16_loses_are_found_by_those_at_a_larger_loss_scale():
    tiny = lambda model, x, y: 1e-5 * mean_loss(model, x, y)  # noqa: E731
    finding = only(loop(loss=tiny, precision="fp16", init_scale=1.0))
    assert finding.verdict == "fault"
    assert finding.text.startswith(
        "gradients of 0.weight, 2.weight are below fp16's smallest numbers at the loss scale 1"
    )
    assert finding.places == ("scaler", "0.weight", "2.weight")
    assert finding.fix == "raise the loss scale: GradScaler(init_scale=4096)"
    large = only(loop(loss=lambda model, x, y: 1e-2 * mean_loss(model, x, y), precision="fp16"))
    assert large.verdict == "passed"


def test_gradients_that_a_hook_clips_differ_at_each_scale_and_are_not_lost():
    def clipped():
        model = classifier()
        for each in model.parameters():
            each.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return model

    assert only(loop(clipped, precision="fp16")).verdict == "passed"


# ---- eps


def test_an_eps_that_swallows_the_moments_is_found_unless_it_is_meant():
    tiny = lambda model, x, y: 1e-10 * mean_loss(model, x, y)  # noqa: E731
    finding = only(loop(loss=tiny))
    assert finding.verdict == "fault"
    assert finding.text.startswith("eps=1e-08 is far above the root of the second moments, ")
    assert finding.places == ("optimizers.0.param_groups[0].eps",)
    large = only(loop(optimizer=lambda parameters: torch.optim.RMSprop(parameters, eps=0.05)))
    assert large.verdict == "note"
    assert only(loop(optimizer=lambda parameters: torch.optim.RMSprop(parameters, eps=1e-3))).verdict == "passed"


def test_weights_without_gradient_say_nothing_about_eps():
    def half_used():
        model = classifier()
        model.unused = nn.Linear(100, 100)
        nn.init.zeros_(model.unused.weight)
        return model

    def loss(model, x, y):
        return F.cross_entropy(model[:3](x), y) + 0 * model.unused.weight.sum()

    assert only(loop(half_used, loss)).verdict == "passed"


def test_an_eps_that_is_0_in_the_moments_type_is_found_before_the_first_step():
    model = classifier().half()
    [finding] = headroom_of(model, [adam(model.parameters())], "fp16_params")
    text = "eps=1e-08 is 0 in float16, the type of the second moments: where they are 0, the step divides by 0"
    assert (finding.verdict, finding.text) == ("fault", text)
    assert finding.places == ("optimizers.0.param_groups[0].eps",)
    for fine in ({"eps": 1e-4}, {"fused": True}):
        [finding] = headroom_of(model, [torch.optim.Adam(model.parameters(), **fine)], "fp16_params")
        assert finding.verdict == "passed"


class ByHand(nn.Module):
    """RMSNorm, as it is often written."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-5), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), ByHand()]
)
def test_a_norm_whose_eps_is_above_its_inputs_variance_is_named(norm):
    class Scaled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.norm, self.last, self.factor = norm, nn.Linear(8, 4), factor

        def forward(self, x):
            return self.last(self.norm(x * self.factor))

    finding = only(loop(lambda: Scaled(1e-4)))
    assert finding.verdict == "fault"
    assert finding.text.startswith("the input of norm has a variance of ")
    assert finding.text.endswith("far below eps=1e-05: its output is not normalized")
    assert finding.places == ("norm",)
    for fine in (1.0, 0.02, 0.0):  # 0: what is before it begins at 0
        assert only(loop(lambda: Scaled(fine))).verdict == "passed"  # noqa: B023


# ---- softmax


class Attention(nn.Module):
    """Attention over the rows of a batch."""

    def __init__(self, factor, kind):
        super().__init__()
        self.queries, self.last, self.factor, self.kind = nn.Linear(8, 8), nn.Linear(8, 4), factor, kind
        self.several = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("later", torch.ones(16, 16, dtype=torch.bool).triu(1))

    def forward(self, x):
        q = self.factor * self.queries(x)[None]
        if self.kind == "function":
            out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        elif self.kind == "module":
            out = self.several(q, q, q, attn_mask=self.later)[0]
        else:
            scores = (q @ q.mT).masked_fill(self.later, -torch.inf)
            out = scores.softmax(-1) @ q
        return self.last(out[0] / self.factor)


@pytest.mark.parametrize("kind", ["function", "module", "by hand"])
def test_an_attention_that_is_one_hot_is_named_whoever_computes_it(kind):
    finding = only(loop(lambda: Attention(60.0, kind)))
    assert finding.verdict == "fault"
    place = "several" if kind == "module" else "the model"
    assert finding.text.startswith(f"scores of the softmax in {place} are ")
    assert finding.line.startswith(__file__)
    assert only(loop(lambda: Attention(1.0, kind))).verdict == "passed"
    assert only(loop(lambda: Attention(1.0, kind), precision="fp16")).verdict == "passed"  # its mask is -inf


def test_a_first_loss_far_above_that_of_equal_scores_is_found_with_the_layer_that_gives_them():
    finding = only(loop(lambda: classifier(1000.0)))
    assert finding.verdict == "fault"
    assert finding.text.startswith("the first loss is ")
    assert f"where equal scores have {math.log(4):.3g}: the scores that 2 gives" in finding.text
    assert finding.places == ("2",)
    assert only(loop(lambda: classifier(70.0))).verdict == "passed"

    def binary(model, x, y):
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], (y > 1).float())

    assert only(loop(lambda: classifier(1000.0), binary)).verdict == "fault"
    assert only(loop(loss=binary)).verdict == "passed"


def test_a_temperature_that_leaves_one_score_is_found_and_the_usual_one_of_100_is_not():
    def contrastive(scale):
        def loss(model, x, y):
            one, two = F.normalize(model(x)), F.normalize(model(x + 0.1))
            return F.cross_entropy(scale * one @ two.T, torch.arange(len(x)))

        return loss

    assert "are 1.38e+04 apart" in only(loop(loss=contrastive(1e4))).text
    assert only(loop(loss=contrastive(100.0))).verdict == "passed"
