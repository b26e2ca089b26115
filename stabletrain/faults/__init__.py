"""Faults, put in on purpose: to test what keeps a training run alive, and to watch it at work.

| kind | what happens | `at` counts |
|---|---|---|
| input, label, ignored, empty, poison | bad data | data positions |
| activation, gradient, learning_rate, bitflip | a bad number within a step | ticks |
| disk_full, kill | a checkpoint's write does not end | ticks done |
| wandb | W&B is out of reach from there on | ticks done |
| plan | several of these | |

A tick is a step executed, whether it was rolled back later or not. Each kind wraps one object of the run, or has a step
begin with a preparation; with `none` there is nothing of all this in a run, and between two faults the step runs the
code it runs with `none`. Everything here is a function of the planned numbers; nothing is remembered.
"""

from stabletrain.faults.bit_flip import BitFlip
from stabletrain.faults.in_data import Empty, Ignored, Input, Label, Poison
from stabletrain.faults.in_io import DiskFull, Kill, LostWandb
from stabletrain.faults.in_step import Activation, Gradient, LearningRate
from stabletrain.faults.plan import Plan
from stabletrain.faults.planned import NoFaults

__all__ = [
    "Activation",
    "BitFlip",
    "DiskFull",
    "Empty",
    "Gradient",
    "Ignored",
    "Input",
    "Kill",
    "Label",
    "LearningRate",
    "LostWandb",
    "NoFaults",
    "Plan",
    "Poison",
]
