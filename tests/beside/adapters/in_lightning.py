"""Modules and a Trainer as users of Lightning write them; importing it takes seconds."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from stabletrain.beside.adapters.lightning import GuardCallback
from tests.beside.adapters.given import MARK, SIZE, STEPS
from tests.guard.given import batches, bits, network

__all__ = ["CSVLogger", "GuardCallback"]


class Module(pl.LightningModule):
    """A module as users write it: logging, a metric, a list of outputs, a scheduler that is stepped with the optimizer.

    Attributes:
        losses: of all micro-batches.
        unsafe: the micro-batch at which the loss is computed in an unsafe way; -1 for none.
    """

    def __init__(self, unsafe=-1):
        super().__init__()
        self.net = network()
        self.mean = torchmetrics.MeanMetric()
        self.losses, self.calls, self.unsafe = [], 0, unsafe

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.calls += 1
        loss = F.cross_entropy(logits, y)
        if batch_idx == self.unsafe:
            saturated = torch.softmax(logits.float() * torch.where(x[:, :1] == MARK, 1e5, 1.0), dim=1)
            loss = -torch.log(saturated)[torch.arange(len(y)), y].mean()  # the unsafe operation
        self.losses.append(loss.detach())
        self.mean.update(batch_idx)
        self.log("loss", loss)
        self.log_dict({"also": loss})
        self.print("step", batch_idx)
        return {"loss": loss, "more": 1}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Seen(pl.Callback):
    """Copies what a withheld step must not change: at the end of each step, and what each step begins with."""

    def __init__(self):
        self.states, self.logged = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.states.append(bits(pl_module.net, trainer.optimizers[0]))
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def data(fault=None, count=STEPS, parts=1):
    """Batches of Lightning's loader; `fault` is the micro-batch whose sample 3 holds NaN."""
    found = batches(count * parts, SIZE)
    x, y = torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])
    if fault is not None:
        x[fault * SIZE + 3, 1] = float("nan")
    return DataLoader(TensorDataset(x, y), SIZE)


def marked(module, loader, number):
    """The loader, with sample 5 of one micro-batch marked, while another class than its own is likely."""
    module.net[-1].bias.data[0] = 9.0
    loader.dataset.tensors[0][number * SIZE + 5, 0] = MARK
    loader.dataset.tensors[1][number * SIZE + 5] = 1
    return loader


def train(module, loader, *callbacks, seed=2, **options):
    """Trains for one epoch; returns the Trainer and what was seen."""
    seen = Seen()
    chosen = {"logger": False, "enable_checkpointing": False, "max_epochs": 1} | options
    trainer = pl.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        callbacks=[*callbacks, seen], **chosen,
    )  # fmt: skip
    torch.manual_seed(seed)
    trainer.fit(module, loader)
    return trainer, seen


def scheduler(trainer):
    return trainer.lr_scheduler_configs[0].scheduler


def fp16(init_scale=1024.0):
    """Lightning's fp16 on the CPU, which its own choice of precision does not offer."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=init_scale))]}


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Quasi(Module):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Iterating(Module):
    def training_step(self, dataloader_iter):
        return super().training_step(*next(dataloader_iter)[:2])


class Tensors(pl.LightningModule):
    """A module that takes no number of the batch, skips one, and has no scheduler."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch):
        (x,) = batch
        return None if x[0, 0] > 100 else self.net(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
