"""How far a run lies from those that the forecast was fitted and scored on, and what it can say from afar.

A run is near if it has a model, an optimizer, a precision and a norm placement of the recorded runs
(`docs/evidence/foresight.md`). Healthy values and probabilities were measured on these. On other runs a forecast states
its signals and no percentage, and no fix under which its own numbers would raise the same alarm again.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from stabletrain.beside.forecast.model import Model, outlook
from stabletrain.beside.forecast.series import Heights
from stabletrain.beside.forecast.signals import BY_NAME
from stabletrain.config.resuming import ADDED_GROUPS
from stabletrain.forensics.diagnosis.wording import FAR_TOO_HIGH

RECORDED = {
    "model": ("gpt_nano", "resnet20", "nf_resnet20"),
    "optimizer": ("adamw", "sgd", "muon"),
    "precision": ("fp32", "bf16", "fp16"),
    "norm_placement": ("pre",),
}
"""The options of the recorded runs."""

RATE = "optimizer.lr="
NO_REMEDY = ("clipping=",)
"""Fixes that leave their own signal as it is: gradient norms are measured before they are clipped."""

SLOWER = 3.0
"""By how much a fix lowers the learning rate, if updates are not long for the weights."""


def slower(heights: Heights, model: Model, too_high: float) -> float:
    """Returns by how much a fix lowers the learning rate: so far that no update is longer than in healthy runs.

    A third is enough where updates have an ordinary length for their weights. It is not enough at a thousand times the
    right learning rate, at which the weights soon grow as long as the updates.

    Args:
        heights: of this look.
        model: with the values of healthy runs.
        too_high: the learning rate over the optimizer's usual one.
    """
    ratio = BY_NAME["update_ratio"]
    longest = max((ratio.value(height) for (name, _), height in heights.now.items() if name == ratio.name), default=0.0)
    measured = longest / model.healthy[ratio.name] if ratio.threshold <= longest < math.inf else 0.0
    return max(SLOWER, measured, too_high if too_high >= FAR_TOO_HIGH else 0.0)


def distance(choices: Mapping[str, str]) -> str:
    """Returns what a run has that no recorded run had, as the end of a message; empty if nothing.

    Args:
        choices: the option of each config group; a user's own loop has no model among them.
    """
    model = choices.get("model")
    if model not in RECORDED["model"]:
        this = f"this is model={model}" if model else "this is neither"
        return f"no percentage: fitted on small built-in GPTs and ResNets; {this}"
    choices = {**ADDED_GROUPS, **choices}
    for group in ("optimizer", "precision", "norm_placement"):
        if choices.get(group) not in RECORDED[group]:
            known = ", ".join(RECORDED[group])
            return f"no percentage: fitted on runs with {group}={known}; this is {choices.get(group, 'unknown')}"
    return ""


def helps_from_afar(fix: str, heights: Heights, model: Model, slower: float = SLOWER) -> bool:
    """Returns whether a fix would end the alarm by the forecast's own numbers.

    A lower learning rate slows all trends and shortens all updates by the same factor; the levels of now remain.
    """
    if fix.startswith(NO_REMEDY):
        return False
    if not fix.startswith(RATE):
        return True
    now = {each: height - math.log(slower) * (each[0] == "update_ratio") for each, height in heights.now.items()}
    later = {each: now[each] + (then - heights.now[each]) / slower for each, then in heights.later.items()}
    return outlook(replace(heights, now=now, later=later), model).probability < model.alarm
