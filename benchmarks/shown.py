"""What tests have shown: pytest's reports (`--junitxml`) as one table, with one row for each property.

    python benchmarks/shown.py tests.xml ...

A test's name states its property, and its cases (precisions, models ...) count together. A report that does not exist
becomes a row that says so.
"""

import argparse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from measuring import head, row


@dataclass
class Property:
    """A test and the outcomes of its cases.

    Attributes:
        outcomes: number of cases that `passed`, `failed` or were `skipped`.
        failed: the failed cases, by their parameters.
        reasons: why cases were skipped.
        seconds: duration of all cases together; workers run several at once.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, case: ElementTree.Element, parameters: str) -> None:
        """Counts one case of the report."""
        self.seconds += float(case.get("time", "0"))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            self.outcomes["failed"] += 1
            self.failed.append(parameters)
        elif skipped is not None:
            self.outcomes["skipped"] += 1
            self.reasons[skipped.get("message", "")] = None
        else:
            self.outcomes["passed"] += 1

    @property
    def verdict(self) -> str:
        """The outcomes in words."""
        words = []
        if self.failed:
            words.append(f"FAILED {len(self.failed)}: {', '.join(filter(None, self.failed))}".removesuffix(": "))
        if self.outcomes["passed"]:
            words.append(f"passed {self.outcomes['passed']}")
        if self.outcomes["skipped"]:
            words.append(f"skipped {self.outcomes['skipped']}: {'; '.join(self.reasons)}")
        return ", ".join(words)


def properties(report: Path) -> dict[tuple[str, str], Property]:
    """Returns the tests of a report by file and name, in its order."""
    found: dict[tuple[str, str], Property] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, _, parameters = case.get("name", "").partition("[")
        file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        found.setdefault((file, name), Property()).add(case, parameters.removesuffix("]"))
    return found


def table(reports: list[Path]) -> str:
    """Returns the table of all reports."""
    lines = [head("tests", "what they show", "", "seconds")]
    for report in reports:
        if not report.exists():
            lines.append(row(report.stem, "", "no report: pytest did not end", ""))
            continue
        for (file, name), shown in properties(report).items():
            lines.append(row(file, name.removeprefix("test_").replace("_", " "), shown.verdict, f"{shown.seconds:.0f}"))
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="files written by pytest --junitxml")
    print(table(parser.parse_args().reports))


if __name__ == "__main__":
    main()
