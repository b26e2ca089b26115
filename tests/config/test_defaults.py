"""A class that is called in code, without Hydra, has the values of its option."""

import inspect
from collections import defaultdict
from pydoc import locate

import pytest
from omegaconf import OmegaConf

from tests.runs import CONF

MONITORS = "stabletrain.monitors.monitors"
OWN = [(f"{MONITORS}.Monitors", "margin_every"), (f"{MONITORS}.FullMonitors", "margin_every")]
"""Arguments with a default of their own: five forward passes, which train.py alone takes unasked."""


def options():
    """Returns the values of the options of each class or function, by argument, without those taken from elsewhere."""
    found = defaultdict(lambda: defaultdict(list))
    for file in sorted(CONF.rglob("*.yaml")):
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        target = tree.pop("_target_", "")
        for key, value in tree.items():
            if target and not key.startswith("_") and not str(value).startswith("${"):
                found[target][key].append(tuple(value) if isinstance(value, list) else value)
    return found


OPTIONS = options()


@pytest.mark.beside(when=lambda target: target.startswith("stabletrain.beside"))
@pytest.mark.parametrize("target", sorted(OPTIONS))
def test_a_default_is_the_value_of_an_option(target):
    parameters = inspect.signature(locate(target)).parameters
    defaults = {key: parameters[key].default for key in OPTIONS[target] if key in parameters}
    others = {key: value for key, value in defaults.items() if not is_of(value, OPTIONS[target][key])}
    assert [*others] == [key for key in others if (target, key) in OWN], "write it in one of them as in the other"


def is_of(default, values):
    """Whether a default is one of the values; so is none, and one for a size that a run takes from its data."""
    same = any(default == value or (default != default and value != value) for value in values)  # or both are NaN
    return same or default is inspect.Parameter.empty or all(value is None for value in values)


def test_an_exception_is_one():
    for target, key in OWN:
        assert inspect.signature(locate(target)).parameters[key].default not in OPTIONS[target][key]
