"""The whole zoo: the faults that the rules were made with, and those that judged them."""

from tests.faults.zoo.faults import ALL as FIRST
from tests.faults.zoo.outsiders import OUTSIDERS

ALL = [*FIRST, *OUTSIDERS]
