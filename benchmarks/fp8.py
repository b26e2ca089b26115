"""fp8 beside bf16: speed, MFU and loss of GPTs of several widths, with the same seeds and batches.

    python benchmarks/fp8.py --json fp8.json                        on a card: widths 768 and 4096, compiled
    python benchmarks/fp8.py --device cpu --widths 64               emulated: what the emulation costs

Each row is a run of 2 layers (`--layers`), trained on the text of Python's standard library (bytes), with the defaults
except for the learning rate. The kinds alternate step by step, so all of a width are in memory at once: some 20 GB at
4096. `speed` is the median over the rounds of bf16's time over the kind's own. `loss` is the mean training loss of the
last eighth of the steps. The first line says whether the device has fp8 or emulates it.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from jobs import Rounds, built
from measuring import Budget, Clock, command_line, head, in_turns, machine, quartiles, ratios, row, save, silence

from stabletrain.machine import hardware

KINDS = {
    "bf16": ("precision=bf16",),
    "fp8 tensorwise": ("precision=fp8", "precision.recipe=tensorwise"),
    "fp8 rowwise": ("precision=fp8", "precision.recipe=rowwise"),
}
TOKENS = {"cuda": (16, 1024), "cpu": (8, 64)}
"""Samples and tokens of a batch, by device."""


class Kind(Rounds):
    """The rounds of one run, and its losses.

    Attributes:
        losses: training losses, in order; they stay on the device.
    """

    def __init__(self, folder: Path, overrides: tuple[str, ...]) -> None:
        super().__init__(built(folder, overrides))
        self.losses: list[torch.Tensor] = []

    def compute(self) -> None:
        """Launches a step, and keeps its loss."""
        super().compute()
        if self._computed is not None:
            self.losses.append(self._computed[2].terms.parts["ce"])

    def loss(self) -> float:
        """The mean loss of the last eighth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 8) :]
        return float(torch.stack(last).mean())


def overrides_of(width: int, layers: int, device: torch.device, kind: str) -> tuple[str, ...]:
    """Returns the overrides of one run."""
    samples, tokens = TOKENS[device.type]
    return (
        *("model=gpt_mini", f"model.n_layer={layers}", f"model.n_embd={width}", f"model.n_head={max(1, width // 64)}"),
        *("data=stdlib", f"data.block_size={tokens}", f"batch_size={samples}", "optimizer.lr=3e-4"),
        *(f"device={device}", f"compile={str(device.type == 'cuda').lower()}", *KINDS[kind]),
    )


def turn(clock: Clock, run: Kind, number: int) -> float:
    """Returns the seconds of one step."""
    del number
    return clock.seconds(run)


def main() -> None:
    """Measures every width, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 0)
    parser.add_argument("--widths", help="separated by commas; default 768,4096 on a card, 64 on a CPU")
    parser.add_argument("--layers", type=int, default=2)
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    card = device.type == "cuda"
    rounds, layers = asked.rounds or (60 if card else 40), asked.layers
    kernels = "fp8 kernels" if hardware.has_fp8(device) else f"fp8 emulated ({hardware.fp8_reason(device)})"
    print(f"{machine(device)}, {kernels}, {rounds} steps")
    print(head("width", "precision", "tok/s", "speed", "quartiles", "MFU", "loss"))
    results, budget = [], Budget(asked.budget)
    widths = [int(width) for width in (asked.widths or ("768,4096" if card else "64")).split(",")]
    for number, width in enumerate(widths):
        if not budget.begins(f"width {width}"):
            continue
        until = budget.share(len(widths) - number)
        with tempfile.TemporaryDirectory() as folder:
            with silence():
                runs = {
                    kind: Kind(Path(folder) / kind.replace(" ", "_"), overrides_of(width, layers, device, kind))
                    for kind in KINDS
                }
            kinds = {kind: partial(turn, Clock(device, asked.clock), run) for kind, run in runs.items()}
            taken = in_turns(kinds, rounds, until=until)
            units = runs["bf16"].job.data.load(0).targets.numel()
            for kind, run in runs.items():
                speed = quartiles(ratios(taken["bf16"], taken[kind]))
                rate = units / quartiles(taken[kind])[0]
                mfu = run.job.monitoring.usage.metrics(rate).get("throughput/mfu")
                spread = f"{speed[1]:.2f} - {speed[2]:.2f}"
                shown = "" if mfu is None else f"{mfu:.1%}"
                print(
                    row(width, kind, f"{rate:,.0f}", f"{speed[0]:.2f}", spread, shown, f"{run.loss():.3f}"), flush=True
                )
                results.append(
                    {"width": width, "what": kind, "rate": rate, "speed": speed, "mfu": mfu, "loss": run.loss()}
                )
            with silence():
                for run in runs.values():
                    run.close()
        save(asked.json, device, results)
    save(asked.json, device, results, budget=budget)


if __name__ == "__main__":
    main()
