"""The fixes of a prediction: the signal's overrides, without those that the run already has."""

import math
from collections.abc import Mapping

from stabletrain.forecast.signals import Signal

ADAM = ("adamw", "stable_adamw", "spam", "muon")
"""Optimizers with the key `betas`."""


def fixes(signal: Signal, choices: Mapping[str, str], rate: float) -> tuple[str, ...]:
    """Returns overrides, best first.

    Args:
        signal: what is in trouble.
        choices: the option of each config group; empty if not known.
        rate: peak learning rate; NaN if not known.
    """
    found = []
    for fix in signal.fix:
        key, _, value = fix.partition("=")
        if key in choices and (choices[key] == value or (key == "qknorm" and choices[key] != "none")):
            continue
        if key == "optimizer.betas" and choices.get("optimizer", "adamw") not in ADAM:
            continue
        if key == "optimizer" and choices.get(key, "adamw") != "adamw":
            continue
        if "{lr}" in fix:
            if math.isnan(rate):
                continue
            fix = fix.format(lr=f"{rate / 3:.2g}")
        found.append(fix)
    return tuple(found)
