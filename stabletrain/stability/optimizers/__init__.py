"""Optimizers.

Each takes the guard's gate on the device (`found_inf`), so a skipped update costs no host read: PyTorch's optimizers
through their fused kernels, the others through `gated.py`.
"""

from stabletrain.stability.optimizers.adamw import SPAM, AdamW, StableAdamW
from stabletrain.stability.optimizers.muon import Muon
from stabletrain.stability.optimizers.sgd import SGD

__all__ = ["SGD", "SPAM", "AdamW", "Muon", "StableAdamW"]
