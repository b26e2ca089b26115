"""Peak memory of each rank in steps of `parallel=fsdp`, measured beside what benchmarks/traffic.py computes.

    torchrun --nproc_per_node=4 benchmarks/sharded_memory.py --json sharded_memory.json
    torchrun --nproc_per_node=2 benchmarks/sharded_memory.py --layers 2 --width 48 --vocabulary 64 --block 16

Each rank trains `--model` with AdamW on random tokens, in fp32. PyTorch's `FSDPMemTracker` counts every storage from
its allocation to its release, on a CPU too, and says what it is for. It can count one step only, the last; the first
allocates the moments. The formula has no activations and no buffers of collectives, so these are shown apart:

    computed = weights + gradients + moments + weights gathered and gradients not yet scattered

Not every kind is largest at the peak of all, so the most of each is shown too, over the moments at which the tracker
looks: before and after each block's forward and backward pass, and at the end. `whole` is an upper bound there: weights
in transfer are in buffers of collectives.
"""

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import traffic
import yaml
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule

from stabletrain.errors import ConfigError
from stabletrain.guard.policy import NoGuard
from stabletrain.machine import hardware
from stabletrain.models.gpt import GPT
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.ranks import current_ranks, join_process_group, leave_process_group
from stabletrain.records import Batch, TrainState
from stabletrain.stability.optimizers import AdamW
from stabletrain.step import train_step

sys.path.insert(0, str(Path(__file__).parent.parent))  # `tests` is not installed
from tests.workloads import plain_tools

KINDS = {
    "weights": ("Sharded Param",),
    "gradients": ("Sharded Grad",),
    "moments": ("OptState",),
    "whole": ("Unsharded Param", "Unsharded Grad"),
    "buffers of collectives": ("All Gather", "Reduce Scatter"),
    "activations and the rest": ("Activation", "Temp", "Inputs", "Buffer", "Gradient", "Parameter"),
}
"""What the tracker calls each kind of memory; the first four are those of `traffic.Memory`."""


def model_of(asked: argparse.Namespace) -> GPT:
    """Returns the GPT of a config file, with the sizes that were asked for."""
    folder = Path(__file__).parent.parent / "conf" / "model"
    keys = yaml.safe_load((folder / f"{asked.model}.yaml").read_text(encoding="utf-8"))
    own = {key: value for key, value in keys.items() if key not in ("defaults", "_target_", "modality")}
    own = {key: value for key, value in own.items() if not str(value).startswith("${")}  # parts that do nothing
    own |= {"vocab_size": asked.vocabulary, "block_size": asked.block, "norm_eps": float(own["norm_eps"])}
    own |= {"n_layer": asked.layers or own["n_layer"], "n_embd": asked.width or own["n_embd"]}
    return GPT(**own)


def of_kinds(snapshot: Mapping[torch.device, Mapping[Any, int]], device: torch.device) -> dict[str, int]:
    """Returns the bytes of each kind in a snapshot of the tracker, and their total."""
    names = {
        str(getattr(key, "value", key)): size
        for each, kinds in snapshot.items()
        if each.type == device.type
        for key, size in kinds.items()
    }
    known = {name for kinds in KINDS.values() for name in kinds} | {"Total"}
    if lost := {name: size for name, size in names.items() if name not in known and size}:
        raise KeyError(f"the tracker names {lost}, which KINDS does not have")
    return {kind: sum(names.get(name, 0) for name in its) for kind, its in KINDS.items()} | {"total": names["Total"]}


def measured(asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Trains, and returns what this rank held in the last step, at the peak and at most, and what is computed."""
    ranks = current_ranks()
    torch.manual_seed(0)
    model = model_of(asked)
    sizes = traffic.of(model)
    parallel = FSDP(ranks)
    model = model.to(device)
    parallel.shard(model)
    assert isinstance(model, FSDPModule)
    state = TrainState(model, AdamW(1e-4, [0.9, 0.95], 1e-8, 0.1)(model))
    parallel.wrap(model)
    tools = replace(plain_tools("fp32", device, NoGuard()), parallel=parallel)
    tokens = torch.randint(asked.vocabulary, (ranks.world_size * asked.samples, asked.block + 1))
    mine = tokens[ranks.rank :: ranks.world_size].to(device)
    batch = Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous()).counting(tokens[:, 1:].numel())
    losses = [float(train_step(state, [batch], tools).loss) for _ in range(asked.steps - 1)]
    tracker = FSDPMemTracker(model, state.optimizer)
    tracker.track_inputs((batch.inputs, batch.targets))
    with tracker:
        reading = train_step(state, [batch], tools)
    losses.append(float(reading.loss))
    shots = [shot for each in tracker.memory_tracking.values() for some in each.snapshots.values() for shot in some]
    peak = tracker.get_tracker_snapshot("peak")
    seen = [of_kinds(shot, device) for shot in (*shots, peak, tracker.get_tracker_snapshot("current"))]
    memory = traffic.held_by_fsdp(sizes, ranks.world_size)
    return {
        "peak": of_kinds(peak, device),
        "most": {kind: max(each[kind] for each in seen) for kind in [*KINDS, "total"]},
        "computed": memory._asdict() | {"total": memory.card},
        "parameters": sizes.parameters,
        "losses": losses,
    }


def main() -> None:
    """Measures, prints the largest of any rank on rank 0, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--model", default="llama_160m", help="a GPT of conf/model/")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--block", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--samples", type=int, default=1, help="sequences of each rank in a step")
    parser.add_argument("--steps", type=int, default=3, help="at least 2, the last one counted")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--width", type=int, help="another width than the model has")
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args()
    ranks = current_ranks()
    if not ranks.launched:
        raise ConfigError("sharded_memory.py needs ranks: torchrun --nproc_per_node=4 benchmarks/sharded_memory.py")
    join_process_group(ranks)
    device = hardware.choose_device(asked.device, ranks.local_rank, ranks.local_world_size)
    found: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(found, measured(asked, device))
    if ranks.is_main:
        print(f"{hardware.name(device)}, {ranks.world_size} ranks, torch {torch.__version__}")
        print(f"{asked.model}, {found[0]['parameters']:,} parameters, {asked.samples} x {asked.block} tokens a rank\n")
        print("| MB of a rank | computed | most at any moment | at the peak |\n|---|---|---|---|")
        for kind in [*KINDS, "total"]:
            most, peak = (max(one[when][kind] for one in found) / 1e6 for when in ("most", "peak"))
            computed = found[0]["computed"].get(kind)
            print(f"| {kind} | {'' if computed is None else f'{computed / 1e6:,.2f}'} | {most:,.2f} | {peak:,.2f} |")
        if asked.json:
            about = {"machine": platform.platform(), "torch": torch.__version__, "ranks": ranks.world_size}
            chosen = {key: value for key, value in vars(asked).items() if key != "json"}
            asked.json.write_text(json.dumps({**about, "asked": chosen, "results": found}, indent=2) + "\n")
    leave_process_group()


if __name__ == "__main__":
    main()
