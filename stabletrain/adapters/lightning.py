"""`GuardCallback` for lightning, under its public name; see `stabletrain/beside/adapters/lightning.py`."""

from stabletrain.beside.adapters.lightning import GuardCallback

__all__ = ["GuardCallback"]
