"""Prints what the checks find of the held-out faults, and what they say of the clean programs."""

import sys
import time
import warnings
from collections.abc import Sequence

from stabletrain.beside.preflight.checks import check_loop
from stabletrain.beside.preflight.finding import Finding
from tests.reliability.finite.score import table
from tests.reliability.preflight.held_out import CLEAN, FAULTY, evidence
from tests.reliability.preflight.held_out.program import Program
from tests.reliability.preflight.score import names


def said(program: Program) -> list[Finding]:
    """Returns what the checks say of a program."""
    with evidence.warned(program), warnings.catch_warnings():
        return [*check_loop(program.make, ()).findings]


def main(words: Sequence[str]) -> None:
    """Prints everything that is said of the programs whose names have one of these words, or of all; then the table."""
    programs = [each for each in (*FAULTY, *CLEAN) if not words or any(word in each.name for word in words)]
    rows, found = [], 0
    for program in programs:
        start = time.perf_counter()
        try:
            findings = said(program)
        except Exception as error:
            print(f"{program.name}: CHECKS RAISED {type(error).__name__}: {error}", flush=True)
            rows.append([program.name, "raised", ""])
            continue
        faults = [each for each in findings if each.verdict == "fault"]
        points = program.fault.points_at if program.fault else ()
        right = [each for each in faults if any(names(each, point) for point in points)]
        word = ("found" if right else "MISSED") if program.fault else ("FALSE WORD" if faults else "clean")
        found += bool(right)
        print(f"{program.name}: {word} ({time.perf_counter() - start:.1f} s)")
        for each in findings:
            if each.verdict != "passed":
                text = f"{each.text} {list(each.places)[:5]} {each.line}"
                print(f"    {'*' if each in right else ' '} {each.check}: {each.verdict}: {text}", flush=True)
        rows.append([program.name, word, ", ".join(sorted({each.check for each in right or faults}))])
    print(table(("program", "", "by"), rows))
    faulty = sum(program.fault is not None for program in programs)
    print(f"\nfound {found} of {faulty} faults; ", end="")
    print(f"false words on {sum(row[1] == 'FALSE WORD' for row in rows)} of {len(programs) - faulty} clean programs")


if __name__ == "__main__":
    main(sys.argv[1:])
