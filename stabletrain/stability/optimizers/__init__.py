"""Optimizers: what turns gradients into updates.

Every one takes the guard's gate on the device (`found_inf`), so an update is withheld without the host ever asking:
PyTorch's by their fused kernels, the others as `gated.py` does it.
"""

from stabletrain.stability.optimizers.adamw import SPAM, AdamW, StableAdamW
from stabletrain.stability.optimizers.muon import Muon
from stabletrain.stability.optimizers.sgd import SGD
from stabletrain.stability.parameter_roles import decayed

__all__ = ["SGD", "SPAM", "AdamW", "Muon", "StableAdamW", "decayed"]
