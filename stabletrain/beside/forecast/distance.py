"""How far a run lies from those that the forecast was fitted and scored on, and what it can say from afar.

A run is near if it has a model, an optimizer and a precision of the recorded runs (`docs/foresight.md`). Healthy values
and probabilities were measured on these. On other runs a forecast states its signals and no percentage, and no fix
under which its own numbers would raise the same alarm again.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from stabletrain.beside.forecast.model import Model, outlook
from stabletrain.beside.forecast.series import Heights

RECORDED = {
    "model": ("gpt_nano", "resnet20", "nf_resnet20"),
    "optimizer": ("adamw", "sgd", "muon"),
    "precision": ("fp32", "bf16", "fp16"),
}
"""The options of the recorded runs."""

RATE = "optimizer.lr="
NO_REMEDY = ("clipping=",)
"""Fixes that leave their own signal as it is: gradient norms are measured before they are clipped."""

SHARE = 3
"""By how much a fix lowers the learning rate."""


def distance(choices: Mapping[str, str]) -> str:
    """Returns what a run has that no recorded run had, as the end of a message; empty if nothing.

    Args:
        choices: the option of each config group; a user's own loop has no model among them.
    """
    model = choices.get("model")
    if model not in RECORDED["model"]:
        this = f"this is model={model}" if model else "this is neither"
        return f"no percentage: fitted on small built-in GPTs and ResNets; {this}"
    for group in ("optimizer", "precision"):
        if choices.get(group) not in RECORDED[group]:
            known = ", ".join(RECORDED[group])
            return f"no percentage: fitted on runs with {group}={known}; this is {choices.get(group, 'unknown')}"
    return ""


def helps_from_afar(fix: str, heights: Heights, model: Model) -> bool:
    """Returns whether a fix would end the alarm by the forecast's own numbers.

    A lower learning rate slows all trends and shortens all updates by the same factor; the levels of now remain.
    """
    if fix.startswith(NO_REMEDY):
        return False
    if not fix.startswith(RATE):
        return True
    now = {each: height - math.log(SHARE) * (each[0] == "update_ratio") for each, height in heights.now.items()}
    later = {each: now[each] + (then - heights.now[each]) / SHARE for each, then in heights.later.items()}
    return outlook(replace(heights, now=now, later=later), model).probability < model.alarm
