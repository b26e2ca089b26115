"""What a run was set to, as one flat mapping, and what of it differs between runs.

From `.hydra/config.yaml`, the configuration as composed, where it is there; the options chosen in the groups come from
`run.json`. A sweep's files are nearly the same text, so each block of one is parsed once in a process.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""LibYAML's where PyYAML was built with it: ten times as fast."""

WITHOUT_EFFECT = ("resume", "wandb", "report")
"""Keys, and groups, that change nothing that is compared."""

ABSENT = None
"""The value of a key that a run does not have."""

Value = str | int | float | bool | None


@runtime_checkable
class Configured(Protocol):
    """A run, as far as its settings go; see `runs.py`."""

    @property
    def settings(self) -> Mapping[str, Value]: ...
    @property
    def overrides(self) -> Mapping[str, str]: ...
    @property
    def composed(self) -> bool: ...


def read_settings(
    folder: Path, choices: Mapping[str, Any], overrides: Mapping[str, str]
) -> tuple[dict[str, Value], bool]:
    """The settings of the run in `folder`: key to number, word, truth value or None; a list, or NaN, as its text.

    A group's name stands for the option that was chosen in it. Where the configuration is missing or damaged there are
    only the choices and what was typed: then the second value is False.
    """
    settings: dict[str, Value] = {}
    composed = True
    try:
        for block in split((folder / ".hydra" / "config.yaml").read_text(encoding="utf-8")):
            settings.update(parse(block))
    except (OSError, ValueError, yaml.YAMLError):
        settings = {key: scalar(value) for key, value in overrides.items()}
        composed = False
    settings.update((group, option) for group, option in choices.items() if isinstance(option, str))
    return {key: value for key, value in settings.items() if key.partition(".")[0] not in WITHOUT_EFFECT}, composed


def split(text: str) -> list[str]:
    """The blocks of a YAML mapping in block style, one for each key of the outermost level."""
    blocks: list[list[str]] = []
    for line in text.splitlines(keepends=True):
        if not blocks or line[0] not in " \t-#\r\n":
            blocks.append([])
        blocks[-1].append(line)
    return ["".join(block) for block in blocks]


@lru_cache(maxsize=4096)
def parse(block: str) -> dict[str, Value]:
    """A block's settings, dotted keys to plain values; what builds an object (`_target_`) is no setting.

    Raises:
        ValueError: it is no mapping.
        yaml.YAMLError: it is no YAML.
    """
    tree = yaml.load(block, LOADER)
    if not isinstance(tree, dict):
        raise ValueError(f"a configuration is a mapping, not {block[:40]!r}")
    return dict(leaves(tree))


def leaves(tree: Mapping[Any, Any], above: str = "") -> Iterable[tuple[str, Value]]:
    """Every leaf of a nested mapping with its dotted key."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, dict):
            yield from leaves(value, f"{key}.")
        elif name != "_target_":
            is_plain = value is None or (isinstance(value, str | int | float) and value == value)
            yield key, value if is_plain else str(value)  # NaN, which equals nothing, as its name


def scalar(text: str) -> Value:
    """What was typed as a value: `1e-3` is a number, `true` a truth value, anything else that is no scalar its text."""
    try:
        return float(text) if any(letter in text for letter in ".eE") else int(text)
    except ValueError:
        return {"true": True, "false": False, "null": None}.get(text.lower(), text)


def shown(value: Value) -> str:
    """A setting as one would type it."""
    if value is ABSENT:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def varied(runs: Sequence[Configured]) -> list[str]:
    """The keys whose values differ between the runs: those that were typed, in that order, then all others.

    Runs that nothing is known of, as their record is damaged, are left out.
    """
    known = [run for run in runs if run.settings]
    typed = dict.fromkeys(typed_keys(known))
    keys = typed | dict.fromkeys(key for run in known for key in run.settings)
    return [
        key
        for key in keys
        if len({value_of(run, key) for run in known if run.composed or key in run.settings or key in typed}) > 1
    ]


def shared(runs: Sequence[Configured]) -> dict[str, Value]:
    """The settings that all runs have in common, key to value; those that were typed first."""
    known = [run for run in runs if run.settings]
    others = set(varied(known))
    values = {key: value for run in known for key, value in run.settings.items()}
    keys = dict.fromkeys([*typed_keys(known), *values])
    return {key: values[key] for key in keys if key not in others and key in values}


def telling(runs: Sequence[Configured], but: Sequence[str] = ("seed",)) -> list[str]:
    """The varied keys that tell runs apart: those that were typed, and of the others what does not follow from them.

    `stability=qknorm` chooses the option of `qknorm`, and so on: such a key says nothing that is not said already.

    Args:
        but: keys that are no matter, in which runs of one group may differ.
    """
    known = [run for run in runs if run.settings]
    keys, typed = [key for key in varied(known) if key not in but], set(typed_keys(known))
    found = [key for key in keys if key in typed]
    for key in keys:
        if key not in typed and not follows(known, key, found):
            found.append(key)
    return found


def enough(runs: Sequence[Configured], keys: Sequence[str]) -> list[str]:
    """As few of the keys as tell the same runs apart: each that follows from those before it is left out."""
    known, found = [run for run in runs if run.settings], []
    for key in keys:
        if not follows(known, key, found):
            found.append(key)
    return found


def follows(runs: Sequence[Configured], key: str, others: Sequence[str]) -> bool:
    """Whether runs that agree in the other keys agree in this one."""
    values: dict[tuple, Value] = {}
    return all(
        values.setdefault(tuple(value_of(run, other) for other in others), value_of(run, key)) == value_of(run, key)
        for run in runs
    )


def typed_keys(runs: Sequence[Configured]) -> list[str]:
    """The keys that were typed for any of the runs, in that order, without those that change nothing."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    return [key for key in keys if key.partition(".")[0] not in (*WITHOUT_EFFECT, "hydra")]


def value_of(run: Configured, key: str) -> Value:
    """A run's value of a key; a typed key that is no setting of the composed run, such as `experiment`, as typed."""
    return run.settings[key] if key in run.settings else run.overrides.get(key, ABSENT)
