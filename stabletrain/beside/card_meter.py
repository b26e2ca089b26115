"""What a start of a run uses: its GPUs, its Slurm job, and what NVML counts of energy and utilization.

NVML needs the module `pynvml`: pip install nvidia-ml-py. Nothing is read within a step: energy is a counter of the
card, read at the start and at the end, and utilization is read when a step is logged.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from stabletrain.extension import NoMeter

PACKED = "STABLETRAIN_PACKED"
"""Environment variable: how many runs a job trains side by side on its GPU; see `slurm/launch.sh --pack`."""

JOB = {"job": "SLURM_JOB_ID", "array": "SLURM_ARRAY_JOB_ID", "task": "SLURM_ARRAY_TASK_ID"}
"""What is recorded of a Slurm job, and its environment variables. A task of an array has a job's number, too."""


class CardMeter(NoMeter):
    """Measures a run's GPUs from now on. What cannot be measured is left out, as on a CPU or without pynvml.

    Args:
        device: of the main process.
        world_size: number of ranks.
        local_world_size: number of ranks on this machine. NVML knows only its own machine's GPUs, so nothing is
            measured if there are others.
    """

    def __init__(self, device: torch.device, world_size: int, local_world_size: int) -> None:
        on_card = device.type == "cuda"
        self._share = 1 / int(os.environ.get(PACKED, "1"))
        self._gpus = world_size * self._share if on_card else 0
        self._cards = [device] if on_card and world_size == 1 else []
        if on_card and 1 < world_size == local_world_size:
            self._cards = [torch.device("cuda", number) for number in range(world_size)]
        self._busy: list[float] = []
        self._began = self._millijoules()

    def facts(self) -> dict[str, Any]:
        """Returns `gpus`, a fraction if several runs share one, and `slurm` within a job."""
        job = {name: os.environ[variable] for name, variable in JOB.items() if variable in os.environ}
        return {"gpus": self._gpus} | ({"slurm": job} if job else {})

    def sample(self) -> None:
        """Notes how busy the GPUs are now."""
        self._busy += [rates.gpu / 100 for rates in read(self._cards, "nvmlDeviceGetUtilizationRates")]

    def metrics(self) -> dict[str, float]:
        """Returns `gpu/energy_kwh` since the start, and `gpu/utilization`, the mean of the samples, a fraction.

        Of a GPU that runs share, each run counts an equal part of the energy; the utilization is that of the GPU.
        """
        found = {}
        if self._began and (now := self._millijoules()):
            found["gpu/energy_kwh"] = (now - self._began) * self._share / 3.6e9
        if self._busy:
            found["gpu/utilization"] = sum(self._busy) / len(self._busy)
        return found

    def _millijoules(self) -> int:
        """Returns the energy that the GPUs have used since the driver was loaded; 0 if unknown."""
        return sum(read(self._cards, "nvmlDeviceGetTotalEnergyConsumption"))


def read(cards: Sequence[torch.device], function: str) -> list[Any]:
    """Returns what a function of NVML says of each GPU; empty if it does not know one of them."""
    if not cards:
        return []
    try:
        import pynvml  # ty: ignore[import-not-found]
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        # By their UUIDs, since CUDA_VISIBLE_DEVICES may give the GPUs other numbers than NVML does.
        uuids = [f"GPU-{torch.cuda.get_device_properties(card).uuid}" for card in cards]
        return [getattr(pynvml, function)(pynvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]
    except (pynvml.NVMLError, AttributeError):  # no driver, a part of a card (MIG), an old PyTorch
        return []
