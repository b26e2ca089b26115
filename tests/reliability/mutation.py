"""Changes one place of the code at a time, and counts how many of the changes some test catches.

    python -m tests.reliability.mutation --room guard --count 100 --seed 0 --json guard.json

Needs `pip install cosmic-ray coverage`. A mutant is one operator of cosmic-ray at one place: another comparison, number
or arithmetic, `and` for `or`, a `not`, a decorator removed, a loop that runs no iteration, another exception. From all
mutants of a room, except those in type annotations and messages, a seeded sample is drawn; a larger count has the
smaller one's mutants first, and a JSON file that is there is continued.

Each mutant runs in a copy of the checkout (`forked_tests.py`). Its tests are those of the fast tier that run the
mutated statement (`covering.py`): first those of the file's mirror, then the others, the fastest first, until they take
`TESTS_TAKE` seconds of CPU time without a mutation. The first test that fails ends it.

- **caught**: a test failed, or the mutated file cannot be imported.
- **timed out**: used `LIMIT` seconds of CPU time, four times what the same tests take, or `HANGS` seconds by the clock.
  Counts as caught.
- **survived**: all these tests passed. `equivalent_mutants.py` lists the survivors that no test can catch, and why; the
  score leaves them out.

At the end, each test that caught a mutant also runs without a mutation. Where it fails, its mutants run again without
it.
"""

import argparse
import ast
import difflib
import json
import math
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.reliability.covering import Covering, checksum, record
from tests.reliability.equivalent_mutants import EQUIVALENT
from tests.reliability.forked_tests import (
    FAILED,
    PASSED,
    ROOT,
    TIMED_OUT,
    Chosen,
    changed,
    copied,
    failing_anyway,
    import_libraries,
    mirror,
    run_forked,
)

ROOMS = {"step": ["stabletrain/step.py"], "guard": ["stabletrain/guard"], "checkpoint": ["stabletrain/checkpoint"]}

TESTS = ["tests/test_step.py", "tests/guard", "tests/checkpoint", "tests/trainer", "tests/stability/clipping"]
TESTS += ["tests/laws"]
"""Tests that touch the rooms; they are recorded once."""

TYPE_NAME = re.compile(r"\w+ = \w+\[.*\|.*\]")
"""A line that names a type."""

TESTS_TAKE, LIMIT, HANGS = 15.0, 60, 400
"""Seconds: CPU time of the tests of a mutant without the mutation; CPU time, and time by the clock, with it."""

WITH_ARGUMENTS = ("core/VariableReplacer", "core/VariableInserter")
"""Operators that need names of variables."""


@dataclass
class Mutant:
    """One operator at one place.

    Attributes:
        file, line: the place.
        operator, occurrence: of cosmic-ray.
        old, new: the changed lines.
        outcome: "caught", "timed out" or "survived"; "" before it ran.
        by: the test that failed.
        tests: number of tests that could have run.
        seconds: CPU time.
    """

    file: str
    line: int
    operator: str
    occurrence: int
    old: str = ""
    new: str = ""
    outcome: str = ""
    by: str = ""
    tests: int = 0
    seconds: float = 0.0
    excluded: list[str] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, str, int]:
        """The mutant's identity."""
        return self.file, self.operator, self.occurrence

    @property
    def equivalent(self) -> str:
        """Why no test can catch it; empty if one could."""
        return EQUIVALENT.get((self.file, self.old.strip(), self.new.strip()), "")


# ---- the mutants of a room


def mutants(files: Sequence[str]) -> list[Mutant]:
    """Returns all mutants of some files."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    operators = [
        (name, plugins.get_operator(name)()) for name in plugins.operator_names() if name not in WITH_ARGUMENTS
    ]
    found = []
    for file in files:
        text = (ROOT / file).read_text()
        tree, spans = get_ast(text), [*left_out(ast.parse(text))]
        nodes = [*ast_nodes(tree)]
        for name, operator in operators:
            places = [place for node in nodes for place in operator.mutation_positions(node)]
            for occurrence, (start, end) in enumerate(places):
                if not any(first <= start and end <= last for first, last in spans):
                    found.append(Mutant(file, start[0], name, occurrence))
    return found


def left_out(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields the spans of type annotations, messages and the condition for imports of types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield span(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield span(node.returns)
        elif isinstance(node, ast.JoinedStr):
            yield span(node)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for each in node.exc.args:
                yield span(each)
        elif isinstance(node, ast.BinOp) and any(is_text(each) for each in (node.left, node.right)):
            yield span(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and is_type(node.value):
            yield span(node.value)


def span(node: ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns where an expression begins and ends."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def is_text(node: ast.expr) -> bool:
    """Returns whether an expression is a text."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_type(node: ast.expr) -> bool:
    """Returns whether an expression is a union of types, such as `Tensor | float`."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and is_type(node.left) and is_type(node.right)
    return isinstance(node, ast.Name | ast.Subscript | ast.Attribute) or (
        isinstance(node, ast.Constant) and node.value is None
    )


def mutated(mutant: Mutant) -> str | None:
    """Returns the text of the mutated file, and fills in the lines; None if nothing changed or it does not compile."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    text = (ROOT / mutant.file).read_text()
    changed = mutate_code(text, plugins.get_operator(mutant.operator)(), mutant.occurrence)
    if changed is None or changed == text:
        return None
    try:
        compile(changed, mutant.file, "exec")
    except (SyntaxError, ValueError):
        return None
    lines = [line for line in difflib.ndiff(text.splitlines(), changed.splitlines()) if line[:2] in ("- ", "+ ")]
    mutant.old = "\n".join(line[2:] for line in lines if line[0] == "-")
    mutant.new = "\n".join(line[2:] for line in lines if line[0] == "+")
    if "CosmicRayTestingException" in changed:  # it exists where cosmic-ray has imported it only
        changed += "\n\nclass CosmicRayTestingException(Exception):\n    pass\n"
    return changed


# ---- the tests of a mutant


def covering_tests(text: str, file: str, line: int, covering: Covering) -> list[str]:
    """Returns the tests that run the statement at a line, in the order to run them, as long as they fit the time.

    Where no test runs it, because it runs on import, these are the tests of the function around it, then of the class,
    and then of the file.
    """
    lines = covering.lines[file]
    tests: set[str] = set()
    for first, last in around(ast.parse(text), line):
        tests = {test for number in range(first, last + 1) for test in lines.get(number, ())}
        if tests:
            break
    own = mirror(file)
    ordered = sorted(tests, key=lambda test: (not test.startswith(f"{own}::"), covering.seconds[test]))
    chosen, taken = [], 0.0
    for test in ordered:
        if taken + covering.seconds[test] <= TESTS_TAKE:
            chosen.append(test)
            taken += covering.seconds[test]
    return chosen


def around(tree: ast.Module, line: int) -> list[tuple[int, int]]:
    """Returns first and last line of the statement at a line, and of all functions and classes around it, inner first.

    Of a compound statement only the head counts.
    """
    spans = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or node.end_lineno is None:
            continue
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        if not first <= line <= node.end_lineno:
            continue
        body: list[ast.stmt] = getattr(node, "body", [])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            spans.append((body[0].lineno, node.end_lineno))
        elif body and line < body[0].lineno:
            spans.append((first, body[0].lineno - 1))
        elif not body:
            spans.append((first, node.end_lineno))
    return [*reversed(spans), (1, 1_000_000)]


# ---- running them


def try_mutant(copy: Path, mutant: Mutant, covering: Covering, moment: int) -> Mutant:
    """Runs a mutant in a copy of the checkout; see `changed` for `moment`."""
    text = mutated(mutant)
    assert text is not None
    tests = covering_tests((ROOT / mutant.file).read_text(), mutant.file, mutant.line, covering)
    own = mirror(mutant.file)
    files = sorted({test.partition("::")[0] for test in tests} | ({own} if (ROOT / own).exists() else set()))
    if not files:  # pytest would collect everything
        mutant.outcome = "survived"
        return mutant
    chosen = Chosen(tests, own, covering.seconds, mutant.excluded)
    with changed(copy, ROOT, {mutant.file: text}, moment):
        end = run_forked(copy, files, chosen, LIMIT, HANGS)
    mutant.outcome = {PASSED: "survived", FAILED: "caught", TIMED_OUT: "timed out"}[end.outcome]
    mutant.by, mutant.tests, mutant.seconds = end.by, end.tests or len(tests), end.seconds
    return mutant


def work(copy: Path, jobs: Any, results: Any, covering: Covering) -> None:
    """Runs the mutants of a queue until it ends with None."""
    for moment, mutant in enumerate(iter(jobs.get, None)):
        results.put(try_mutant(copy, mutant, covering, moment))


def run_all(todo: Sequence[Mutant], covering: Covering, folder: Path, processes: int) -> Iterator[Mutant]:
    """Yields mutants as they come out of several processes."""
    context = multiprocessing.get_context("fork")
    jobs, results = context.Queue(), context.Queue()
    for each in [*todo, *[None] * processes]:
        jobs.put(each)
    copies = [copied(ROOT, folder / str(number)) for number in range(processes)]
    workers = [context.Process(target=work, args=(copy, jobs, results, covering)) for copy in copies]
    for worker in workers:
        worker.start()
    for _ in todo:
        yield results.get()
    for worker in workers:
        worker.join()


def check_catchers(done: Sequence[Mutant], copy: Path) -> list[Mutant]:
    """Runs the tests that caught mutants without a mutation; returns the mutants that must run again.

    Each of those leaves out the tests that fail without a mutation.
    """
    excluded = failing_anyway(copy, [each.by for each in done], [], 10 * LIMIT, 10 * HANGS)
    again = [each for each in done if each.by in excluded]
    for each in again:
        each.excluded = sorted({*each.excluded, *excluded})
    return again


def wilson(caught: int, total: int, z: float = 1.6449) -> tuple[float, float]:
    """Returns Wilson's 90 % interval of a share."""
    if total == 0:
        return 0.0, 1.0
    share = caught / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return middle - half, middle + half


def report(room: str, done: Sequence[Mutant], population: int) -> str:
    """Returns the counts, the score and the survivors as text."""
    count = {name: sum(each.outcome == name for each in done) for name in ("caught", "timed out", "survived")}
    same = sum(bool(each.equivalent) for each in done if each.outcome == "survived")
    caught, total = count["caught"] + count["timed out"], len(done) - same
    low, high = wilson(caught, total)
    lines = [
        f"{room}: {len(done)} of {population} mutants: {count['caught']} caught, {count['timed out']} timed out, "
        f"{count['survived']} survived, {same} of these equivalent",
        f"score {caught}/{total} = {100 * caught / max(total, 1):.0f} %, 90 % interval {100 * low:.0f} to "
        f"{100 * high:.0f} % (Wilson); {sum(each.seconds for each in done):.0f} s of CPU time",
    ]
    for each in done:
        if each.outcome == "survived":
            lines += ["", f"{each.file}:{each.line} {each.operator} ({each.tests} tests) {each.equivalent}".rstrip()]
            lines += [f"- {line}" for line in each.old.splitlines()] + [f"+ {line}" for line in each.new.splitlines()]
    return "\n".join(lines)


def sampled(files: Sequence[str], count: int, seed: int) -> tuple[list[Mutant], int]:
    """Returns a sample of the mutants that compile, and the number of all mutants."""
    everything = mutants(files)
    random.Random(seed).shuffle(everything)
    chosen: list[Mutant] = []
    for each in everything:
        if len(chosen) == count:
            break
        if mutated(each) is not None and is_code(each):
            chosen.append(each)
    return chosen, len(everything)


def is_code(mutant: Mutant) -> bool:
    """Returns whether a mutant changes more than the name of a type, or the `*` before keyword arguments."""
    return not TYPE_NAME.fullmatch(mutant.old) and mutant.old.replace("*,", "/,") != mutant.new


def files_of(room: str) -> list[str]:
    """Returns the files of a room, relative to the project's root."""
    found = []
    for name in ROOMS[room]:
        path = ROOT / name
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [str(path.relative_to(ROOT)) for path in found]


def covering_of(path: Path) -> Covering:
    """Reads the record of covering tests; makes it first if there is none."""
    files = [file for room in ROOMS for file in files_of(room)]
    if not path.exists():
        record(ROOT, TESTS, files, path.with_suffix(".parts")).write(path)
    covering = Covering.read(path)
    changed = [file for file in files if covering.sums.get(file) != checksum(ROOT / file)]
    if changed:
        sys.exit(f"{path} was recorded with another {changed[0]}; fix: remove it, and it is recorded again")
    return covering


def main() -> None:
    """Runs the mutants of a room, and prints the score and the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", choices=ROOMS, required=True)
    parser.add_argument("--count", type=int, default=100, help="mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True, help="results; continued if it exists")
    parser.add_argument("--coverage", type=Path, help="the record of covering tests; made if it does not exist")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="run the survivors again, such as after a new test")
    given = parser.parse_args()
    kept = given.coverage or Path(tempfile.gettempdir(), "stabletrain-mutation", "covering.json")
    covering = covering_of(kept)
    import_libraries()
    sample, population = sampled(files_of(given.room), given.count, given.seed)
    done: dict[tuple, Mutant] = {}
    if given.json.exists():
        read = [Mutant(**each) for each in json.loads(given.json.read_text())["mutants"]]
        done = {each.place: each for each in read if not (given.again and each.outcome == "survived")}
    todo = [each for each in sample if each.place not in done]
    with tempfile.TemporaryDirectory(prefix="mutation") as folder:
        while todo:
            for each in run_all(todo, covering, Path(folder), given.processes):
                done[each.place] = each
                print(f"{len(done)} {each.outcome} {each.seconds:.0f} s {each.file}:{each.line} {each.by}", flush=True)
                write(given, sample, done, population)
            todo = check_catchers(todo, Path(folder) / "0")
    print(report(given.room, [done[each.place] for each in sample], population))


def write(given: argparse.Namespace, sample: Sequence[Mutant], done: dict[tuple, Mutant], population: int) -> None:
    """Writes the results so far."""
    rows = [asdict(done[each.place]) for each in sample if each.place in done]
    head = {"room": given.room, "seed": given.seed, "population": population, "date": time.strftime("%Y-%m-%d")}
    given.json.write_text(json.dumps({**head, "mutants": rows}, indent=1))


if __name__ == "__main__":
    main()
