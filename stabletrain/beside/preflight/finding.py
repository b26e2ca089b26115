"""What a check says."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fault", "note", "passed", "not checked"]


@dataclass(frozen=True)
class Finding:
    """What a check says of one thing that it looked at.

    Attributes:
        check: name of the check.
        verdict: `fault` if something is wrong for certain; `note` if it is unusual and may be meant; `passed`; or `not
            checked`, where the check cannot be made.
        text: what was found, with its number; for `not checked` why.
        places: names of what it is about: parameters, modules, or parts of the state, such as
            `optimizers.0.param_groups[1].weight_decay`.
        line: where in the user's code, `file:line`; empty if that is not known.
        fix: what to do; empty if nothing is wrong.
    """

    check: str
    verdict: Verdict
    text: str
    places: tuple[str, ...] = ()
    line: str = ""
    fix: str = ""


def listed(names: list[str], most: int = 4) -> str:
    """Returns names for a text: `a, b and 3 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
