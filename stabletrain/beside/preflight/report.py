"""What all checks say, on the terminal and as JSON."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from stabletrain.beside.preflight.finding import Finding

SIGNS = {"fault": "FAULT", "note": "note", "passed": "ok", "not checked": "-"}
"""The verdicts in the first column."""


@dataclass(frozen=True)
class Report(Sequence[Finding]):
    """What the checks found, a sequence of `Finding`; `print` shows it.

    Attributes:
        findings: of all checks, in their order.
        seconds: that they took.
        compiling: seconds of these that the compiler took.
    """

    findings: Sequence[Finding]
    seconds: float = 0.0
    compiling: float = 0.0

    def __len__(self) -> int:
        return len(self.findings)

    @overload
    def __getitem__(self, place: int) -> Finding: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Finding]: ...

    def __getitem__(self, place: int | slice) -> Finding | Sequence[Finding]:
        return self.findings[place]

    @property
    def faults(self) -> list[Finding]:
        """What is wrong for certain."""
        return [each for each in self.findings if each.verdict == "fault"]

    def __str__(self) -> str:
        """Returns a line for each finding, the faults' lines in the code and fixes below them, and the count."""
        width = max((len(each.check) for each in self.findings), default=0)
        lines = []
        for each in self.findings:
            why = "not checked: " if each.verdict == "not checked" else ""
            lines.append(f"{SIGNS[each.verdict]:<5}  {each.check:<{width}}  {why}{each.text}")
            indent = " " * (width + 9)
            if each.line:
                lines.append(f"{indent}at   {shown(each.line)}")
            if each.fix:
                lines.append(f"{indent}fix: {each.fix}")
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        """The last line: how many of each verdict, and the time."""
        counts = Counter(each.verdict for each in self.findings)
        words = [plural(counts["fault"], "fault"), plural(counts["note"], "note"), f"{counts['passed']} passed"]
        words += [f"{counts['not checked']} not checked"] if counts["not checked"] else []
        compiler = f", of which the compiler took {self.compiling:.1f} s" if self.compiling else ""
        return f"preflight: {', '.join(words)}; {self.seconds:.1f} s{compiler}"

    def as_json(self) -> dict[str, Any]:
        """Returns the shape that `docs/json.md` shows."""
        return {
            "faults": len(self.faults),
            "seconds": round(self.seconds, 3),
            "compiling_seconds": round(self.compiling, 3),
            "findings": [
                {
                    "check": each.check,
                    "verdict": each.verdict,
                    "text": each.text,
                    "places": [*each.places],
                    "line": each.line or None,
                    "fix": each.fix or None,
                }
                for each in self.findings
            ],
        }


def plural(count: int, noun: str) -> str:
    """Returns `1 fault`, `2 faults`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shown(line: str) -> str:
    """Returns `file:line`, the file relative to the working folder if it lies in it."""
    relative = os.path.relpath(line)
    return line if relative.startswith("..") else relative
