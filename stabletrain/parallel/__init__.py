"""Several processes that train one model: PyTorch's DDP and FSDP2 under torchrun, and what the ranks must agree on.

| file | |
|---|---|
| alone | one process: nothing is shared |
| shared | what every kind of several ranks has: parts of the batch, one small reduction a step, one verdict |
| ddp | every rank has the whole model; gradients are averaged |
| fsdp | every rank has a part of every weight, gradient and moment |
| replicas | whether ranks that have the whole model still have the same one |
| checkpoints | one writer, and answers that are the same on every rank |
"""

from stabletrain.parallel.alone import Alone
from stabletrain.parallel.checkpoints import SharedCheckpoints
from stabletrain.parallel.ddp import DDP
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.options import auto, ddp, fsdp

__all__ = ["DDP", "FSDP", "Alone", "SharedCheckpoints", "auto", "ddp", "fsdp"]
