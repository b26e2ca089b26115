"""Peak memory of one step of gpt2 with all logits at once and in chunks (`loss_chunk`), at 32 x 1024 tokens in bf16.

    python benchmarks/memory.py --json memory.json
    python benchmarks/memory.py --zloss palm --chunks 256,auto,4096,8192

Runs the step's forward and backward passes, with and without z-loss. On a GPU the peak is measured. Elsewhere the step
runs on PyTorch's fake tensors, which have sizes but no values, and every storage is counted from allocation to release;
this includes the weights but not the optimizer's state. There the operations of the step are counted too, and those
that cast a tensor as large as the head.

The target is that of the smallest automatic chunk; on a card with more memory `auto` takes larger ones, another row.
"""

import contextlib
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import command_line, head, machine, row, save
from targets import judged
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stabletrain.guard.policy import NoGuard
from stabletrain.machine import hardware
from stabletrain.records import Batch, TrainState
from stabletrain.stability.objective import CrossEntropy, NoZLoss, ZLoss
from stabletrain.stability.objective.chunked_loss import ChunkedLoss, tokens_at_once
from stabletrain.step import compute

sys.path.insert(0, str(Path(__file__).parent.parent))  # `tests` is not installed
from tests.workloads import gpt, plain_tools

VOCAB, WIDTH = 50257, 768
SMALLEST = tokens_at_once(VOCAB, torch.device("cpu"))
ZLOSSES = {"palm": ZLoss(1e-4), "none": NoZLoss()}


class Counted(TorchDispatchMode):
    """Counts the operations inside it, and the bytes of all storages that they allocate.

    Attributes:
        now, peak: bytes currently live, and their maximum.
        operations: how many were dispatched.
        casts: how many of them cast a tensor as large as the head, padded or not.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = self.operations = self.casts = 0
        self._sizes: dict[int, int] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            self.meet(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation and counts the storages it allocates."""
        made = func(*args, **(kwargs or {}))
        self.operations += func.namespace == "aten"
        if func.__name__.startswith("_to_copy"):
            self.casts += made.dim() == 2 and made.shape[1] == WIDTH and made.shape[0] >= VOCAB
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.meet(tensor)
        return made

    def meet(self, tensor: Tensor) -> None:
        """Counts a tensor's storage until it is released."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._part, key)

    def _part(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def step(objective: CrossEntropy | ChunkedLoss, mode: str, device: torch.device, samples: int) -> dict[str, int]:
    """Returns the peak bytes held in one step's forward and backward passes; on fake tensors the counts as well."""
    card = device.type == "cuda"
    with contextlib.nullcontext() if card else FakeTensorMode(), device:
        model, inputs, targets = gpt(12, WIDTH, 1024, samples, VOCAB)
        batch = Batch(inputs, targets)
        state = TrainState(model, torch.optim.SGD(model.parameters()))
        tools = replace(plain_tools(mode, device, NoGuard()), objective=objective)
        if card:
            torch.cuda.reset_peak_memory_stats(device)
            compute(state, [batch], tools)
            return {"bytes": torch.cuda.max_memory_allocated(device)}
        with Counted(model) as counted:
            compute(state, [batch], tools)
        return {"bytes": counted.peak, "operations": counted.operations, "casts": counted.casts}


def main() -> None:
    """Counts, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 1)
    parser.add_argument("--samples", type=int, default=32, help="sequences of 1024 tokens")
    parser.add_argument("--zloss", default="palm,none", help="kinds of z-loss, separated by commas")
    parser.add_argument("--chunks", default="auto", help="tokens in a chunk, separated by commas; auto: this device's")
    parser.set_defaults(precision="bf16")
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    print(machine(device) + (", measured" if device.type == "cuda" else ", counted on fake tensors"))
    print(head("precision", "z-loss", "tokens at once", "peak, GB", "times less", "operations", "casts of the head"))
    automatic = tokens_at_once(VOCAB, device)
    sizes = {automatic if size == "auto" else int(size) for size in asked.chunks.split(",")}
    results, targets = [], {}
    for mode in asked.precision.split(","):
        for name in asked.zloss.split(","):
            plain, peaks = CrossEntropy(ZLOSSES[name]), {}
            for tokens in (0, *sorted({SMALLEST, *sizes})):
                found = step(ChunkedLoss(plain, tokens, VOCAB) if tokens else plain, mode, device, asked.samples)
                peaks[tokens] = found["bytes"]
                counts = [str(found.get(key, "")) for key in ("operations", "casts")]
                less = f"{peaks[0] / peaks[tokens]:.2f}"
                print(row(mode, name, tokens or "all", f"{peaks[tokens] / 1e9:.1f}", less, *counts), flush=True)
                what = f"zloss={name}, {tokens or 'all'} tokens at once"
                results.append({"precision": mode, "what": what, "tokens": tokens, **found})
            if (mode, name, asked.samples) == ("bf16", "palm", 32):
                targets["memory/chunks"] = peaks[0] / peaks[SMALLEST]
    if targets:
        print(judged(targets, device, "memory/"))
    save(asked.json, device, results, targets)


if __name__ == "__main__":
    main()
