"""What a run's GPUs use, counted by an NVML that is a stand-in: two cards, with an energy counter each."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from stabletrain.beside.card_meter import CardMeter

CPU, CARD = torch.device("cpu"), torch.device("cuda", 1)


class NVMLError(Exception):
    """As pynvml's."""


@pytest.fixture
def nvml(monkeypatch):
    """A module `pynvml` with `energy` (mJ) and `busy` (%) by UUID, and a list `asked` of the calls."""
    module = ModuleType("pynvml")
    module.energy = {"GPU-a0": 10**12, "GPU-a1": 2 * 10**12}
    module.busy = {"GPU-a0": 100, "GPU-a1": 50}
    module.asked = []

    def ask(name, numbers):
        def asked(card):
            module.asked.append(name)
            if card not in numbers:
                raise NVMLError("not supported")
            return numbers[card]

        return asked

    module.NVMLError = NVMLError
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetTotalEnergyConsumption = ask("energy", module.energy)
    module.nvmlDeviceGetUtilizationRates = lambda card: SimpleNamespace(gpu=ask("busy", module.busy)(card))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(uuid=f"a{card.index}"))
    return module


def test_energy_is_what_the_counter_gained_and_utilization_the_mean_of_the_samples(nvml):
    meter = CardMeter(CARD, 1, 1)
    nvml.energy["GPU-a1"] += 7_200_000_000  # mJ, which are 2 kWh
    nvml.energy["GPU-a0"] += 10**12  # the other card of the machine
    meter.sample()
    nvml.busy["GPU-a1"] = 100
    meter.sample()
    assert meter.metrics() == {"gpu/energy_kwh": 2.0, "gpu/utilization": 0.75}
    assert meter.facts()["gpus"] == 1


def test_the_main_process_measures_all_gpus_of_its_machine(nvml):
    meter = CardMeter(torch.device("cuda", 0), 2, 2)
    nvml.energy["GPU-a0"] += 3_600_000_000
    nvml.energy["GPU-a1"] += 3_600_000_000
    meter.sample()
    assert meter.metrics() == {"gpu/energy_kwh": 2.0, "gpu/utilization": 0.75}
    assert meter.facts()["gpus"] == 2


def test_runs_that_share_a_gpu_count_a_part_of_it_and_of_its_energy(nvml, monkeypatch):
    monkeypatch.setenv("STABLETRAIN_PACKED", "4")
    meter = CardMeter(CARD, 1, 1)
    nvml.energy["GPU-a1"] += 3_600_000_000
    assert meter.metrics() == {"gpu/energy_kwh": 0.25}
    assert meter.facts()["gpus"] == 0.25


@pytest.mark.parametrize("device_and_ranks", [(CPU, 1, 1), (CPU, 2, 2), (torch.device("cuda", 0), 4, 2)], ids=str)
def test_on_a_cpu_and_over_several_machines_nvml_is_not_asked(nvml, device_and_ranks):
    meter = CardMeter(*device_and_ranks)
    meter.sample()
    assert (meter.metrics(), nvml.asked) == ({}, [])
    assert meter.facts()["gpus"] == (4 if device_and_ranks[0].type == "cuda" else 0)


def test_what_nvml_does_not_know_is_left_out(nvml, monkeypatch):
    del nvml.energy["GPU-a1"]  # such as a card older than Volta
    meter = CardMeter(CARD, 1, 1)
    meter.sample()
    assert meter.metrics() == {"gpu/utilization": 0.5}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    meter = CardMeter(CARD, 1, 1)
    meter.sample()
    assert meter.metrics() == {}


def test_the_slurm_job_is_recorded_with_the_task_of_its_array(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert "slurm" not in CardMeter(CPU, 1, 1).facts()
    monkeypatch.setenv("SLURM_JOB_ID", "19")
    assert CardMeter(CPU, 1, 1).facts()["slurm"] == {"job": "19"}
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert CardMeter(CPU, 1, 1).facts()["slurm"] == {"job": "19", "array": "17", "task": "2"}
