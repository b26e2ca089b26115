"""Peak memory of one step of gpt2 with all logits at once and in chunks (`loss_chunk`), at 32 x 1024 tokens in bf16.

    python benchmarks/memory.py --json memory.json

Runs the step's forward and backward passes, with and without z-loss. On a GPU the peak is measured. Elsewhere the step
runs on PyTorch's fake tensors, which have sizes but no values, and every storage is counted from allocation to release;
this includes the weights but not the optimizer's state.
"""

import contextlib
import weakref
from dataclasses import replace
from typing import Any

import torch
from measuring import command_line, head, machine, row, save
from targets import judged
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workloads import gpt, plain_tools

from stabletrain.machine import hardware
from stabletrain.records import LOGITS_AT_ONCE, Batch, TrainState
from stabletrain.stability.guard import NoGuard
from stabletrain.stability.objective import ChunkedLoss, NoZLoss, Objective, ZLoss
from stabletrain.step import compute

VOCAB = 50257
ZLOSSES = {"palm": ZLoss(1e-4), "none": NoZLoss()}


class Counted(TorchDispatchMode):
    """Counts the bytes of all storages that operations allocate inside it.

    Attributes:
        now, peak: bytes currently live, and their maximum.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            self._meet(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation and counts the storages it allocates."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._meet(tensor)
        return made

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._part, key)

    def _part(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def peak(objective: Objective | ChunkedLoss, mode: str, device: torch.device, samples: int) -> int:
    """Returns the peak bytes held in one step's forward and backward passes."""
    card = device.type == "cuda"
    with contextlib.nullcontext() if card else FakeTensorMode(), device:
        model, inputs, targets = gpt(12, 768, 1024, samples, VOCAB)
        batch = Batch(inputs, targets)
        state = TrainState(model, torch.optim.SGD(model.parameters()))
        tools = replace(plain_tools(mode, device, NoGuard()), objective=objective)
        if card:
            torch.cuda.reset_peak_memory_stats(device)
            compute(state, [batch], tools)
            return torch.cuda.max_memory_allocated(device)
        with Counted(model) as counted:
            compute(state, [batch], tools)
        return counted.peak


def main() -> None:
    """Counts, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 1)
    parser.add_argument("--samples", type=int, default=32, help="sequences of 1024 tokens")
    parser.add_argument("--zloss", default="palm,none", help="kinds of z-loss, separated by commas")
    parser.set_defaults(precision="bf16")
    asked = parser.parse_args()
    device = hardware.pick(asked.device)
    print(machine(device) + (", measured" if device.type == "cuda" else ", counted on fake tensors"))
    print(head("precision", "z-loss", "whole, GB", "in chunks, GB", "ratio"))
    results, targets = [], {}
    for mode in asked.precision.split(","):
        for name in asked.zloss.split(","):
            plain = Objective(ZLOSSES[name])
            whole = peak(plain, mode, device, asked.samples)
            chunks = peak(ChunkedLoss(plain, LOGITS_AT_ONCE // VOCAB, VOCAB), mode, device, asked.samples)
            print(row(mode, name, f"{whole / 1e9:.1f}", f"{chunks / 1e9:.1f}", f"{whole / chunks:.2f}"), flush=True)
            if (mode, name, asked.samples) == ("bf16", "palm", 32):
                targets["memory/chunks"] = whole / chunks
            results.append({"precision": mode, "what": f"zloss={name}", "whole": whole, "chunks": chunks})
    if targets:
        print(judged(targets, device, "memory/"))
    save(asked.json, device, results, targets)


if __name__ == "__main__":
    main()
