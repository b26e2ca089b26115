"""stabletrain: a trainer in which no unsafe update ever reaches the weights."""

# import nothing heavier here: `python train.py --help` and config errors must not load torch
from stabletrain.config.moved import install

__version__ = "0.1.0"

install()
