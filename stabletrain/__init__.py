"""stabletrain: a trainer in which no unsafe update ever reaches the weights.

Imports nothing but the table of moved modules, so that `python train.py --help` and a config error answer without
loading torch.
"""

from stabletrain.config.moved import install

__version__ = "0.1.0"

install()
