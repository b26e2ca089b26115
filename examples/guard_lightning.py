"""Trains a small network with Lightning and the guard, through a batch that holds NaN.

pip install -e ".[lightning]" && python examples/guard_lightning.py
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stabletrain.adapters.lightning import GuardCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    pl.seed_everything(0)
    inputs = torch.randn(256, 8)
    labels = (inputs.sum(1) > 0).long()
    inputs[100] = float("nan")

    guard = GuardCallback(folder="incidents")  # the line to add
    trainer = pl.Trainer(max_epochs=4, gradient_clip_val=1.0, callbacks=[guard], accelerator="cpu", logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Classifier(), DataLoader(TensorDataset(inputs, labels), batch_size=32))

    withheld = guard.guard.skipped
    print(f"{withheld} steps withheld of {trainer.global_step}: {guard.guard.incidents[0].verdict}")


if __name__ == "__main__":
    main()
