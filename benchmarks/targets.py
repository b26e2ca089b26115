"""The targets beside the measured values: met, not met, or why they cannot be measured here.

    python benchmarks/targets.py overhead.json throughput.json ...      one table for all these files

A benchmark passes its values to `judged` and `save` under the targets' names.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import head, row

from stabletrain.data.images import cores_of_this_rank
from stabletrain.machine import hardware


def anywhere(device: torch.device) -> str:
    """Measurable on every machine."""
    del device
    return ""


def card(device: torch.device) -> str:
    """Needs a GPU."""
    return "" if device.type == "cuda" else "no card here"


def cpu_only(device: torch.device) -> str:
    """Needs a CPU, where the host's time is the step's."""
    return "" if device.type == "cpu" else "a CPU's; run with --device cpu"


def hopper(device: torch.device) -> str:
    """Needs an H100 or H200."""
    is_one = device.type == "cuda" and any(name in hardware.name(device) for name in ("H100", "H200"))
    return "" if is_one else "no H100 or H200 here"


def two_cores(device: torch.device) -> str:
    """Needs two cores."""
    del device
    return "" if cores_of_this_rank() > 1 else "one core only"


def bf16_cpu(device: torch.device) -> str:
    """Needs a CPU that computes in bf16."""
    if device.type != "cpu":
        return "a CPU's; run with --device cpu"
    return "" if hardware.has_bf16(device) else hardware.bf16_reason(device)


@dataclass(frozen=True)
class Target:
    """A bound on a measured value.

    Attributes:
        what: description for the table.
        bound: the worst acceptable value.
        at_most: whether lower is better.
        why_not: returns why a device cannot measure it; empty if it can.
    """

    what: str
    bound: float
    at_most: bool
    why_not: Callable[[torch.device], str] = anywhere

    def met(self, value: float) -> bool:
        """Whether `value` is good enough."""
        return value <= self.bound if self.at_most else value >= self.bound


TARGETS = {
    "overhead/gpt": Target("the defaults over a bare loop, GPT", 1.01, True),
    "overhead/resnet": Target("the defaults over a bare loop, ResNet", 1.01, True),
    "overhead/own_gpt": Target("the defaults' own time over a bare step, GPT", 1.01, True, cpu_only),
    "overhead/own_resnet": Target("the defaults' own time over a bare step, ResNet", 1.01, True, cpu_only),
    "own_loop/gpt": Target("Guard's own time over a plain step, GPT", 1.02, True, cpu_only),
    "own_loop/resnet": Target("Guard's own time over a plain step, ResNet", 1.02, True, cpu_only),
    "overhead/waits": Target("what in an ordinary step waits for the card, times", 0, True, card),
    "operations/more": Target("kernels that a guarded step launches beyond a bare loop's, most", 20, True),
    "operations/host_off": Target(
        "host time of a tiny model's step over a bare loop's, guard=off", 1.1, True, cpu_only
    ),
    "operations/host_skip": Target("the same with guard=skip", 1.15, True, cpu_only),
    "operations/host_rollback": Target("the same with guard=rollback and monitors", 1.2, True, cpu_only),
    "throughput/gpt_mini": Target("gpt_mini in bf16 over plain fp32 PyTorch, speed", 2.6, False, bf16_cpu),
    "throughput/gpt2_mfu": Target("gpt2 (124 M) in bf16, MFU", 0.5, False, hopper),
    "memory/chunks": Target("gpt2 at 32 x 1024 tokens, z-loss: peak memory with all logits over chunks", 3.0, False),
    "throughput/resnet18": Target("ResNet-18, 32 px, over torchvision's recipe, speed", 3.0, False, card),
    "throughput/data": Target("waiting for data, largest share of a step", 0.01, True),
    "images/torchvision": Target("images from JPEG files over torchvision's DataLoader, speed", 0.9, False),
    "images/workers": Target("images from JPEG files, two workers over one", 1.8, False, two_cores),
    "recovery/snapshot": Target("stall by a snapshot at 124 M, steps", 1, True),
    "recovery/checkpoint": Target("stall by a checkpoint at 124 M, steps", 1, True),
    "recovery/rollback": Target("rollback from memory, steps", 2, True),
    "recovery/diagnosis": Target("a diagnosis, steps", 30, True),
    "growth/opening": Target("opening 10^9 tokens, s", 0.1, True),
    "growth/step": Target("a step of gpt_nano on 10^9 tokens over one on 10^6", 1.02, True),
    "start/first_step": Target("`python train.py` without compile, to the first step, s", 5, True),
    "start/help": Target("`--help`, s", 2, True),
    "start/error": Target("an error of the configuration, s", 2, True),
}


def judged(values: Mapping[str, float], device: torch.device, prefix: str = "") -> str:
    """Returns the table of the targets whose names begin with `prefix`, with the benchmark that measures each.

    Args:
        values: by target.
        device: what they were measured on.
        prefix: such as `overhead/`.
    """
    lines = [head("part", "target", "bound", "measured", "")]
    for name, target in TARGETS.items():
        if not name.startswith(prefix):
            continue
        bound = f"{'at most' if target.at_most else 'at least'} {target.bound:g}"
        if name in values:
            measured, verdict = f"{values[name]:.4g}", "met" if target.met(values[name]) else "not met"
        else:
            why_not = target.why_not(device)
            measured, verdict = "", f"not measurable here: {why_not}" if why_not else "not measured in this run"
        lines.append(row(name.partition("/")[0], target.what, bound, measured, verdict))
    return "\n".join(lines)


def main() -> None:
    """Prints one table for several files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="files written with --json")
    parser.add_argument("--device", default="auto", help="the device of the measurements: auto, cpu, cuda")
    asked = parser.parse_args()
    values: dict[str, float] = {}
    for file in asked.files:
        values |= json.loads(file.read_text()).get("targets", {})
    print(judged(values, hardware.choose_device(asked.device)))


if __name__ == "__main__":
    main()
