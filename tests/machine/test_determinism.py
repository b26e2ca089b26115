"""Randomness by number: the same (seed, step) draws the same, whatever was drawn before."""

import os
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stabletrain.config.checks import check
from stabletrain.errors import ConfigError
from stabletrain.machine.compiling import inductor
from stabletrain.machine.determinism import Off, Seeded, Strict, may_measure, mix
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.devices import CARD
from tests.machine.given import LAYOUTS, POOLINGS
from tests.reliability.ends import metrics
from tests.runs import TINY_GPT, TINY_RESNET, command, composed


def draw():
    return torch.rand(4).tolist(), np.random.rand(4).tolist(), [random.random() for _ in range(4)]


def test_a_seeded_step_draws_the_same_whatever_went_before():
    seeded = Seeded()
    seeded.seed_step(3, 17)
    first = draw()
    draw()
    seeded.seed_step(3, 17)
    assert draw() == first


def test_a_step_draws_what_a_run_of_its_mixed_seed_draws():
    Seeded().seed_step(3, 17)
    first = draw()
    Seeded().seed_run(mix(3, 17) >> 1)
    assert draw() == first


def test_seeds_and_steps_all_draw_differently():
    seen = set()
    for seed in range(20):
        for step in range(50):
            Seeded().seed_step(seed, step)
            seen.add(torch.rand(()).item())
    assert len(seen) > 990
    assert len({mix(seed, step) for seed in range(100) for step in range(100)}) == 10_000


def test_off_leaves_the_generator_where_it_is():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    Off().seed_run(1)
    Off().seed_step(1, 2)
    assert torch.equal(torch.rand(2), expected)


def test_strict_refuses_what_has_no_deterministic_form_and_seeded_lifts_that_again():
    switches = Strict().prepare()
    assert switches["use_deterministic_algorithms"]
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
    Seeded().prepare()
    assert not torch.are_deterministic_algorithms_enabled()


def switches():
    """PyTorch's current values of all switches that strict sets."""
    return {
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def test_what_is_logged_is_what_holds(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.backends.cudnn.benchmark = True
    strict = Strict().prepare()
    assert strict == switches()
    assert strict == {
        "use_deterministic_algorithms": True,
        "fill_uninitialized_memory": True,
        "cudnn.deterministic": True,
        "cudnn.benchmark": False,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert torch.empty(5).isnan().all(), "uninitialised memory is a NaN, not a chance"
    seeded = Seeded().prepare()
    assert seeded == switches()
    assert not any(seeded[key] for key in seeded if key != "CUBLAS_WORKSPACE_CONFIG")


def test_only_off_lets_speed_choose_the_kernels_and_the_next_run_undoes_it(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    found = []
    for kind in (Off, Seeded, Off, Strict, Seeded):
        logged = kind().prepare()
        assert logged == switches()
        found.append((logged["cudnn.benchmark"], may_measure()))
    assert found == [(True, True), (False, False), (True, True), (False, False), (False, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "deterministic"), [(Off, False), (Seeded, True)])
def test_off_drops_the_compilers_deterministic_mode(monkeypatch, kind, deterministic):
    from torch._inductor import compile_fx

    given = {}
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *_, **named: given.update(named))
    kind().prepare()
    try:
        inductor(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph()), [])
    finally:
        Seeded().prepare()
    assert given["config_patches"]["deterministic"] is deterministic


def test_a_strict_run_after_a_seeded_one_finds_the_workspace(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    Seeded().prepare()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert Strict().prepare()["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_strict_is_refused_where_cublas_would_not_follow(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG=:0:0.*use :4096:8 or :16:8"):
        Strict().prepare()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA has started without.*set CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        Strict().prepare()
    assert not torch.are_deterministic_algorithms_enabled(), "a refusal sets nothing"


def summed_in_order(windows, chosen, shape):
    """Returns the gradient of max-pooling: `windows`, each added to the pixel that it chose, row by row.

    Within a plane one window is added at a time, so the order of the sums is fixed.
    """
    planes = torch.arange(shape[0] * shape[1], device=windows.device)
    windows, chosen = (x.flatten(0, 1).flatten(1) for x in (windows, chosen))
    pixels = torch.zeros(len(planes), shape[2] * shape[3], device=windows.device)
    for window in range(windows.shape[1]):
        pixels[planes, chosen[:, window]] += windows[:, window]
    return pixels.view(shape)


@pytest.mark.parametrize("device", ["cpu", CARD])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_max_pooling_adds_the_windows_of_a_pixel_in_a_fixed_order_in_strict(device, layout, pooling):
    """PyTorch's list of deterministic operations does not mention it: its kernels use no atomics."""
    Strict().prepare()
    torch.manual_seed(0)
    images = torch.randn(8, 6, 26, 29).to(device, memory_format=LAYOUTS[layout]).requires_grad_()
    pooled, chosen = F.max_pool2d(images, return_indices=True, **POOLINGS[pooling])
    windows = torch.randn(pooled.shape).to(device, memory_format=LAYOUTS[layout])
    expected = summed_in_order(windows, chosen, images.shape)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(F.max_pool2d(images, **POOLINGS[pooling]), images, windows)
        assert torch.equal(gradient, expected)
    backwards = summed_in_order(windows.flip(2, 3), chosen.flip(2, 3), images.shape)
    assert not torch.equal(backwards, expected), "another order gives other bits"


SMALL = ["steps=4", "log_every=1", "eval_every=4", "checkpoint=off", "determinism=strict"]
MODELS = {
    "gpt": [*TINY_GPT, "model.dropout=0.1"],
    "resnet": [*TINY_RESNET, "model.depth=8"],
}


def trained(folder, *overrides):
    """The bytes of the weights, and the logged lines but for the clock, after a tiny run."""
    with composed(*overrides, *SMALL) as cfg:
        check(cfg)
        job = build(cfg, folder)
        train(job)
    weights = b"".join(v.cpu().contiguous().numpy().tobytes() for v in job.state.model.state_dict().values())
    return weights, metrics(folder)


@pytest.mark.slow(unless=lambda model, precision: (model, precision) == ("resnet", "bf16"))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_strict_runs_are_bitwise_equal_and_another_seed_is_another_run(tmp_path, model, precision):
    chosen = [*MODELS[model], f"precision={precision}"]
    first = trained(tmp_path / "first", *chosen, "seed=1")
    torch.rand(7)
    assert trained(tmp_path / "second", *chosen, "seed=1") == first
    weights, others = trained(tmp_path / "third", *chosen, "seed=2")
    assert weights != first[0]
    assert [line.get("train/loss") for line in others] != [line.get("train/loss") for line in first[1]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_strict_runs_on_a_card_are_bitwise_equal(tmp_path, model, precision):
    logged = []
    for name in ("first", "second"):  # a process each: CUDA must start with the workspace set
        chosen = [*MODELS[model], f"precision={precision}", "device=cuda", *SMALL]
        done = command(*chosen, f"hydra.run.dir={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        logged.append(metrics(tmp_path / name))
    assert logged[0] == logged[1]
