"""`GuardCallback` for transformers, under its public name; see `stabletrain/beside/adapters/transformers.py`."""

from stabletrain.beside.adapters.transformers import GuardCallback

__all__ = ["GuardCallback"]
