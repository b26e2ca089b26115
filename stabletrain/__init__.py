"""stabletrain: a trainer in which no unsafe update ever reaches the weights.

Kept free of imports, so that `python train.py --help` and a config error answer without loading torch.
"""

__version__ = "0.1.0"
