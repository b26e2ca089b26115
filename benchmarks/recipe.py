"""torchvision's reference recipe for classification: its transforms, its loader and its training loop.

Source: references/classification of torchvision, `presets.py` and `train.py` (`train_one_epoch`): PIL images,
RandomResizedCrop, a flip, PILToTensor, ConvertImageDtype, Normalize, in worker processes; SGD at 0.1 with momentum 0.9
and decay 1e-4; fp32, or fp16 with `--amp`; loss and accuracy read in each step. Only the data differ: noise.
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
    """Pixels as PIL images, transformed when they are asked for, as torchvision's own data sets do."""

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
    """The recipe's loop, timed by itself.

    Args:
        model: on its device.
        pixels: uint8 `[n, 3, height, width]`.
        labels: of them.
        size: pixels of a side of what the model sees.
        batch_size: images a step.
        device: where the model lives.
        workers: processes that make batches; the recipe's default is 16.
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
        """Seconds a step over so many, once the batches that were made before the clock started are used up.

        At least two batches of each worker are timed, since they finish together and their batches come in bursts.
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
        """`train_one_epoch`'s body."""
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
