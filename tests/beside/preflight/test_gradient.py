"""Whether the gradient is that of the loss."""

import copy
import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stabletrain.beside.preflight.gradient import check
from tests.beside.preflight.small import Net, maker
from tests.beside.preflight.test_functions import HalfSwish


def squared(model, batch):
    """Returns the mean squared error."""
    return F.mse_loss(model(batch[0]).float(), batch[1])


def found_of(between=None, **parts):
    """Returns what is found of a loop with something between its layers."""
    return check(maker(**{"model": lambda: Net(between), "loss": squared, **parts}))


def faults_of(*args, **parts):
    """Returns the faults."""
    return [each for each in found_of(*args, **parts) if each.verdict == "fault"]


def test_a_plain_loop_passes_with_its_slope():
    [found] = found_of()
    assert found.verdict == "passed"
    slope, meant = (float(each.rstrip(":,")) for each in found.text.split() if each.rstrip(":,")[-1].isdigit())
    assert slope == pytest.approx(meant, rel=1e-5)


class ZeroGate(Net):
    """A residual branch that begins at 0: the last ReLU's inputs are exactly 0 where the first one's are negative."""

    def __init__(self, twice):
        super().__init__()
        self.gate, self.twice = nn.Parameter(torch.zeros(8)), twice

    def forward(self, x):
        x = F.relu(self.first(x))
        x = x + x.detach() if self.twice else x
        return self.second(F.relu(x + self.gate * x.roll(1, 1)))


def test_a_loss_with_a_kink_at_the_weights_is_compared_beside_them():
    [found] = found_of(model=lambda: ZeroGate(twice=False))
    assert found.verdict == "passed"
    assert found.text.endswith("with the weights moved by 1%, as the loss is not smooth where they are")
    [found] = found_of(model=lambda: ZeroGate(twice=True))
    assert found.verdict == "note"
    assert "a part is detached" in found.text


@pytest.mark.parametrize("init_scale", [2.0**4, 2.0**16])
def test_the_loss_scale_is_no_larger_than_the_loops_and_is_lowered_until_the_gradient_is_finite(init_scale):
    def loss(model, batch):
        with torch.autocast("cpu", torch.float16):
            return 1e3 * F.mse_loss(model(batch[0]).float(), 4 * batch[1])  # its gradient is above 64

    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    found = found_of(loss=loss, precision="fp16", scaler=scaler)
    assert [each.verdict for each in found] == ["passed", "passed"]


def test_an_autograd_function_is_found():
    [found] = faults_of(lambda net, x: HalfSwish.apply(x))
    assert "HalfSwish" in found.places


# ---- recomputation


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_with_other_dropout_is_found(reentrant):
    def between(net, x, **options):
        return checkpoint(net.drop, x, use_reentrant=reentrant, **options)

    assert not faults_of(between)
    [found] = faults_of(lambda net, x: between(net, x, preserve_rng_state=False))
    assert found.places == ("drop",)
    assert "does not repeat the forward pass of drop" in found.text
    assert found.line.rpartition(":")[0] == __file__
    assert "preserve_rng_state=True" in found.fix


def test_recomputation_that_draws_from_an_own_generator_is_found():
    def noisy(net, x):
        if not hasattr(net, "generator"):
            net.generator = torch.Generator().manual_seed(1)
        return x * torch.rand(x.shape, generator=net.generator)

    assert [each.verdict for each in found_of(noisy)] == ["passed"]
    [found] = faults_of(lambda net, x: checkpoint(lambda each: noisy(net, each), x, use_reentrant=False))
    assert "generator" in found.fix


# ---- the compiler


def compiled(change):
    """Returns parts of a loop whose model is compiled by a backend that may replace functions."""

    def backend(graph, _):
        for node in graph.graph.nodes:
            node.target = change.get(node.target, node.target)
        graph.recompile()
        return graph.forward

    def loss(model, batch):
        return F.mse_loss(torch.compile(model, backend=backend)(batch[0]), batch[1])

    return {"loss": loss, "compiled": True}


@pytest.mark.parametrize("between", [lambda net, x: F.gelu(x), lambda net, x: net.drop(F.gelu(x))])
def test_a_compiler_that_changes_the_loss_is_found(between):
    torch.compiler.reset()
    assert not faults_of(between, **compiled({}))
    torch.compiler.reset()
    [found] = faults_of(between, **compiled({F.gelu: F.silu}))
    assert "the compiled model computes another gradient than the plain one" in found.text
    assert "first.weight" in found.places


class DropPath(nn.Module):
    """Drops whole rows by numbers that it draws itself, in training mode."""

    def forward(self, x):
        return x * torch.bernoulli(torch.full((len(x), 1), 0.5)) if self.training else x


def test_a_compiled_model_that_draws_numbers_of_its_own_is_compared_in_eval_mode():
    def between(net, x):
        return net.path(F.gelu(x))

    def model():
        net = Net(between)
        net.path = DropPath()
        return net

    torch.compiler.reset()
    assert not faults_of(model=model, **compiled({}))
    torch.compiler.reset()
    [found] = faults_of(model=model, **compiled({F.gelu: F.silu}))
    assert "the compiled model computes another gradient than the plain one" in found.text


# ---- parameters without gradient


@pytest.mark.parametrize(
    "between",
    [
        lambda net, x: x.detach(),
        lambda net, x: F.linear(torch.ones(len(x), 6), net.first.weight.data, net.first.bias.data),
    ],
)
def test_a_parameter_that_is_cut_off_is_found(between):
    [found] = faults_of(between)
    assert found.places == ("first.weight", "first.bias")
    assert "the loss depends on first.weight, first.bias, but their gradient is missing or 0" in found.text
    assert "requires_grad_(False)" in found.fix


def test_a_module_under_no_grad_is_found_with_the_line_that_calls_it():
    class Silent(Net):
        def forward(self, x):
            with torch.no_grad():
                x = self.first(x)  # here
            return self.second(x)

    [found] = faults_of(model=Silent)
    file, _, line = found.line.rpartition(":")
    assert file == __file__
    assert "# here" in linecache.getline(file, int(line))


def test_a_parameter_that_the_loss_does_not_depend_on_is_not_found():
    def zero_head():
        net = Net()
        nn.init.zeros_(net.second.weight)
        return net

    assert [each.verdict for each in found_of(model=zero_head)] == ["passed"]


class Networks(nn.Module):
    """Two networks."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 1)


def test_a_network_that_another_loss_of_the_step_trains_is_not_found():
    def critic(model, batch):
        return model.two(model.one(batch[0]).detach()).square().mean()

    def step(net, optimizers, loss):
        calls = []

        def step(batch):
            calls.append(batch)
            optimizers[1].zero_grad()
            loss(batch).backward()
            optimizers[1].step()
            if len(calls) % 5 == 0:
                optimizers[0].zero_grad()
                net.two(net.one(batch[0])).mean().backward()
                optimizers[0].step()

        return step

    def optimizers(net):
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net.one, net.two)]

    assert not faults_of(model=Networks, loss=critic, step=step, optimizers=optimizers)
    never = faults_of(model=Networks, loss=critic, optimizers=lambda net: optimizers(net)[::-1])
    assert [each.places for each in never] == [("one.weight", "one.bias")]


def test_a_target_network_is_only_noted():
    class Target(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Linear(6, 4)
            self.target, self.head = copy.deepcopy(self.online), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                wanted = self.target(x + 0.1)
            return (self.head(self.online(x)) - wanted).square().mean()

    found = found_of(model=Target, loss=lambda model, batch: model(batch[0]))
    assert [each.verdict for each in found] == ["note", "passed"]
    assert "target.weight, target.bias, which get no gradient: they are copies" in found[0].text


# ---- the whole gradient


def test_a_detach_that_may_be_meant_is_only_noted():
    [found] = found_of(lambda net, x: x + (x.round() - x).detach())
    assert found.verdict == "note"
    assert "straight-through" in found.text


def test_code_that_turns_to_fp32_or_mixes_is_compared_in_fp64():
    other = nn.Linear(8, 8)  # not the model's own, so that it stays in fp32

    def between(net, x):
        return other(x.float()).to(torch.float32).softmax(1, dtype=torch.float32)

    [found] = found_of(between)
    assert found.verdict == "passed"


def test_low_precision_is_compared_with_fp32():
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return squared(model, batch)

    found = found_of(loss=loss, precision="bf16")
    assert [each.verdict for each in found] == ["passed", "passed"]
    assert "in bf16 has cosine" in found[0].text


def test_a_loss_that_is_not_finite_is_not_checked():
    [found] = found_of(loss=lambda model, batch: squared(model, batch) * torch.inf)
    assert found.verdict == "not checked"
