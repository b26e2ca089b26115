"""The benchmarks run, and write what they promise; how fast is nobody's claim."""

import json
import os
import subprocess
import sys

import pytest

from tests.runs import ROOT

SHARED = ["--device", "cpu", "--precision", "bf16", "--rounds", "2", "--json", "results.json"]
CASES = {
    "steady": (["forensics.py", "--only", "GPT"], ["off", "forensics", "off again", "hooks", "anomaly mode"]),
    "diagnosis": (["forensics.py", "--diagnosis", "--only", "resnet20"], ["activation", "sample", "spike"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_benchmark_runs_and_writes_what_it_promises(case, tmp_path):
    (file, *options), expected = CASES[case]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / file), *options, *SHARED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [each["what"] for each in results] == expected
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(expected), done.stdout
    assert all(len(each.get("values") or each.get("ratios") or each["runs"]) == 2 for each in results)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
