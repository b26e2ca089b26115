"""torchvision's reference recipe for classification: its transforms, its loader and its training loop.

Source: references/classification of torchvision, `presets.py` and `train.py` (`train_one_epoch`): PIL images,
RandomResizedCrop, a flip, PILToTensor, ConvertImageDtype, Normalize, in worker processes; SGD at 0.1 with momentum 0.9
and weight decay 1e-4; fp32, or fp16 with `--amp`; loss and accuracy read in each step. Only the data differ: noise.
"""

import itertools
import time
from collections.abc import Iterator

import torch
from made_data import MEAN, STD
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


class Pictures(Dataset):
    """PIL images, transformed when they are loaded, as torchvision's own data sets do."""

    def __init__(self, pixels: Tensor, labels: list[int], size: int) -> None:
        self.pixels, self.labels = pixels.permute(0, 2, 3, 1).contiguous().numpy(), labels
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(size, antialias=True),
                transforms.RandomHorizontalFlip(0.5),
                transforms.PILToTensor(),
                transforms.ConvertImageDtype(torch.float),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


class Recipe:
    """The recipe's training loop, with its own timing.

    Args:
        model: on its device.
        pixels: uint8 `[n, 3, height, width]`.
        labels: one per image.
        size: side length in pixels of the model's input.
        batch_size: images per step.
        device: the model's device.
        workers: loader processes; the recipe's default is 16.
        amp: fp16 with a gradient scaler, the recipe's `--amp`.
    """

    def __init__(
        self,
        model: nn.Module,
        pixels: Tensor,
        labels: list[int],
        *,
        size: int,
        batch_size: int,
        device: torch.device,
        workers: int,
        amp: bool = False,
    ) -> None:
        self.model, self.device = model, device
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler(device.type) if amp else None
        self.ahead = 2 * workers + 1
        self.loader = DataLoader(
            Pictures(pixels, labels, size),
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
        )

    def seconds(self, steps: int) -> float:
        """Returns the seconds per step, not counting batches that were loaded before the clock started.

        Times at least two batches per worker: workers finish together, so batches arrive in bursts.
        """
        steps = max(steps, self.ahead - 1)
        batches = itertools.islice(self._forever(), self.ahead + steps)
        for _ in range(self.ahead):
            self.step(*next(batches))
        self._settle()
        start = time.perf_counter()
        for images, targets in batches:
            self.step(images, targets)
        self._settle()
        return (time.perf_counter() - start) / steps

    def step(self, image: Tensor, target: Tensor) -> None:
        """The body of `train_one_epoch`."""
        image, target = image.to(self.device), target.to(self.device)
        with torch.autocast(self.device.type, torch.float16, enabled=self.scaler is not None):
            output = self.model(image)
            loss = self.criterion(output, target)
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        _, predicted = output.topk(min(5, output.shape[1]), 1, True, True)
        correct = predicted.t().eq(target[None])
        for k in (1, 5):
            (correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / len(target))).item()
        loss.item()

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self.loader

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
