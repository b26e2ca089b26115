"""Training with other trainers, on the same model, batches, precision, optimizer and clipping, otherwise with their
defaults.

Lightning's `Trainer` and transformers' `Trainer`, plain and with their own NaN tools: `detect_anomaly=True` and
`debug="underflow_overflow"`. Logging, saving and progress bars are off. Each round fits anew from the same weights; the
clock starts after the warm-up steps. The bare loop, the same loop with `Guard`, and this project's defaults are
measured beside them, as steps of continuing runs. Requires `pip install -e ".[bench]"`.
"""

import copy
import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bare import BareLoop, cosine
from measuring import Clock
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from stabletrain.errors import ConfigError
from stabletrain.records import Batch

WARM_UP = 3
"""Steps of a fit before its clock starts."""


def check_installed() -> None:
    """Raises ConfigError, naming the extra to install, if a package is missing."""
    missing = [name for name in ("lightning", "transformers", "accelerate") if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(f'--others needs {", ".join(missing)}: pip install -e ".[bench]"')


class Ready(Dataset):
    """A data set of prepared batches, cycled through."""

    def __init__(self, batches: Sequence[Batch], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = self.batches[index % len(self.batches)]
        return {"inputs": batch.inputs, "labels": batch.targets}


class WithLoss(nn.Module):
    """A model that returns its loss, as transformers' trainer requires."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns loss and logits."""
        logits = self.model(inputs)
        return {"loss": F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten()), "logits": logits}


class Others:
    """Fits of `steps` steps by other trainers.

    Args:
        model: each fit starts from a copy of it.
        batches: on its device.
        optimizer: builds the optimizer of a model.
        bf16: use mixed precision.
        steps: timed steps of a fit, after the warm-up steps.
        clock: times the fits.
        folder: where a trainer may write.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        optimizer: Callable[[nn.Module], Optimizer],
        *,
        bf16: bool,
        steps: int,
        clock: Clock,
        folder: Path,
    ) -> None:
        self.model, self.batches, self.optimizer, self.bf16 = copy.deepcopy(model), batches, optimizer, bf16
        self.steps, self.clock, self.folder = steps, clock, folder
        self.device = batches[0].inputs.device
        for name in ("lightning.pytorch", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)

    def kinds(self) -> dict[str, Callable[[int], float]]:
        """Returns a function per trainer that gives its seconds per step."""
        return {
            "lightning": partial(self.lightning, anomaly=False),
            "lightning, detect_anomaly": partial(self.lightning, anomaly=True),
            "transformers": partial(self.transformers, debug=""),
            "transformers, underflow_overflow": partial(self.transformers, debug="underflow_overflow"),
        }

    def made(self) -> tuple[nn.Module, Optimizer, LambdaLR]:
        """Builds a model, its optimizer and its schedule, for one fit."""
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model)
        return model, optimizer, LambdaLR(optimizer, partial(cosine, warmup=50, steps=1_000_000))

    def lightning(self, number: int, *, anomaly: bool) -> float:
        """Fits with Lightning; returns the seconds per step."""
        import lightning

        del number
        model, optimizer, schedule = self.made()
        timer = Timer(self.clock)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: dict[str, Tensor]) -> Tensor:
                return F.cross_entropy(self.model(batch["inputs"]).flatten(0, -2).float(), batch["labels"].flatten())

            def configure_optimizers(self) -> Any:
                return [optimizer], [{"scheduler": schedule, "interval": "step"}]

            def configure_gradient_clipping(self, optimizer: Any, *args: Any, **named: Any) -> None:
                clip_grad_norm_(
                    self.parameters(), 1.0
                )  # Lightning's own clipping rejects a fused optimizer in mixed precision

        class Timing(lightning.Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                timer.at(batch_idx)

            def on_train_end(self, trainer: Any, module: Any) -> None:
                timer.end()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                accelerator="gpu" if self.device.type == "cuda" else "cpu",
                devices=1,
                precision="bf16-mixed" if self.bf16 else "32-true",
                max_steps=WARM_UP + self.steps,
                detect_anomaly=anomaly,
                callbacks=[Timing()],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=self.folder,
            )
            trainer.fit(Module(), DataLoader(Ready(self.batches, WARM_UP + self.steps), batch_size=None))
        torch.autograd.set_detect_anomaly(False)
        return timer.seconds / self.steps

    def transformers(self, number: int, *, debug: str) -> float:
        """Fits with transformers; returns the seconds per step."""
        import transformers

        del number
        model, optimizer, schedule = self.made()
        timer = Timer(self.clock)

        class Timing(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
                timer.at(state.global_step)

            def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
                timer.end()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = transformers.TrainingArguments(
                output_dir=str(self.folder),
                max_steps=WARM_UP + self.steps,
                per_device_train_batch_size=1,
                max_grad_norm=1.0,
                bf16=self.bf16,
                debug=debug,
                use_cpu=self.device.type == "cpu",
                dataloader_pin_memory=False,
                remove_unused_columns=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            transformers.Trainer(
                model=WithLoss(model),
                args=arguments,
                train_dataset=Ready(self.batches, WARM_UP + self.steps),
                data_collator=lambda items: items[0],
                optimizers=(optimizer, schedule),
                callbacks=[Timing()],
            ).train()
        return timer.seconds / self.steps


class Timer:
    """Times a fit from step `WARM_UP`, counted from 0, to its end."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.start, self.seconds = clock, 0.0, 0.0

    def at(self, step: int) -> None:
        """Starts the clock if `step`, which is about to begin, is the first timed one."""
        if step == WARM_UP:
            self.start = self.clock.now()

    def end(self) -> None:
        """Stops the clock."""
        self.seconds = self.clock.now() - self.start


def several(loop: Callable[[], object], steps: int, clock: Clock) -> Callable[[int], float]:
    """Returns a function that gives a continuing loop's seconds per step, over as many steps as a fit."""
    return lambda number: clock.seconds(lambda: [loop() for _ in range(steps)]) / steps


def beside(
    bare: BareLoop, run: Callable[[], object], guarded: Callable[[], object], others: Others
) -> dict[str, Callable[[int], float]]:
    """Returns all kinds, including the bare loop, the same loop with `Guard`, and this project's run."""
    loops = {"bare": bare, "bare with Guard": guarded, "defaults": run}
    return {name: several(loop, others.steps, others.clock) for name, loop in loops.items()} | others.kinds()
