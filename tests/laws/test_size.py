"""A reader can hold the package in mind: few functions take the configuration, and few roles are protocols."""

import pytest

from tests.runs import ROOT
from tests.tools.figures import Package

FUNCTIONS_WITH_CFG = 25
PROTOCOLS = 30


@pytest.mark.slow
def test_the_configuration_stops_at_the_door_and_roles_are_declared_once():
    totals = Package(ROOT).totals()
    assert totals["functions that take cfg"] <= FUNCTIONS_WITH_CFG, "take from Options what the function needs"
    assert totals["protocols"] <= PROTOCOLS, "a role is its null class: subclass it, or satisfy it"
