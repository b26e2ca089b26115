"""Runs the code cells of a notebook in order, in one process and without Jupyter, and writes their outputs into it.

    python -m tests.notebooks examples/break_and_fix.ipynb           writes the outputs into the notebook
    python -m tests.notebooks examples/break_and_fix.ipynb --show    prints them as JSON, one text for each code cell

A cell is Python, or lines that begin with `!`, each a command of the shell in which `{expression}` is replaced, as in
Jupyter. The output of a cell is what it prints, followed by the value of its last line. Written outputs name no folder
of this machine, no time and no pace.
"""

import ast
import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

VARYING = {
    r"\d+:\d\d left": "<time> left",
    r"[\d.,]+k? tok/s": "<pace> tok/s",
    r"(after \d+ steps) in \d+ s": r"\1 in <time>",
    r"sample   .*\n(         .*\n)*": "sample   <text>\n",
    r"checksums every \d+ updates": "checksums every <n> updates",
}
"""What differs from machine to machine, and from run to run, and what is written in its place."""


def outputs(path: Path) -> list[str]:
    """Runs a notebook in this process, and returns the output of each code cell.

    Raises:
        Exception: what a cell raises.
        subprocess.CalledProcessError: a command of a cell failed.
    """
    sys.path.insert(0, "")  # as in Jupyter: the working folder, which a cell may change
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [output("".join(cell["source"]), namespace) for cell in code_cells(json.loads(path.read_text()))]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the code cells of a notebook."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def output(source: str, namespace: dict[str, Any]) -> str:
    """Runs a cell, and returns its output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if source.startswith("!"):
            for line in source.splitlines():
                print(shell(line.removeprefix("!"), namespace), end="")
        else:
            run_cell(source, namespace)
    return printed.getvalue()


def run_cell(source: str, namespace: dict[str, Any]) -> None:
    """Runs a cell of Python, and prints the value of its last line, if it is an expression with a value."""
    body, hidden = ast.parse(source).body, source.rstrip().endswith(";")  # as in Jupyter: a semicolon hides the value
    last = body.pop() if not hidden and body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
        if value is not None:
            print(value)


def shell(line: str, namespace: dict[str, Any]) -> str:
    """Runs a command, and returns what it prints."""
    command = re.sub(r"\{([^{}]+)\}", lambda found: str(eval(found[1], namespace)), line)
    return subprocess.run(command, shell=True, check=True, stdout=subprocess.PIPE, text=True).stdout


def cleaned(text: str) -> str:
    """Returns an output without the working folder and without what varies."""
    text = text.replace(f"{Path.cwd()}/", "")
    for pattern, written in VARYING.items():
        text = re.sub(pattern, written, text)
    return text


def write(path: Path, texts: list[str]) -> None:
    """Writes the outputs of the code cells into a notebook."""
    notebook = json.loads(path.read_text())
    for number, (cell, text) in enumerate(zip(code_cells(notebook), texts, strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [stream] if text else []}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    notebook_path = Path(sys.argv[1]).resolve()
    texts = [cleaned(text) for text in outputs(notebook_path)]
    if "--show" in sys.argv:
        print(json.dumps(texts))
    else:
        write(notebook_path, texts)
