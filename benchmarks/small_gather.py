"""The cost of a step's one small collective: steps with it against steps without.

    torchrun --nproc_per_node=2 benchmarks/small_gather.py --json small_gather.json

A round is a step that shares its statistics once (`parallel/distributed.py`), one that shares them `TIMES` times, and
one that does not share them, in alternating order. A barrier precedes each, so that no rank's time includes another's
delay. Prints the median and quartiles of the differences to the step without sharing, divided by the number of
collectives. On a busy machine a single collective is lost in the variation between steps; the average over many is not,
but includes only part of the time spent waiting for the other rank.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stabletrain.errors import ConfigError
from stabletrain.guard.policy import NoGuard
from stabletrain.machine import hardware
from stabletrain.parallel.ddp import DDP
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.ranks import current_ranks, join_process_group, leave_process_group
from stabletrain.records import Batch, TrainState
from stabletrain.stability.optimizers import AdamW
from stabletrain.step import train_step

sys.path.insert(0, str(Path(__file__).parent.parent))  # `tests` is not installed
from tests.workloads import WORKLOADS, plain_tools

TIMES = 20


def measured(kind: type[DDP] | type[FSDP], workload: str, device: torch.device, rounds: int) -> dict[int, list[float]]:
    """Returns the seconds of each round's steps, by how many times the statistics were shared."""
    torch.manual_seed(0)
    model, inputs, targets = WORKLOADS[device.type][workload]()
    model, parallel = model.to(device), kind(current_ranks())
    parallel.shard(model)
    state = TrainState(model, AdamW(1e-4, [0.9, 0.95], 1e-8, 0.1)(model))
    parallel.wrap(model)
    tools = replace(plain_tools("fp32", device, NoGuard()), parallel=parallel)
    mine = slice(current_ranks().rank, None, current_ranks().world_size)
    batch = Batch(inputs[mine].to(device), targets[mine].to(device)).counting(targets.numel())
    share = parallel.reduce_stats

    def seconds(times: int) -> float:
        def reduce_stats(*numbers: Any) -> tuple[Any, ...]:
            met = numbers
            for _ in range(times):
                met = share(*numbers)
            return met

        vars(parallel)["reduce_stats"] = reduce_stats
        dist.barrier()
        start = time.perf_counter()
        train_step(state, [batch], tools)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    kinds = (0, 1, TIMES)
    found: dict[int, list[float]] = {times: [] for times in kinds}
    for number in range(-3, rounds):  # warm-up: DDP rebuilds its buckets after its first step
        for times in kinds if number % 2 else reversed(kinds):
            taken = seconds(times)
            if number >= 0:
                found[times].append(taken)
    return found


def main() -> None:
    """Measures the device's GPT under DDP and FSDP, prints the table on rank 0, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args()
    if not current_ranks().launched:
        raise ConfigError("small_gather.py needs ranks: torchrun --nproc_per_node=2 benchmarks/small_gather.py")
    ranks = current_ranks()
    join_process_group(ranks)
    device = hardware.choose_device(asked.device, ranks.local_rank, ranks.local_world_size)
    workload = next(iter(WORKLOADS[device.type]))
    results = {kind.name: measured(kind, workload, device, asked.rounds) for kind in (DDP, FSDP)}
    if current_ranks().is_main:
        print(
            f"{hardware.name(device)}, {hardware.threads()} a rank, {current_ranks().world_size} ranks, "
            f"torch {torch.__version__}"
        )
        print(f"{workload}, fp32, {asked.rounds} rounds\n")
        print("| parallel | step without, ms | shared | cost each time, ms | quartiles | in steps |")
        print("|---|---|---|---|---|---|")
        for name, taken in results.items():
            without = statistics.median(taken[0])
            for times in (1, TIMES):
                each = [(a - b) / times for a, b in zip(taken[times], taken[0], strict=True)]
                low, middle, high = (1e3 * cut for cut in statistics.quantiles(each, n=4))
                cost = f"{middle:+.2f} | {low:+.2f} to {high:+.2f} | {middle / 1e3 / without:+.1%}"
                print(f"| {name} | {1e3 * without:.1f} | {times} | {cost} |")
        if asked.json:
            about = {"machine": platform.platform(), "torch": torch.__version__, "ranks": current_ranks().world_size}
            asked.json.write_text(json.dumps({**about, "workload": workload, "seconds": results}, indent=2) + "\n")
    leave_process_group()


if __name__ == "__main__":
    main()
