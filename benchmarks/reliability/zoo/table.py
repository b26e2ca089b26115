"""The whole zoo: the faults that the rules were made with, and those that judged them."""

from benchmarks.reliability.zoo.faults import ALL as FIRST
from benchmarks.reliability.zoo.outsiders import OUTSIDERS

ALL = [*FIRST, *OUTSIDERS]
