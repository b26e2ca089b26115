"""The whole zoo: the faults used to make the rules, and those used only to test them."""

from tests.reliability.zoo.faults import ALL as FIRST
from tests.reliability.zoo.outsiders import OUTSIDERS

ALL = [*FIRST, *OUTSIDERS]
