"""Each file of `benchmarks/` is cited in docs/ or serves one that is, and no other test uses any of them."""

import ast
import re
from pathlib import Path

from tests.runs import ROOT

BENCHMARKS = ROOT / "benchmarks"
FILES = {file.stem: file for file in BENCHMARKS.glob("*.py") if file.stem != "__init__"}
GPU = (BENCHMARKS / "gpu.sh").read_text()
CITED = re.compile(r"\bbenchmarks[./](\w+)\.py\b|-m benchmarks\.(\w+)|from benchmarks import (\w+)")


def named_in(text: str) -> set[str]:
    """Returns the files that a text names by their commands."""
    return {next(filter(None, found)) for found in CITED.findall(text)}


def named_by_the_script() -> set[str]:
    """Returns the files that `gpu.sh` runs."""
    return named_in(GPU) | {*re.findall(r"^ +bench (\w+) ", GPU, re.MULTILINE)}


def used_by(file: Path) -> set[str]:
    """Returns the files that one imports or, by name, runs."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"\w+\.py", str(node.value)):
            found.add(node.value.removesuffix(".py"))
    return found & FILES.keys()


def test_each_benchmark_is_cited_in_docs_or_serves_one_that_is():
    pages = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    assert any("`benchmarks/gpu.sh`" in page for page in pages)
    cited = set().union(*map(named_in, pages))
    assert cited <= FILES.keys(), "docs/ cites files that do not exist"
    assert named_by_the_script() <= FILES.keys(), "gpu.sh names files that do not exist"
    reached, left = set(), cited | named_by_the_script()
    while left:
        reached |= left
        left = set().union(*(used_by(FILES[name]) for name in left)) - reached
    assert reached == FILES.keys(), "cite these in docs/ beside what they measured, or delete them"


def test_each_data_set_of_the_benchmarks_is_used():
    text = "".join(file.read_text() for file in FILES.values())
    for file in (BENCHMARKS / "conf" / "data").iterdir():
        assert re.search(rf'data="?{file.stem}\b', text), file


def test_the_readme_has_a_line_for_each_file():
    lines = [line for line in (BENCHMARKS / "README.md").read_text().splitlines() if line.startswith("| ")]
    commands = [line.partition(" | ")[0] for line in lines]
    named = [name for command in commands for name in re.findall(r"(\w+)\.py\b|-m benchmarks\.(\w+)", command)]
    named = [first or second for first, second in named]
    assert sorted(named) == sorted(FILES)


def test_only_tests_of_the_benchmarks_use_them():
    others = [file for file in (ROOT / "tests").rglob("*.py") if not file.name.startswith("test_benchmarks")]
    assert len(others) > 300
    for file in others:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "benchmarks" in text else ():
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(module.partition(".")[0] == "benchmarks" for module in modules), file
            assert not (isinstance(node, ast.Constant) and node.value == "benchmarks"), file
