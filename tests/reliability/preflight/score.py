"""What the checks find of the planted faults, and what they say of clean programs.

A fault is found if a finding with the verdict `fault` names what the fault points at. Any `fault` of a clean program is
a false word.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stabletrain.beside.preflight.checks import CHECKS, check_loop
from stabletrain.beside.preflight.finding import Finding
from tests.reliability.finite.score import table
from tests.reliability.preflight.clean import CLEAN
from tests.reliability.preflight.evidence import warned
from tests.reliability.preflight.faults import FAULTY, KINDS
from tests.reliability.preflight.faults.fault import Program


@dataclass(frozen=True)
class Checked:
    """A program and what the checks say of it.

    Attributes:
        program: with a fault, or clean.
        findings: of all checks.
        seconds: that the checks took.
    """

    program: Program
    findings: list[Finding]
    seconds: float

    @property
    def faults(self) -> list[Finding]:
        """What is called a fault."""
        return [each for each in self.findings if each.verdict == "fault"]

    @property
    def found(self) -> bool:
        """Whether one of them names what the planted fault points at."""
        fault = self.program.fault
        return fault is not None and any(names(each, point) for each in self.faults for point in fault.points_at)


def names(finding: Finding, point: str) -> bool:
    """Whether a finding names a place by its beginning, or has the word in its text, line or fix."""
    words = " ".join((finding.text, finding.line, finding.fix)).lower()
    return any(place.startswith(point) for place in finding.places) or point.lower() in words


def checked(program: Program, only: Sequence[str] = ()) -> Checked:
    """Runs the checks on a program."""
    start = time.perf_counter()
    with warned(program):
        findings = [*check_loop(program.make, only)]
    return Checked(program, findings, time.perf_counter() - start)


def chosen(kinds: Sequence[str], *, clean: bool) -> list[Program]:
    """Returns programs: with these kinds or groups of faults, or all; and the clean ones."""
    faulty = [each for each in FAULTY if each.fault is not None]
    if kinds:
        faulty = [each for each in faulty if {each.fault.kind, KINDS[each.fault.kind]} & {*kinds}]
    return [*faulty, *(CLEAN if clean else ())]


def by_kind(results: Sequence[Checked]) -> list[list[str]]:
    """Returns a row for each kind: programs found, of how many, and by which checks."""
    rows = []
    for kind, group in KINDS.items():
        of_kind = [each for each in results if each.program.fault is not None and each.program.fault.kind == kind]
        if of_kind:
            found = [each for each in of_kind if each.found]
            by = sorted({finding.check for each in found for finding in each.faults})
            rows.append([group, kind, f"{len(found)} of {len(of_kind)}", ", ".join(by)])
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Checks the programs, and prints the table and each miss and false word."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.preflight.score", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="kinds or groups of faults (default: all)")
    parser.add_argument("--no-clean", action="store_true", help="leave out the clean programs")
    parser.add_argument("--only", default="", help=f"checks, separated by commas: {', '.join(CHECKS)}")
    parser.add_argument("--all", action="store_true", help="print what is said of every program")
    options = parser.parse_args(words)
    only = [name for name in options.only.split(",") if name]
    results = []
    for program in chosen(options.kinds, clean=not options.no_clean):
        results.append(checked(program, only))
        one = results[-1]
        missed = program.fault is not None and not one.found
        if missed or options.all or (program.fault is None and one.faults):
            print(f"{'MISSED' if missed else 'said of'} {program.name} ({one.seconds:.1f} s)", flush=True)
            for each in one.findings if options.all else one.faults:
                print(f"    {each.check}: {each.verdict}: {each.text} {list(each.places)} {each.line}")
    print(table(("group", "kind", "found", "by"), by_kind(results)))
    faulty = [each for each in results if each.program.fault is not None]
    clean = [each for each in results if each.program.fault is None]
    kinds = {each.program.fault: each for each in faulty if each.found}
    print(f"\nfound {sum(each.found for each in faulty)} of {len(faulty)} programs", end="")
    print(f", {len(kinds)} of {len({each.program.fault for each in faulty})} variants; ", end="")
    print(f"false words on {sum(bool(each.faults) for each in clean)} of {len(clean)} clean programs; ", end="")
    print(f"{sum(each.seconds for each in results):.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
