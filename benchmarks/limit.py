"""The upper bound on gpt_mini's speedup over fp32 in another precision: its matrix products alone, forward and
backward.

    python benchmarks/limit.py --precision bf16

A transformer's step consists of products with weights, attention, and memory-bound operations (norms, activations,
casts, the update), which a narrower dtype does not speed up through faster products. Times the first two over the
step's own shapes, all layers together, with inputs already in their dtype; the speed is a ratio per round.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import Clock, command_line, head, in_turns, machine, modes, quartiles, ratios, row, save
from omegaconf import OmegaConf
from sizes import SIZES
from torch import Tensor

from stabletrain.machine import hardware

SIZE = SIZES["gpt_mini"]
MODEL = OmegaConf.load(Path(__file__).parents[1] / "conf" / "model" / "gpt_mini.yaml")
LAYERS, HEADS, WIDTH = MODEL.n_layer, MODEL.n_head, MODEL.n_embd
BLOCK, BATCH = SIZE.block_size["cpu"], SIZE.batch["cpu"]

PRODUCTS = (*4 * [(WIDTH, WIDTH)], (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
"""Input and output widths of a block's linear layers: query, key, value, out; up, down."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def products(batch: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Returns a function that computes all products with weights: outputs and gradients of inputs and weights."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    tokens = batch * BLOCK
    layers = [(made(tokens, inner), made(outer, inner), made(tokens, outer)) for inner, outer in PRODUCTS]

    def run() -> None:
        for x, weight, gradient in LAYERS * layers:
            _ = x @ weight.T, gradient @ weight, gradient.T @ x

    return run


def attention(batch: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Returns a function that runs PyTorch's fused causal attention of all layers, forward and backward."""
    shape = batch, HEADS, BLOCK, WIDTH // HEADS
    queries, keys, values, gradient = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    inputs = [each.requires_grad_() for each in (queries, keys, values)]

    def run() -> None:
        for _ in range(LAYERS):
            torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=True), inputs, gradient)

    return run


def main() -> None:
    """Measures both parts, prints the table, and writes the JSON."""
    parser = command_line(__doc__, rounds=20)
    parser.set_defaults(precision="auto")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences; default as in throughput.py on a CPU")
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    if unknown := {*modes(asked.precision, device)} - {*DTYPES}:
        parser.error(f"--precision {','.join(sorted(unknown))}: choose fp32 or bf16, which are dtypes of tensors")
    clock = Clock(device, asked.clock)
    print(f"{machine(device)}, {asked.clock} time, {asked.rounds} rounds")
    print(head("part", "precision", "fp32", "its own", "speed", "quartiles"))
    results = []
    for mode in modes(asked.precision, device):
        for part in (products, attention):
            kinds = {each: part(asked.batch, DTYPES[each], device) for each in dict.fromkeys(("fp32", mode))}
            taken = in_turns({name: lambda _, run=run: clock.seconds(run) for name, run in kinds.items()}, asked.rounds)
            speed = quartiles(ratios(taken["fp32"], taken[mode]))
            times = [f"{1000 * quartiles(taken[each])[0]:.0f} ms" for each in ("fp32", mode)]
            cells = (*times, f"{speed[0]:.2f}", "{1:.2f} - {2:.2f}".format(*speed))
            print(row(part.__name__, mode, *cells), flush=True)
            about = {"what": part.__name__, "precision": mode, "speed": speed}
            results.append({**about, "seconds": taken[mode], "fp32": taken["fp32"]})
    save(asked.json, device, results)


if __name__ == "__main__":
    main()
