"""How a step's cost grows with depth, width, block size and batch size, compared with its FLOPs; and with the data
set's size.

    python benchmarks/growth.py --json growth.json
    python benchmarks/growth.py --only width,data --clock cpu

Varies one quantity of a GPT at a time. Steps of all sizes alternate, so other load on the machine affects all alike. In
each round, fits the exponent e of time ~ size^e by least squares in log-log space over the three largest sizes; the
same fit is made for the FLOPs that PyTorch counts in these models (`machine/hardware.py`). Time grows more slowly than
FLOPs if small matrix products leave the machine underused.

Memory is the peak over two steps, including weights, gradients and optimizer state: on a GPU the memory of tensors, on
a CPU the growth of the resident memory of a fresh process. The last part, `long_data.py`, checks that 10^9 tokens cost
no more than 10^6.
"""

import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import long_data
import numpy as np
import torch
from jobs import Rounds, built
from measuring import (
    Budget,
    Clock,
    command_line,
    head,
    in_turns,
    machine,
    modes,
    most_memory,
    quartiles,
    row,
    save,
    silence,
)
from quantities import COLUMNS, reached, show
from targets import judged

from stabletrain.machine import hardware
from stabletrain.machine.hardware import flops_per_sample, peak_bytes

BASE = {
    "tiny": {"depth": 1, "width": 32, "block": 16, "batch": 2, "vocab": 256, "head": 32},
    "cpu": {"depth": 4, "width": 128, "block": 128, "batch": 8, "vocab": 256, "head": 32},
    "cuda": {"depth": 12, "width": 768, "block": 1024, "batch": 8, "vocab": 50257, "head": 64},
}
AXES = {
    "cpu": {
        "depth": (2, 4, 8, 16),
        "width": (64, 128, 256, 512),
        "block": (64, 128, 256, 512),
        "batch": (4, 8, 16, 32),
    },
    "tiny": {"depth": (1, 2, 3), "width": (32, 64, 96), "block": (16, 32, 48), "batch": (2, 4, 6)},
    "cuda": {
        "depth": (6, 12, 24, 48),
        "width": (384, 768, 1536, 3072),
        "block": (512, 1024, 2048, 4096),
        "batch": (4, 8, 16, 32),
    },
}
FITTED = 3
"""Number of sizes, the largest ones, that the exponent is fitted to."""


def overrides(size: Mapping[str, int], device: str, precision: str) -> tuple[str, ...]:
    """Returns the overrides of a GPT of that size."""
    return (
        *("model=gpt_nano", f"model.n_layer={size['depth']}", f"model.n_embd={size['width']}"),
        *(f"model.n_head={size['width'] // size['head']}", "data=random_tokens", f"data.vocab_size={size['vocab']}"),
        *(f"data.block_size={size['block']}", f"batch_size={size['batch']}", "guard=skip", "optimizer.lr=1e-4"),
        *(f"device={device}", f"precision={precision}"),
    )


def begun(folder: Path, chosen: Sequence[str]) -> Rounds:
    """Builds the run and takes two warm-up steps."""
    with silence():
        run = Rounds(built(folder, chosen))
        run()
        run()
    return run


def resident(folder: Path, chosen: Sequence[str], threads: int) -> int:
    """Returns the peak growth of this process in bytes when it builds a run and takes two steps; 0 if the OS does not
    report it.
    """
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    with most_memory(cpu) as before:
        pass
    with most_memory(cpu) as after:
        begun(folder, chosen).close()
    return max(after, default=0) - max(before, default=0)


def memory_on_a_card(device: torch.device, folder: Path, chosen: Sequence[str]) -> tuple[int, Rounds]:
    """Returns the peak bytes of a run's tensors, and the run."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run = begun(folder, chosen)
    torch.cuda.synchronize(device)
    return peak_bytes(device) - before, run


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Returns the slope of log(value) over log(size), for the largest sizes."""
    logs = np.log(np.array([sizes[-FITTED:], values[-FITTED:]], dtype=float))
    return float(np.polyfit(logs[0], logs[1], 1)[0])


def grown(
    folder: Path, kind: str, axis: str, device: torch.device, precision: str, clock: Clock, rounds: int, until: float
) -> dict[str, Any]:
    """Measures one quantity: seconds per step for each size and round, FLOPs per step, and memory."""
    sizes, runs, memory, flops = AXES[kind][axis], {}, [], []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["growth"])
    for size in sizes:
        chosen = overrides(BASE[kind] | {axis: size}, str(device), precision)
        if device.type == "cuda":
            bytes_used, run = memory_on_a_card(device, folder / str(size), chosen)
        else:
            with context.Pool(1) as pool:  # a fresh process, which has held nothing else
                bytes_used = pool.apply(resident, (folder / f"{size}-alone", chosen, torch.get_num_threads()))
            run = begun(folder / str(size), chosen)
        memory.append(bytes_used)
        runs[str(size)] = run
        one = run.job.data.load(0)
        flops.append(len(one) * (flops_per_sample(run.job.state.model, one.inputs[:1]) or 0.0))
    taken = in_turns(
        {name: partial(lambda run, _: clock.seconds(run), run) for name, run in runs.items()}, rounds, 1, until
    )
    for run in runs.values():
        run.close()
    each_round = [list(times) for times in zip(*taken.values(), strict=True)]
    return {
        "workload": axis,
        "what": "a step",
        "precision": precision,
        "sizes": list(sizes),
        "seconds": list(taken.values()),
        "flops": flops,
        "memory": memory,
        "exponents": {
            "time": [exponent(sizes, times) for times in each_round],
            "arithmetic": exponent(sizes, flops),
            "memory": exponent(sizes, memory) if min(memory) > 0 else None,
        },
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """Returns the table's lines: one per size, then the exponents."""
    each = []
    for size, seconds, flops, memory in zip(
        found["sizes"], found["seconds"], found["flops"], found["memory"], strict=True
    ):
        middle, low, high = (1e3 * value for value in quartiles(seconds))
        spread = f"{low:.1f} - {high:.1f}"
        each.append(row(found["workload"], size, f"{middle:.1f}", spread, f"{flops / 1e9:.2f}", f"{memory / 1e6:.0f}"))
    middle, low, high = quartiles(found["exponents"]["time"])
    arithmetic, memory = found["exponents"]["arithmetic"], found["exponents"]["memory"]
    spread, last = f"{low:.2f} - {high:.2f}", "" if memory is None else f"^{memory:.2f}"
    return [*each, row(found["workload"], "grows as", f"^{middle:.2f}", spread, f"^{arithmetic:.2f}", last)]


def main() -> None:
    """Measures, prints the tables, and writes the JSON."""
    parser = command_line(__doc__, 5)
    parser.set_defaults(precision="auto")
    parser.add_argument("--only", default="depth,width,block,batch,data", help="parts, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="tiny models, only to check that it runs")
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    clock, results, kind = Clock(device, asked.clock), [], "tiny" if asked.tiny else device.type
    print(f"{machine(device)}, {asked.clock} time, base {BASE[kind]}")
    print(head("varied", "size", "a step, ms", "quartiles", "GFLOP a step", "memory, MB"))
    budget, only = Budget(asked.budget), asked.only.split(",")
    todo = [(mode, axis) for mode in modes(asked.precision, device) for axis in AXES[kind] if axis in only]
    for number, (mode, axis) in enumerate(todo):
        if not budget.begins(f"{axis}, {mode}"):
            continue
        until = budget.share(len(todo) - number)
        with tempfile.TemporaryDirectory() as folder:
            found = grown(Path(folder), kind, axis, device, mode, clock, asked.rounds, until)
        print("\n".join(lines(found)), flush=True)
        results.append(found)
        save(asked.json, device, results)
    if "data" in only and budget.begins("data"):
        print(f"\n{head(*COLUMNS)}")
        with tempfile.TemporaryDirectory() as folder:
            results += show(long_data.measured(Path(folder), max(asked.rounds, 5), clock, device))
    values = reached(results)
    print("\n" + judged(values, device, "growth/"))
    save(asked.json, device, results, values, budget)


if __name__ == "__main__":
    main()
