"""What all checks say, on the terminal and as JSON."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from stabletrain.beside.preflight.finding import Finding

SIGNS = {"fault": "FAULT", "note": "note", "passed": "ok", "not checked": "-"}
"""The verdicts in the first column."""


WIDTH = len("accumulation")
"""Length of the longest name of a check."""


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
        """Returns the lines of each finding, and the count."""
        return "\n".join([*map(lines_of, self.findings), self.summary])

    @property
    def summary(self) -> str:
        """The last line: how many of each verdict, and the time."""
        counts = Counter(each.verdict for each in self.findings)
        words = [plural(counts["fault"], "fault"), plural(counts["note"], "note"), f"{counts['passed']} passed"]
        words += [f"{counts['not checked']} not checked"] if counts["not checked"] else []
        compiler = f", of which the compiler took {self.compiling:.1f} s" if self.compiling else ""
        return f"preflight: {', '.join(words)}; {self.seconds:.1f} s{compiler}"

    def as_json(self) -> dict[str, Any]:
        """Returns the shape that `docs/reference/json.md` shows."""
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


def lines_of(finding: Finding) -> str:
    """Returns a finding in a line, with its place in the code and its fix in lines below."""
    why = "not checked: " if finding.verdict == "not checked" else ""
    lines = [f"{SIGNS[finding.verdict]:<5}  {finding.check:<{WIDTH}}  {why}{finding.text}"]
    lines += [f"at   {shown(finding.line)}"] if finding.line else []
    lines += [f"fix: {finding.fix}"] if finding.fix else []
    return f"\n{' ' * (WIDTH + 9)}".join(lines)


def plural(count: int, noun: str) -> str:
    """Returns `1 fault`, `2 faults`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shown(line: str) -> str:
    """Returns `file:line`, the file relative to the working folder if it lies in it."""
    relative = os.path.relpath(line)
    return line if relative.startswith("..") else relative
