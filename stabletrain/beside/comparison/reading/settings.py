"""A run's settings as one flat mapping, and which of them differ between runs.

Settings are read from `.hydra/config.yaml`, the composed configuration. The option chosen in each config group is read
from `run.json`, as are the settings that were changed when the run was resumed. The configurations of a sweep are
nearly the same text, so each top-level block is parsed only once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml

from stabletrain.stored.json_files import check_plain, read_file

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""LibYAML's loader if PyYAML was built with it, because it is much faster."""

WITHOUT_EFFECT = ("resume", "wandb", "report")
"""Keys and groups that do not affect training. A comparison ignores them."""

ABSENT = None
"""The value of a key that a run does not have."""

Value = str | int | float | bool | None


@runtime_checkable
class Configured(Protocol):
    """The part of a `Run` that holds its settings."""

    @property
    def settings(self) -> Mapping[str, Value]: ...
    @property
    def overrides(self) -> Mapping[str, str]: ...
    @property
    def composed(self) -> bool: ...


def read_settings(
    folder: Path, choices: Mapping[str, Any], overrides: Mapping[str, str]
) -> tuple[dict[str, Value], bool]:
    """Returns the settings of the run in `folder`, and whether they are complete.

    Lists and NaN are returned as text. The name of a config group maps to the option chosen in it. If the configuration
    is missing or damaged, only these choices and the overrides are known, and the second value is False.
    """
    settings: dict[str, Value] = {}
    composed = True
    try:
        for block in split(read_file(folder / ".hydra" / "config.yaml").decode()):
            settings.update(parse(block))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        settings = {key: override_value(value) for key, value in overrides.items()}
        composed = False
    settings.update((group, option) for group, option in choices.items() if isinstance(option, str))
    return {key: value for key, value in settings.items() if key.partition(".")[0] not in WITHOUT_EFFECT}, composed


def changed_settings(record: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the settings that a resumed run has changed and then trained with, at their last values."""
    found: dict[str, Value] = {}
    try:
        for change in record.get("changes", []):
            if change["step"] < record["final"].get("steps", math.inf):  # else no step was left to train
                found.update(leaves({key: now for key, (_, now) in change["keys"].items()}))
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}  # the record is damaged
    return {key: value for key, value in found.items() if key.partition(".")[0] not in WITHOUT_EFFECT}


def split(text: str) -> list[str]:
    """Splits a block-style YAML mapping into one block per top-level key, without what comes before the first key."""
    blocks: list[list[str]] = []
    for line in text.splitlines(keepends=True):
        if not blocks and (line.strip() in ("", "---") or line[0] in "#%"):
            continue  # comments and `---` before the first key: such a block would hold no mapping
        if not blocks or line[0] not in " \t-#\r\n":
            blocks.append([])
        blocks[-1].append(line)
    return ["".join(block) for block in blocks]


@lru_cache(maxsize=4096)
def parse(block: str) -> dict[str, Value]:
    """Parses one block into dotted keys and plain values, without `_target_`.

    Raises:
        ValueError: the block is not a mapping.
        yaml.YAMLError: the block is not valid YAML.
    """
    tree = yaml.load(block, LOADER)
    if not isinstance(tree, dict):
        raise ValueError(f"a configuration is a mapping, not {block[:40]!r}")
    check_plain(tree)
    return dict(leaves(tree))


def leaves(tree: Mapping[Any, Any], above: str = "") -> Iterable[tuple[str, Value]]:
    """Yields the dotted key and value of every leaf of a nested mapping."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, dict):
            yield from leaves(value, f"{key}.")
        elif name != "_target_":
            is_plain = value is None or (isinstance(value, str | int | float) and value == value)
            yield key, value if is_plain else str(value)  # NaN as text: it is not equal to itself


def override_value(text: str) -> Value:
    """Parses an override: `1e-3` is a number, `true` a bool, `null` None, and anything else is text."""
    try:
        return float(text) if any(letter in text for letter in ".eE") else int(text)
    except ValueError:
        return {"true": True, "false": False, "null": None}.get(text.lower(), text)


def setting_text(value: Value) -> str:
    """Formats a setting as the user would type it."""
    if value is ABSENT:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def varying_keys(runs: Sequence[Configured]) -> list[str]:
    """Returns the keys whose values differ between runs: first the overridden keys in their order, then the others.

    Ignores runs whose settings are unknown because their record is damaged.
    """
    # A run without its full configuration takes part only in keys that it has.
    known = [run for run in runs if run.settings]
    typed = dict.fromkeys(overridden_keys(known))
    keys = typed | dict.fromkeys(key for run in known for key in run.settings)
    return [
        key
        for key in keys
        if len({value_of(run, key) for run in known if run.composed or key in run.settings or key in typed}) > 1
    ]


def shared_settings(runs: Sequence[Configured]) -> dict[str, Value]:
    """Returns the settings that all runs have in common, overridden keys first."""
    known = [run for run in runs if run.settings]
    others = set(varying_keys(known))
    values = {key: value for run in known for key, value in run.settings.items()}
    keys = dict.fromkeys([*overridden_keys(known), *values])
    return {key: values[key] for key in keys if key not in others and key in values}


def distinguishing_keys(runs: Sequence[Configured], but: Sequence[str] = ("seed",)) -> list[str]:
    """Returns the varied keys that are needed to tell runs apart.

    Keeps every overridden key. Keeps any other key only if its value does not follow from the keys kept before it. For
    example, `stability=qknorm` also sets `qknorm`, so `qknorm` is left out.

    Args:
        but: keys to ignore.
    """
    known = [run for run in runs if run.settings]
    keys, typed = [key for key in varying_keys(known) if key not in but], set(overridden_keys(known))
    kept = [key for key in keys if key in typed]
    return without_implied(known, [key for key in keys if key not in typed], kept)


def without_implied(runs: Sequence[Configured], keys: Sequence[str], kept: Sequence[str] = ()) -> list[str]:
    """Returns the `kept` keys, then those of `keys` whose value does not follow from the keys before it."""
    known, found = [run for run in runs if run.settings], [*kept]
    for key in keys:
        if not is_implied(known, key, found):
            found.append(key)
    return found


def is_implied(runs: Sequence[Configured], key: str, others: Sequence[str]) -> bool:
    """Returns whether runs that agree in `others` also agree in `key`."""
    values: dict[tuple, Value] = {}
    return all(
        values.setdefault(tuple(value_of(run, other) for other in others), value_of(run, key)) == value_of(run, key)
        for run in runs
    )


def overridden_keys(runs: Sequence[Configured]) -> list[str]:
    """Returns the keys that any run overrides, in order, without keys that do not affect training."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    return [key for key in keys if key.partition(".")[0] not in (*WITHOUT_EFFECT, "hydra")]


def value_of(run: Configured, key: str) -> Value:
    """Returns a run's value of a key. An override that is not in the configuration, such as `experiment`, is text."""
    return run.settings[key] if key in run.settings else run.overrides.get(key, ABSENT)
