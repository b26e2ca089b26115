"""The fixes of a prediction: the signal's overrides, without those that the run already has or would refuse."""

import json
from collections.abc import Mapping
from typing import Any

from stabletrain.beside.forecast.signals import Signal

EITHER = ("qknorm", "qkclip")
"""Groups of which a run may use one: the other one is refused."""


def fixes(signal: Signal, choices: Mapping[str, str], optimizer: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns fixes, best first; a fix is one override, or several with blanks between them.

    Args:
        signal: what is in trouble.
        choices: the option of each config group; empty if not known.
        optimizer: the keys of the chosen optimizer; empty if not known.
    """
    together = ((filled_in(word, choices, optimizer) for word in fix.split()) for fix in signal.fix)
    found = [" ".join(filter(None, words)) for words in together]
    return tuple(dict.fromkeys(filter(None, found)))


def filled_in(fix: str, choices: Mapping[str, str], optimizer: Mapping[str, Any]) -> str:
    """Returns one override with its value filled in; empty if the run already has it or would refuse it."""
    key, _, value = fix.partition("=")
    group, _, name = key.partition(".")
    if not name:
        return fix if helps(group, value, choices) else ""
    if name not in optimizer or ("{" not in value and optimizer[name] == json.loads(value)):
        return ""
    return fix.format(lr=f"{optimizer['lr'] / 3:.2g}") if "{lr}" in fix else fix


def helps(group: str, option: str, choices: Mapping[str, str]) -> bool:
    """Returns whether an option is neither what the run has nor refused beside its other options."""
    chosen = choices.get(group)
    if group in EITHER:
        return all(choices.get(each, "none") == "none" for each in EITHER)
    if group == "optimizer":
        return chosen in (None, "adamw")
    if group == "init":  # the GPTs' own
        return chosen != option and choices.get("model", "gpt").startswith("gpt")
    return chosen != option
