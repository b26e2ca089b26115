"""Optimizers: what turns gradients into updates, a file for each kind.

Fused kernels are the default where PyTorch has them: they take the guard's gate on the device (`found_inf`), so an
update is withheld without the host ever asking. The others cost one host read a step.
"""

from stabletrain.stability.optimizers.adamw import AdamW
from stabletrain.stability.optimizers.groups import decayed
from stabletrain.stability.optimizers.muon import Muon
from stabletrain.stability.optimizers.sgd import SGD
from stabletrain.stability.optimizers.spam import SPAM
from stabletrain.stability.optimizers.stable_adamw import StableAdamW

__all__ = ["SGD", "SPAM", "AdamW", "Muon", "StableAdamW", "decayed"]
