"""What the machine is: devices by name, bf16 and TF32 by what the hardware has."""

import json
from types import SimpleNamespace

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.machine import hardware

CPU, CARD = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def cards(monkeypatch):
    """A machine with so many cards of a compute capability, of which the second is the current one."""

    def cards(count, capability=(8, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
        major, minor = capability
        facts = SimpleNamespace(total_memory=16 * 2**30, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)

    return cards


def flags(monkeypatch, *names):
    """A CPU with these feature flags."""
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(names))


# ---- the device


def test_auto_takes_the_current_card_and_else_the_cpu(cards):
    cards(2)
    assert hardware.pick("auto") == torch.device("cuda", 1)
    cards(0)
    assert hardware.pick("auto") == CPU


def test_a_device_is_taken_by_its_name(cards):
    cards(2)
    assert hardware.pick("cpu") == CPU
    assert hardware.pick("cuda") == torch.device("cuda", 0)
    assert hardware.pick("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(("wanted", "count"), [("cuda", 0), ("cuda:2", 2)])
def test_a_card_that_is_not_there_is_refused_with_how_many_there_are(cards, wanted, count):
    cards(count)
    with pytest.raises(ConfigError, match=f"device={wanted}: this machine has {count} CUDA devices"):
        hardware.pick(wanted)


@pytest.mark.parametrize("wanted", ["gpu", "cuda:x", "cuda:-1", "", "mps"])
def test_what_is_no_device_is_refused(cards, wanted):
    cards(2)
    with pytest.raises(ConfigError, match=f"device={wanted} is not a device: use auto, cpu, cuda or cuda:0"):
        hardware.pick(wanted)


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
