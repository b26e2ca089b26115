"""Fault injection: tests and demonstrates how a run survives faults.

| kind | fault | `at` counts |
|---|---|---|
| input, label, ignored, empty, poison | bad data | data positions |
| activation, gradient, learning_rate, bitflip, optimizer | a bad number in a step | ticks |
| disk_full, kill | an interrupted write of a checkpoint | ticks done |
| wandb | W&B is unreachable from then on | ticks done |
| plan | several of these | |

A tick is an executed step, including steps that are rolled back later. Each kind wraps one object of the run or adds
hooks at the start of a step. With `none`, and between two faults, a step runs exactly the same code. Faults are
stateless: each is a function of the planned numbers.
"""

from stabletrain.beside.faults.in_data import Empty, Ignored, Input, Label, Poison
from stabletrain.beside.faults.in_io import DiskFull, Kill, LostWandb
from stabletrain.beside.faults.in_state import BitFlip, Update
from stabletrain.beside.faults.in_step import Activation, Gradient, LearningRate
from stabletrain.beside.faults.plan import Plan

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
    "Plan",
    "Poison",
    "Update",
]
