"""What the machine is: devices by name, bf16 and TF32 by what the hardware has."""

import copy
import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import stabletrain.trainer.stages
from stabletrain.config.make import Choice
from stabletrain.errors import ConfigError, WrongCard
from stabletrain.machine import hardware
from stabletrain.machine.hardware import Usage, flops_per_sample, peak_flops
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.contract import cost, make_model
from stabletrain.trainer.loop import train
from stabletrain.trainer.options import ForwardOptions, read
from tests.devices import CARD as DEVICE
from tests.runs import ROOT, TINY_GPT, composed

CPU, CARD = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def cards(monkeypatch):
    """A machine with so many cards of a compute capability; returns the devices that become the current one."""

    def cards(count, capability=(8, 0)):
        current = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
        major, minor = capability
        facts = SimpleNamespace(total_memory=16 * 2**30, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        return current

    return cards


def flags(monkeypatch, *names):
    """A CPU with these feature flags."""
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(names))


# ---- the load


def test_the_load_is_counted_per_core_that_may_be_used(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 1.0, 1.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    assert hardware.load_and_cores() == (3.5, 3)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "getloadavg", lambda: (_ for _ in ()).throw(OSError))
    assert hardware.load_and_cores() == (0.0, os.cpu_count())


# ---- the device


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize("local_rank", [0, 3])
def test_a_rank_takes_its_own_card_and_makes_it_the_current_one(cards, wanted, local_rank):
    current = cards(4)
    assert hardware.choose_device(wanted, local_rank, 4) == torch.device("cuda", local_rank)
    assert current == [torch.device("cuda", local_rank)]


def test_auto_takes_the_cpu_where_there_is_no_card(cards):
    cards(0)
    assert hardware.choose_device("auto") == hardware.choose_device("auto", 1, 2) == CPU


def test_a_device_is_taken_by_its_name(cards):
    current = cards(2)
    assert hardware.choose_device("cpu", 5, 8) == CPU, "any number of ranks can use a CPU"
    assert not current, "which leaves CUDA alone"
    assert hardware.choose_device("cuda") == torch.device("cuda", 0)
    assert hardware.choose_device("cuda:1") == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize("rank", [0, 2], ids=lambda rank: f"rank {rank}")
def test_more_ranks_than_cards_are_refused_on_every_rank(cards, monkeypatch, wanted, rank):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    current = cards(2)
    with pytest.raises(ConfigError) as refusal:
        hardware.choose_device(wanted, rank, 3)
    assert str(refusal.value) == (
        f"device={wanted}: 3 ranks on this machine, but 2 visible CUDA devices: each rank needs its own; use torchrun "
        "--nproc_per_node=2, or make all GPUs of the machine visible to every rank (with Slurm: one task per node, as "
        "slurm/job.sh does), or use device=cpu"
    )
    assert not current


def test_ranks_that_see_one_card_each_are_told_what_they_see(cards, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    cards(1)
    with pytest.raises(ConfigError, match=r"4 ranks .*, but 1 visible CUDA device \(CUDA_VISIBLE_DEVICES=3\):"):
        hardware.choose_device("auto", 3, 4)


@pytest.mark.parametrize("wanted", ["auto", "cuda", "cuda:1"])
def test_a_card_that_the_build_of_pytorch_does_not_support_is_refused(cards, monkeypatch, wanted):
    cards(2, (7, 0))
    reason = "Some Card has compute capability 7.0, .* not compiled for: it has sm_75, sm_80, sm_90; .*whl/cu126; "
    with pytest.raises(WrongCard, match=f"device={wanted}: {reason}or train on the CPU with device=cpu"):
        hardware.choose_device(wanted)
    assert hardware.choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_75"])
    assert hardware.choose_device("cuda:1") == CARD


def test_pytorchs_own_warning_about_the_build_is_not_printed_too(cards, monkeypatch):
    cards(1, (7, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: warnings.warn("Found GPU0 ...", stacklevel=2))
    with pytest.raises(ConfigError), warnings.catch_warnings(record=True) as printed:
        hardware.choose_device("auto")
    assert not printed


@pytest.mark.parametrize("device", [DEVICE])
def test_the_device_of_this_machine_is_supported_and_current(device):
    assert hardware.choose_device(device) == torch.device("cuda", 0)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(("wanted", "count"), [("cuda", 0), ("cuda:2", 2)])
def test_a_card_that_is_not_there_is_refused_with_how_many_there_are(cards, wanted, count):
    cards(count)
    with pytest.raises(ConfigError, match=f"device={wanted}: this machine has {count} CUDA devices"):
        hardware.choose_device(wanted)


@pytest.mark.parametrize("wanted", ["gpu", "cuda:x", "cuda:-1", "", "mps", "auto:1"])
def test_what_is_no_device_is_refused(cards, wanted):
    cards(2)
    with pytest.raises(ConfigError, match=f"device={wanted} is not a device: use auto, cpu, cuda or cuda:0"):
        hardware.choose_device(wanted)


# ---- number formats


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_card_has_bf16_and_tf32_from_capability_8(cards, monkeypatch, capability, has):
    cards(2, capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert hardware.has_bf16(CARD) is has
    assert hardware.has_tf32(CARD) is has
    major, minor = capability
    verdict = "has bf16" if has else "has no bf16"
    assert hardware.bf16_reason(CARD) == f"Some Card (compute capability {major}.{minor}) {verdict}"


def test_an_amd_card_has_no_tf32(cards, monkeypatch):
    cards(2, (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not hardware.has_tf32(CARD)


@pytest.mark.parametrize(
    ("names", "has", "reason"),
    [
        ([], False, "this CPU has no bf16 instructions"),
        (["avx512f"], False, "this CPU has no bf16 instructions"),
        (["avx512_bf16"], True, "this CPU has AVX512-BF16"),
        (["amx_bf16", "avx512_bf16"], True, "this CPU has AMX"),
    ],
)
def test_a_cpu_has_bf16_by_its_flags_and_never_tf32(monkeypatch, names, has, reason):
    flags(monkeypatch, *names)
    assert hardware.has_bf16(CPU) is has
    assert hardware.bf16_reason(CPU) == reason
    assert not hardware.has_tf32(CPU)


def test_a_cpus_flags_are_those_linux_names(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    read = hardware.cpu_flags.__wrapped__
    monkeypatch.setattr("builtins.open", lambda path, real=open: real(info))
    info.write_text("processor : 0\nflags\t\t: fpu sse2 avx512_bf16\nbugs : none\nflags : other\n")
    assert read() == {"fpu", "sse2", "avx512_bf16"}
    info.write_text("processor : 0\n")
    assert read() == frozenset()
    info.unlink()
    assert read() == frozenset()


# ---- in words


def test_threads_are_counted():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert hardware.threads() == "1 thread"
        torch.set_num_threads(2)
        assert hardware.threads() == "2 threads"
    finally:
        torch.set_num_threads(before)


def test_what_is_recorded_can_be_written_as_json(cards, monkeypatch):
    flags(monkeypatch, "amx_bf16")
    cpu = json.loads(json.dumps(hardware.describe(CPU)))
    assert (cpu["device"], cpu["name"], cpu["cpu_bf16"]) == ("cpu", "cpu", True)
    assert "memory_gib" not in cpu
    cards(2, (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90000)
    card = json.loads(json.dumps(hardware.describe(CARD)))
    assert (card["device"], card["name"], card["memory_gib"], card["capability"]) == (
        "cuda:1",
        "Some Card",
        16.0,
        "9.0",
    )


GPT = ["model.n_layer=3", "model.n_embd=32", "model.n_head=4", "data.block_size=24", "device=cpu"]


@pytest.mark.parametrize(
    "more",
    [[], ["model.mlp=swiglu"], ["softcap=gemma2", "qknorm=layernorm"], ["softmax=sink", "attention_gate=sigmoid"]],
    ids=" ".join,
)
def test_a_gpts_flops_a_token_are_palms_formula(more):
    with composed(*GPT, *more) as cfg:
        options, data = read(ForwardOptions, cfg), Choice.of(cfg, "data").build()
        model = make_model(options.model, data, options.objective)
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("embedding")
    )
    assert cost(model, data) == ((6 * matrices + 12 * 3 * 32 * 24) * 24, 24)


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
        ("NVIDIA H100 80GB HBM3", "fp8", 1979e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
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
    """In a process of its own, started by this larger one, whose memory must not count."""
    subprocess.run([sys.executable, "-c", PEAKS], cwd=ROOT, check=True)


PEAKS = """
import torch
from stabletrain.machine.hardware import reset_peak, peak_bytes

device = torch.device("cpu")
before = torch.ones(50_000_000)  # 200 MB, touched
with_it = peak_bytes(device)
del before
reset_peak(device)
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
