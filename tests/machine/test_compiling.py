"""A compiled model: tried without side effects, compiled for one shape only, eager again if it cannot be compiled."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.config.checks import check
from stabletrain.errors import ConfigError
from stabletrain.machine import compiling
from stabletrain.machine.compiling import compiled_shape, should_compile, try_compiled, uncompiled
from stabletrain.trainer.build import build
from stabletrain.trainer.parts import warm_up_compiled as tried
from tests.devices import CARD
from tests.machine.given import LAYOUTS, POOLINGS
from tests.runs import TINY_GPT, composed


class Worn(nn.Module):
    """A model with statistics, dropout and Python's own randomness, whose annotations nothing checks."""

    def __init__(self, width=8):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.5)
        self.norm, self.frozen = nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def forward(self, inputs):
        return self.dropout(self.frozen(self.norm(self.linear(inputs))))


class Scattering(nn.Module):
    """A model with the two gradients that are scattered: of a look-up, and of pooling over windows that overlap."""

    def __init__(self):
        super().__init__()
        self.table, self.pool = nn.Embedding(16, 64), nn.MaxPool2d(3, 2, 1)

    def forward(self, inputs):
        return self.pool(self.table(inputs).unflatten(-1, (8, 8)))


class Table(nn.Module):
    """A model of one look-up. PyTorch 2.11 does not compile its own modules by themselves."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, inputs):
        return self.table(inputs)


def proved(model, inputs):
    return try_compiled(model, inputs.shape, lambda: model(inputs).square().sum(), lambda loss: loss.backward())


@pytest.fixture
def compiled(monkeypatch):
    """The graphs that were compiled, by a compiler that leaves them as they are."""
    graphs = []

    def leave(graph, inputs):
        graphs.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(compiling, "inductor", leave)
    yield graphs
    torch.compiler.reset()


def state_of(model):
    """All that a trial might touch, by name, as plain values."""
    found = {name: value.tolist() for name, value in model.state_dict().items()}
    found |= {f"{name}.grad": None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()}
    found |= {f"{name}.training": module.training for name, module in model.named_modules()}
    # not Python's own generator: the tests' shape checks draw from it
    return found | {"torch": torch.get_rng_state().tolist(), "numpy": str(np.random.get_state())}


def test_the_trial_leaves_no_trace(compiled):
    torch.manual_seed(0)
    model, inputs = Worn(), torch.randn(4, 8)
    model.frozen.eval()
    model.linear.weight.grad = torch.ones(8, 8)
    before = state_of(model)
    seconds, why = proved(model, inputs)
    assert (why, compiled_shape(model), len(compiled)) == ("", (4, 8), 1)
    assert seconds > 0
    after = state_of(model)
    assert [name for name in before if after[name] != before[name]] == []


def test_only_training_passes_of_the_shape_are_compiled(compiled):
    model, inputs = Worn(), torch.randn(4, 8)
    proved(model, inputs)
    for other in (2, 3, 5):
        model(torch.randn(other, 8)).sum().backward()
    model.eval()
    model(inputs)
    model.train()
    with torch.no_grad():
        model(inputs)
    with uncompiled():
        model(inputs)
    assert len(compiled) == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        model(inputs).sum().backward()


@pytest.mark.slow(unless=lambda device: device == "cuda")
@pytest.mark.parametrize("device", ["cpu", CARD])
def test_no_gradient_is_summed_in_the_order_in_which_threads_come(device):
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    model, inputs = Scattering().to(device), torch.randint(16, (64, 16)).to(device)  # enough for two threads
    with config.patch({"fx_graph_cache": False, "cpp.threads": 2}):
        (_, why), codes = run_and_get_code(proved, model, inputs)
    torch.compiler.reset()
    assert why == ""
    assert len(codes) == 2  # forward, and backward
    assert [code.count(way) for code in codes for way in ("atomic_add(", "scatter")] == [0, 0, 0, 0]
    assert "aten.embedding_dense_backward" in codes[1]


class Pooling(nn.Module):
    """Max-pooling of several kinds, each over a batch of images in one layout."""

    def __init__(self, cases):
        super().__init__()
        self.cases = cases

    def forward(self, inputs):
        return [F.max_pool2d(inputs[layout], **POOLINGS[kind]) for kind, layout in self.cases]


@pytest.mark.slow(unless=lambda device: device == "cuda")
@pytest.mark.parametrize("device", ["cpu", CARD])
def test_compiled_max_pooling_adds_the_windows_of_a_pixel_in_eager_modes_order(device):
    cases = [(kind, layout) for kind in POOLINGS for layout in LAYOUTS]
    cases = cases if device == "cuda" else [cases[n] for n in (0, 7)]  # a compiler takes long for each
    images = {
        layout: torch.randn(4, 6, 26, 29).to(device, memory_format=form).requires_grad_()
        for layout, form in LAYOUTS.items()
    }
    model = Pooling(cases)
    eager, compiled = model(images), torch.compile(model, backend=compiling.inductor, dynamic=False)(images)
    for (_, layout), one, other in zip(cases, eager, compiled, strict=True):
        windows = torch.randn_like(one)
        gradients = [torch.autograd.grad(x, images[layout], windows, retain_graph=True)[0] for x in (one, other)]
        assert torch.equal(*gradients)
    torch.compiler.reset()


@pytest.mark.slow
def cache_hits(run):
    """Returns how often code is found in PyTorch's caches while `run` compiles."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    run()
    return sum(
        counters[part][name]
        for part, name in (("aot_autograd", "autograd_cache_hit"), ("inductor", "fxgraph_cache_hit"))
    )


@pytest.mark.slow
def test_the_same_model_is_compiled_once_for_later_processes_and_never_taken_from_a_plain_one():
    from torch._inductor.utils import fresh_cache

    inputs = torch.arange(8).view(2, 4)

    def plain():
        model = Table()
        with torch._inductor.config.patch(deterministic=True):
            model.compile(dynamic=False)
            model(inputs).square().sum().backward()

    def ours():
        assert proved(Table(), inputs)[1] == ""

    with fresh_cache():
        assert [cache_hits(plain), cache_hits(plain) > 0] == [0, True]
        assert cache_hits(ours) == 0, "its embedding's gradient is summed in another order"
        assert cache_hits(ours) > 0
    torch.compiler.reset()


def test_the_seconds_of_earlier_compilations_are_still_known(compiled):
    from torch._dynamo.utils import compilation_time_metrics as metrics

    took = []
    for _ in range(2):
        proved(Worn(), torch.randn(4, 8))
        took.append([*metrics["_compile.compile_inner"]])
    assert took[1][: len(took[0])] == took[0]
    assert len(took[1]) > len(took[0]) > 0


def test_a_late_run_of_a_process_is_compiled_as_the_first_was(compiled):
    """By default PyTorch silently runs eagerly after eight recompilations."""
    for number in range(12):
        width = 4 + number
        model, inputs = Worn(width), torch.randn(4, width)
        proved(model, inputs)
        assert len(compiled) == number + 1


def test_what_cannot_be_compiled_is_plain_again_and_says_why(compiled, monkeypatch):
    def refuse(graph, inputs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compiling, "inductor", refuse)
    model, inputs = Worn(), torch.randn(4, 8)
    _, why = proved(model, inputs)
    assert "no C++ compiler" in why
    assert model._compiled_call_impl is None
    model(inputs).sum().backward()


def test_a_rank_goes_by_what_another_has_met(compiled):
    model, inputs = Worn(), torch.randn(4, 8)
    _, why = try_compiled(
        model, inputs.shape, lambda: model(inputs).sum(), lambda loss: loss.backward(), lambda here: True
    )
    assert why == "it failed on another rank"
    assert model._compiled_call_impl is None


def test_a_mistake_of_the_model_is_told_as_its_own(compiled):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        proved(Worn(), torch.randn(4, 9))


def test_auto_compiles_on_cuda_only():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [should_compile(choice, cpu) for choice in ("auto", True, False)] == [False, True, False]
    assert [should_compile(choice, cuda) for choice in ("auto", True, False)] == [True, True, False]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("compile", value) for value in ("yess", "1", "null")),
        *(("loss_chunk", value) for value in ("0", "some", "true")),
    ],
)
def test_anything_else_is_refused(key, value):
    with (
        composed(*TINY_GPT, f"{key}={value}") as cfg,
        pytest.raises(ConfigError, match=f"{key}={value} is not auto"),
    ):
        check(cfg)


def test_an_empty_batch_cannot_be_tried_and_that_is_said(tmp_path):
    with composed(*TINY_GPT, "checkpoint=off", "report=false") as cfg:
        job = build(cfg, tmp_path)
    job.data.batches.close()
    empty = job.data.load(0).rows(slice(0))
    facts, told = tried(job.state, empty, job.tools, must=False, any_rank=bool)
    assert facts == {"compiled": False}
    assert "the trial batch is empty; training continues uncompiled" in told
    with pytest.raises(ConfigError, match=r"compile=true: .*the trial batch is empty"):
        tried(job.state, empty, job.tools, must=True, any_rank=bool)
