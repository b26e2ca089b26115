"""Prints how many faults of each kind are planted in each loop, and the clean programs."""

from tests.reliability.finite.score import table
from tests.reliability.preflight.clean import CLEAN
from tests.reliability.preflight.faults import FAULTY, GROUPS, KINDS
from tests.reliability.preflight.loops import LOOPS


def main() -> None:
    """Prints the tables."""
    rows = []
    for kind, group in KINDS.items():
        of_kind = [program for program in FAULTY if program.fault is not None and program.fault.kind == kind]
        counts = [sum(program.loop is loop for program in of_kind) for loop in LOOPS.values()]
        variants = sum(fault.kind == kind for fault in GROUPS[group])
        rows.append([group, kind, str(variants), *(str(count or "") for count in counts), str(len(of_kind))])
    totals = [str(sum(program.loop is loop for program in FAULTY)) for loop in LOOPS.values()]
    rows.append(["", "all", str(sum(map(len, GROUPS.values()))), *totals, str(len(FAULTY))])
    print(table(("group", "kind", "variants", *LOOPS, "faults"), rows))
    print(f"\n{len(CLEAN)} clean programs: {', '.join(program.name for program in CLEAN)}")


if __name__ == "__main__":
    main()
