"""What a run uses of its machine: FLOPs counted equal the formula, peaks are the card's, memory is of this run."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import stabletrain.trainer.stages
from stabletrain.config.make import make
from stabletrain.machine.usage import Usage, flops_per_sample, peak_flops
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.contract import cost, make_model
from stabletrain.trainer.loop import train
from tests.runs import ROOT, TINY_GPT, composed

GPT = ["model.n_layer=3", "model.n_embd=32", "model.n_head=4", "data.block_size=24", "device=cpu"]


@pytest.mark.parametrize("more", [[], ["model.mlp=swiglu"], ["softcap=gemma2", "qknorm=layernorm"]], ids=" ".join)
def test_a_gpts_flops_a_token_are_palms_formula(more):
    with composed(*GPT, *more) as cfg:
        data = make(cfg, "data")
        model = make_model(cfg, data)
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("embedding")
    )
    assert cost(model, data) == 6 * matrices + 12 * 3 * 32 * 24


def test_an_images_flops_are_three_times_those_of_its_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 10))
    convolution, linear = 2 * (3 * 9 * 8) * 16, 2 * 8 * 16 * 10
    assert flops_per_sample(model, torch.zeros(1, 3, 4, 4)) == 3 * (convolution + linear)


def test_counting_leaves_the_model_and_randomness_as_they_were():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
            self.seen = None

        def forward(self, x):
            self.seen = self.inner(x)
            return self.seen

    model = Remembers()
    before, drawn = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    assert flops_per_sample(model, torch.zeros(1, 4)) == 3 * 2 * 16
    assert model.seen is None
    assert model.training
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert torch.equal(drawn, torch.random.get_rng_state())


def test_a_model_that_asks_for_values_has_no_flops():
    class Asks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.sum())

    assert flops_per_sample(Asks(4, 4), torch.zeros(1, 4)) is None


@pytest.mark.parametrize(
    ("card", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156e12),
        ("NVIDIA H100 80GB HBM3", "bf16_params", 989e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "tf32", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA H200 NVL", "bf16", None),
        ("cpu", "bf16", None),
    ],
)
def test_a_peak_is_that_of_the_very_card_or_unknown(card, precision, peak):
    assert peak_flops(card, precision) == peak


def test_utilisation_is_work_over_what_the_cards_could_do():
    metrics = Usage(torch.device("cpu"), flops_per_unit=6e6, peak=2 * 312e12).metrics(1e7)
    assert metrics["throughput/mfu"] == pytest.approx(6e13 / 624e12)


@pytest.mark.slow
def test_the_peak_memory_of_a_run_does_not_count_what_was_freed_before_it():
    """Nor what the process held that started it: it has one of its own, started by this one, which is larger."""
    subprocess.run([sys.executable, "-c", PEAKS], cwd=ROOT, check=True)


PEAKS = """
import torch
from stabletrain.machine.usage import forget_peak, peak_bytes

device = torch.device("cpu")
before = torch.ones(50_000_000)  # 200 MB, touched
with_it = peak_bytes(device)
del before
forget_peak(device)
assert peak_bytes(device) < with_it - 150_000_000
again = torch.ones(50_000_000)
assert peak_bytes(device) > with_it - 50_000_000
assert len(again)
"""


def trained(folder, monkeypatch=None, peak=None):
    if peak is not None:
        monkeypatch.setattr(stabletrain.trainer.stages, "peak_flops", lambda card, precision: peak)
    with composed(*TINY_GPT, "steps=4", "log_every=2", "checkpoint=off", "guard=off") as cfg:
        train(build(cfg, folder))
    return json.loads((folder / "run.json").read_text()), read_jsonl(folder / "metrics.jsonl")


def test_a_run_on_a_cpu_records_memory_and_parameters_and_invents_no_utilisation(tmp_path):
    record, lines = trained(tmp_path)
    assert 0.05 < record["final"]["memory/peak_gb"] < 10
    assert all("memory/peak_gb" in line for line in lines if "train/loss" in line)
    assert record["model"] == {"parameters": 14416}
    assert not any("mfu" in name for line in [*lines, record["final"]] for name in line)


def test_where_the_peak_is_known_every_logged_line_and_the_record_have_the_utilisation(tmp_path, monkeypatch):
    record, lines = trained(tmp_path, monkeypatch, peak=1e9)
    assert record["model"] == {"parameters": 14416, "flops_per_token": 67584.0, "peak_flops": 1e9}
    for line in [line for line in lines if "train/loss" in line] + [record["final"]]:
        assert line["throughput/mfu"] == pytest.approx(line["tokens_per_s"] * 67584 / 1e9)
