"""The objective: what a step minimises, and what an evaluation reports beside it.

| option | outputs of the model | targets | beside `val/loss` |
|---|---|---|---|
| cross_entropy | logits `[batch, classes]` or `[batch, time, vocab]` | class ids | `val/accuracy` |
| mse | the targets' shape | floats | `val/r2` |
| bce | logits in the targets' shape | 0 and 1, or probabilities | `val/accuracy` |
| your own | what your loss takes | any | its terms, and its `metrics` |

A loss of the user's own is any callable `(outputs, batch, n_valid)` (`custom.py`). The cross-entropy of a large
vocabulary is computed in chunks of tokens (`chunked_loss.py`).
"""

from stabletrain.stability.objective.base import Objective
from stabletrain.stability.objective.bce import BCE
from stabletrain.stability.objective.cross_entropy import CrossEntropy, NoZLoss, ZLoss, z_loss
from stabletrain.stability.objective.custom import Custom
from stabletrain.stability.objective.mse import MSE
from stabletrain.stability.objective.output_embeddings import MuCentering, MuLoss

__all__ = [
    "BCE",
    "MSE",
    "CrossEntropy",
    "Custom",
    "MuCentering",
    "MuLoss",
    "NoZLoss",
    "Objective",
    "ZLoss",
    "z_loss",
]
