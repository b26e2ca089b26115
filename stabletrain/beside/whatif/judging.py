"""Which arms apply: the checks of a configuration and the table of resumes decide, as for a resume that is typed.

An arm is refused with the sentence that refuses the same resume. An arm that changes no step is refused too, because
the run has it already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stabletrain.beside.whatif.arms import NOTHING, RECORDED, Arm
from stabletrain.beside.whatif.base import BaseRun
from stabletrain.config import trust
from stabletrain.config.arguments import Arguments
from stabletrain.config.checks import check
from stabletrain.config.jobs import composed
from stabletrain.config.resuming import GROUPS, acting, changed_keys, check_resume, row_of, settings
from stabletrain.errors import ConfigError
from stabletrain.program import conf_folder


def judged(arm: Arm, base: BaseRun) -> Arm:
    """Returns an arm with the reason for which it applies, or does not. Builds and writes nothing."""
    if arm.refused or (arm.edit and not arm.overrides):
        return arm
    if arm.named == RECORDED and (named := trust.foreign_argument([], arm.overrides)):
        return replace(arm, refused=f"the run's record names {named}, which could run any code; fix: type it yourself")
    # Only the folders around this path are read: the state itself may have to be computed first.
    checkpoint = base.run / "checkpoints" / f"step-{base.step:08d}"
    try:
        with composed(base.resumed(checkpoint, arm.overrides, base.run / "whatif"), conf_folder()) as (cfg, choices):
            check(cfg)
            now = settings(cfg, choices)
            check_resume(cfg.resume, now, Path(cfg.resume))
            changes = changed_keys(base.settings, now)
    except ConfigError as error:
        return replace(arm, refused=str(error))
    if arm.name != NOTHING and not acting(changes):
        return replace(arm, refused="the run has it already")
    return replace(arm, about=arm.about or about(changes))


def usual_lr(base: BaseRun) -> float | None:
    """Returns the learning rate that the run's option of `optimizer` has by itself; None if there is none."""
    chosen = Arguments(base.arguments.options, [f"optimizer={base.settings.choices.get('optimizer')}"])
    try:
        with composed(chosen, conf_folder()) as (cfg, choices):
            found = settings(cfg, choices).flat().get("optimizer.lr")
    except ConfigError:
        return None
    return found if isinstance(found, int | float) else None


def about(changes: Mapping[str, Sequence[Any]]) -> str:
    """Returns what the table of resumes says of the changed options; the changed keys if it says nothing."""
    rows = [f"{key}: {row_of(key, *changes[key]).text}" for key in acting(changes) if key in GROUPS]
    if rows:
        return "; ".join(rows)
    return ", ".join(f"{key} {changes[key][0]} -> {changes[key][1]}" for key in acting(changes))


def judge_all(arms: Sequence[Arm], base: BaseRun) -> list[Arm]:
    """Returns the arms with their reasons.

    Raises:
        ConfigError: not even `nothing` applies, so the run cannot be resumed at all; or the user's own arm does not.
    """
    found = [judged(arm, base) for arm in arms]
    for arm in found:
        if arm.refused and arm.name == NOTHING:
            raise ConfigError(f"{base.run} cannot be resumed: {arm.refused}")
        if arm.refused and arm.named == "you":
            raise ConfigError(f"the arm {arm.name} does not apply: {arm.refused}")
    return found
