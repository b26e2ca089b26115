"""The whole zoo: the faults used to make the rules, and those used only to test them."""

from benchmarks.reliability.zoo.faults import ALL as FIRST
from benchmarks.reliability.zoo.outsiders import OUTSIDERS

ALL = [*FIRST, *OUTSIDERS]
