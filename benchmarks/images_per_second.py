"""Images per second from JPEG files, beside torchvision's ImageFolder and PyTorch's DataLoader with as many workers.

    OMP_NUM_THREADS=1 python benchmarks/images_per_second.py --json images.json

Both read the same made photographs of 256 to 500 pixels, crop and resize them at random to 224 pixels, and flip half.
On a CPU, "stabletrain" is the part that runs on the host beside a GPU: batches of uint8, ready to be sent. "complete"
also normalises them as fp32 on the CPU. On a GPU both loaders end with fp32 images on the GPU. CPU time is user and
system time of the process and its workers.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_data import MEAN, STD
from measuring import Budget, command_line, head, in_turns, machine, ratios, save
from PIL import Image
from quantities import COLUMNS, quantity, reached, show
from targets import judged
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from stabletrain.data.batches import Prefetch
from stabletrain.data.imagefolder import ImageFolder
from stabletrain.data.images import cores_of_this_rank
from stabletrain.machine import hardware
from stabletrain.records import Batch

SIZE = 224
CPU = torch.device("cpu")


def photograph(drawn: np.random.Generator) -> Image.Image:
    """Returns an image with the spectrum of a photograph: large shapes, finer ones that are fainter, some noise."""
    width, height = (int(side) for side in drawn.integers(256, 501, 2))
    pixels = 0.02 * drawn.normal(size=(height, width, 3)).astype(np.float32)
    for cells in (4, 8, 16, 32, 64, 128):
        for channel in range(3):
            coarse = Image.fromarray(drawn.normal(size=(cells, cells)).astype(np.float32))
            pixels[..., channel] += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) / cells**0.7
    low, high = pixels.min(), pixels.max()
    return Image.fromarray(((pixels - low) / (high - low) * 255).astype(np.uint8))


def write_folder(root: Path, count: int) -> None:
    """Writes `count` JPEG files to train on, and two to validate on, in two classes."""
    drawn = np.random.default_rng(0)
    for number in range(count + 2):
        split = "train" if number < count else "val"
        folder = root / split / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        photograph(drawn).save(folder / f"{number:05}.jpg", quality=90)


@dataclass
class Loader:
    """A source of batches that never ends.

    Attributes:
        batches: the batches.
        ahead: batches that may be ready before the clock starts; they are not timed.
        workers: process ids of the workers.
        cpu_ms: milliseconds of CPU time per image, one for each call of `rate`.
    """

    batches: Iterator[Any]
    ahead: int
    workers: list[int]
    cpu_ms: list[float]

    def rate(self, count: int, size: int, device: torch.device) -> float:
        """Returns the images per second over at least `count` batches, and notes the CPU time.

        Times at least two batches per worker process: they finish together, so batches arrive in bursts.
        """
        count = max(count, self.ahead - 1)
        for _ in itertools.islice(self.batches, self.ahead):
            pass
        settle(device)
        cpu, start = self._cpu(), time.perf_counter()
        for _ in itertools.islice(self.batches, count):
            pass
        settle(device)
        seconds = time.perf_counter() - start
        self.cpu_ms.append(1e3 * (self._cpu() - cpu) / (count * size))
        return count * size / seconds

    def _cpu(self) -> float:
        """Seconds of CPU time of this process and the workers."""
        ticks = 0
        for pid in self.workers:
            stat = Path(f"/proc/{pid}/stat")
            if stat.exists():
                ticks += sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def settle(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def torchvisions(root: Path, workers: int, size: int, device: torch.device) -> Loader:
    """torchvision's ImageFolder with the transforms of its reference recipe, and PyTorch's DataLoader."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, antialias=True),
            transforms.RandomHorizontalFlip(0.5),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(MEAN, STD),
        ]
    )
    loader = DataLoader(
        datasets.ImageFolder(str(root / "train"), transform),
        batch_size=size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    passes = iter(loader)  # starts the workers; each later pass uses them again

    def forever() -> Iterator[Any]:
        yield from (images.to(device, non_blocking=True) for images, _ in passes)
        while True:
            yield from (images.to(device, non_blocking=True) for images, _ in loader)

    return Loader(forever(), 2 * workers + 1, [worker.pid for worker in passes._workers], [])  # ty: ignore


def ours(
    root: Path, workers: int, size: int, device: torch.device, complete: bool, closing: list[Callable[[], None]]
) -> Loader:
    """This project's image folder, read as a run reads it."""
    data = ImageFolder(
        str(root),
        image_size=SIZE,
        augment="resized_crop",
        val_fraction=0.1,
        cache_mb=0,
        mean=MEAN,
        std=STD,
        seed=0,
        workers=workers,
    )

    def load(step: int) -> Batch:
        batch = data.rows(step, size, "train", slice(0, size))
        return batch.transformed() if complete and device.type == "cpu" else batch

    prefetch = Prefetch(load, pin=device.type == "cuda", threads=2)
    closing.append(prefetch.close)

    def forever() -> Iterator[Any]:
        for step in itertools.count():
            batch = prefetch.get(step)
            yield batch.to(device) if complete else batch

    return Loader(forever(), prefetch.ahead + 1, [], [])


def main() -> None:
    """Writes the files, measures, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 5)
    parser.add_argument("--files", type=int, default=256, help="number of JPEG files")
    parser.add_argument("--batch", type=int, default=32, help="images in a batch")
    parser.add_argument("--count", type=int, default=12, help="batches in a round")
    parser.add_argument("--workers", default="", help="numbers of workers, such as 1,2; default: 1 and all")
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    numbers = sorted({int(n) for n in asked.workers.split(",")} if asked.workers else {1, cores_of_this_rank()})
    card, closing = device.type == "cuda", []
    print(machine(device), flush=True)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_folder(root, asked.files)
        # The DataLoaders first: they fork, which must not happen beside threads.
        made = {f"torchvision {n}": torchvisions(root, n, asked.batch, device) for n in numbers}
        for n in numbers:
            made[f"stabletrain {n}"] = ours(root, n, asked.batch, device, card, closing)
        if not card:
            made |= {f"complete {n}": ours(root, n, asked.batch, device, True, closing) for n in numbers}
        try:
            kinds = {
                key: lambda number, loader=loader: loader.rate(asked.count, asked.batch, device)
                for key, loader in made.items()
            }
            rates = in_turns(kinds, asked.rounds, 1, Budget(asked.budget).share(1))
        finally:
            for close in closing:
                close()
    print(head(*COLUMNS))
    results = show(measured(rates, {key: loader.cpu_ms[1:] for key, loader in made.items()}, numbers, not card))
    targets = reached(results)
    print(f"\n{judged(targets, device, 'images/')}")
    save(asked.json, device, results, targets)


def measured(
    rates: dict[str, list[float]], cpu_ms: dict[str, list[float]], numbers: list[int], on_cpu: bool
) -> Iterator[dict[str, Any]]:
    """Yields the results for each number of workers, and how more workers help."""
    for n in numbers:
        where = f"{n} worker{'s' if n > 1 else ''}"
        for kind in ("stabletrain", *(["complete"] if on_cpu else []), "torchvision"):
            key = f"{kind} {n}"
            yield quantity(where, kind, rates[key], "images/s")
            yield quantity(where, f"{kind}, CPU time", cpu_ms[key], "ms per image")
        last = "images/torchvision" if n == numbers[-1] else ""
        compared = ratios(rates[f"{'complete' if on_cpu else 'stabletrain'} {n}"], rates[f"torchvision {n}"])
        yield quantity(where, "over torchvision", compared, "times", last)
    if 1 in numbers and 2 in numbers:
        scaled = ratios(rates["stabletrain 2"], rates["stabletrain 1"])
        yield quantity("2 workers over 1", "stabletrain", scaled, "times", "images/workers")


if __name__ == "__main__":
    main()
