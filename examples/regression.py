"""Regression: how far diabetes has progressed after a year, from ten measurements of each patient.

    python train.py --config-dir examples/conf experiment=regression

Takes a second on two CPU cores. Result: `val/r2` 0.47, the share of the outcome's variance that is explained.

The data is scikit-learn's (442 patients, Efron et al. 2004, "Least Angle Regression"), the loss `objective=mse`.

A fault to try: `data.unrecorded=1` leaves the outcome of one patient unrecorded, which a CSV file gives as NaN. Each
step that reads this patient is skipped, and the report names the patient.
"""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from stabletrain import Batch


class Diabetes:
    """Ten measurements and the progression of diabetes, each with mean 0 and standard deviation 1 over `train`.

    Args:
        seed: seed of the split and of the order.
        unrecorded: number of patients in `train` whose outcome is NaN.
    """

    def __init__(self, seed: int, unrecorded: int = 0) -> None:
        measured, outcome = load_diabetes(return_X_y=True, scaled=False)
        inputs, targets = (torch.from_numpy(each).float() for each in (measured, outcome))
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        self.patients = {"train": order[100:], "val": order[:100]}
        known = self.patients["train"]
        self.inputs = (inputs - inputs[known].mean(dim=0)) / inputs[known].std(dim=0)
        self.targets = (targets - targets[known].mean()) / targets[known].std()
        self.targets[known[:unrecorded]] = torch.nan
        self.seed = seed

    def batches(self, size: int, split: str) -> int:
        """Returns the number of batches in one pass."""
        return -(-len(self.patients[split]) // size)

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Returns inputs `[size, 10]` and targets `[size]`; random patients in `train`, all in order in `val`."""
        patients = self.patients[split]
        if split == "train":
            generator = torch.Generator().manual_seed(self.seed * 2**32 + step)
            ids = patients[torch.randint(len(patients), (size,), generator=generator)]
        else:
            ids = patients[step * size : (step + 1) * size]
        return Batch(self.inputs[ids], self.targets[ids], ids, [f"patient {number}" for number in ids.tolist()])


class MLP(nn.Module):
    """A network with two hidden layers.

    Args:
        width: units of a hidden layer.
        dropout: share of hidden units that a training step leaves out.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns one number for each patient: `[batch, 10]` -> `[batch, 1]`."""
        return self.layers(inputs)
