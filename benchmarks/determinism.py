"""What determinism=strict costs: the time of a training step against determinism=seeded, in pairs, in one process.

    python benchmarks/determinism.py --json determinism.json

A step is forward, loss, backward, gradient norms and a fused AdamW, on random data. A round times `--steps` steps under
each setting, one right after the other and in turns first, and gives one ratio; the median and the quartiles over
`--rounds` rounds are printed. So what else the machine does falls on both sides alike.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from stabletrain.machine import hardware
from stabletrain.machine.determinism import Seeded, Strict
from stabletrain.models.gpt import GPT
from stabletrain.models.resnet import CifarResNet, TorchvisionResNet
from stabletrain.stability import precision
from stabletrain.stability.objective import NoZLoss, Objective
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.softcap import NoSoftcap
from stabletrain.watch.gradients import measure


def gpt(n_layer: int, n_embd: int, block_size: int, batch: int, vocab: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A GPT with heads of 64 (of 32, if it is narrow), tokens and targets."""
    model = GPT(
        vocab_size=vocab,
        block_size=block_size,
        n_layer=n_layer,
        n_head=n_embd // (64 if n_embd >= 512 else 32),
        n_embd=n_embd,
        position="rope",
        norm="layernorm",
        mlp="gelu",
        bias=False,
        tied_head=False,
        dropout=0.0,
        qknorm=NoQKNorm(),
        softcap=NoSoftcap(),
        qkclip=NoQKClip(),
    )
    tokens = torch.randint(vocab, (batch, block_size + 1))
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def resnet(model: nn.Module, size: int, batch: int, classes: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A ResNet, images and labels."""
    return model, torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


WORKLOADS: dict[str, dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]]] = {
    "cpu": {
        "GPT 4 x 128, 16 x 128 tokens": lambda: gpt(4, 128, 128, 16, 256),
        "ResNet-20, 32 images of 32 px": lambda: resnet(
            CifarResNet(depth=20, num_classes=10, in_channels=3), 32, 32, 10
        ),
    },
    "cuda": {
        "GPT 12 x 768, 8 x 1024 tokens": lambda: gpt(12, 768, 1024, 8, 50257),
        "ResNet-50, 64 images of 224 px": lambda: resnet(
            TorchvisionResNet(depth=50, num_classes=1000, in_channels=3, stem="large"), 224, 64, 1000
        ),
    },
}


def measured(
    make: Callable, mode: str, device: torch.device, steps: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds a step under seeded and under strict, one of each for a round."""
    torch.manual_seed(0)
    model, inputs, targets = make()
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    objective, acting = Objective(NoZLoss(), 0.0), getattr(precision, mode)(device)
    acting.prepare()
    count = torch.tensor(targets.numel(), device=device)

    def timed(setting: Seeded, number: int) -> float:
        setting.prepare()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for step in range(number):
            setting.seed_step(0, step)
            optimizer.zero_grad(set_to_none=True)
            with acting.autocast():
                logits = model(inputs)
            objective(logits, targets, count).total.backward()
            measure(model)
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / number

    pair = seeded, strict = Seeded(), Strict()
    for setting in pair:
        timed(setting, 3)  # warms up
    taken: dict[Seeded, list[float]] = {seeded: [], strict: []}
    for number in range(rounds):
        for setting in pair if number % 2 else pair[::-1]:
            taken[setting].append(timed(setting, steps))
    seeded.prepare()
    return taken[seeded], taken[strict]


def main() -> None:
    """Measures every workload of the device, prints the table, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--precision", default="fp32,bf16", help="modes, separated by commas: fp32, tf32, bf16")
    parser.add_argument("--steps", type=int, default=3, help="steps timed at once")
    parser.add_argument("--rounds", type=int, default=20, help="pairs")
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args()
    Strict().prepare()  # before CUDA starts
    device = hardware.pick(asked.device)
    print(f"{hardware.name(device)}, {hardware.threads()}, torch {torch.__version__}")
    print(f"| {'workload':30} | precision | seeded, ms | strict, ms | strict / seeded | quartiles |")
    print("|---|---|---|---|---|---|")
    results = []
    for name, make in WORKLOADS[device.type].items():
        for mode in asked.precision.split(","):
            seeded, strict = measured(make, mode, device, asked.steps, asked.rounds)
            ratios = [b / a for a, b in zip(seeded, strict, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            ms = [1000 * statistics.median(times) for times in (seeded, strict)]
            print(
                f"| {name:30} | {mode} | {ms[0]:.1f} | {ms[1]:.1f} | {middle:.3f} | {low:.3f} - {high:.3f} |",
                flush=True,
            )
            results.append(
                {
                    "workload": name,
                    "precision": mode,
                    "seeded_ms": ms[0],
                    "strict_ms": ms[1],
                    "ratio": middle,
                    "ratio_quartiles": [low, high],
                    "ratios": ratios,
                }
            )
    if asked.json:
        about = {**hardware.describe(device), "host": platform.machine(), "torch": torch.__version__}
        asked.json.write_text(json.dumps({"machine": about, "steps": asked.steps, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
