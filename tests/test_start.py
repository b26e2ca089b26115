"""What is loaded only when it is used: `--help` and a refusal need no torch, and a plain run no compiler."""

import subprocess
import sys

import pytest

from tests.runs import ROOT

HEAVY = {"torch", "torchvision", "numpy", "sklearn", "pandas", "wandb", "rich", "matplotlib", "PIL", "safetensors"}

PLAIN = """
import sys
from stabletrain.machine.compiling import plainly
from stabletrain.machine.determinism import Seeded
Seeded().prepare()
with plainly():
    pass
print(sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""


@pytest.mark.parametrize("argument", ["--help", "stepz=3"])
def test_help_and_a_refusal_load_nothing_heavy(tmp_path, argument):
    start = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), argument]
    done = subprocess.run(start, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "hydra" in loaded
    assert loaded & HEAVY == set()


def test_seeding_and_passes_aside_do_not_load_the_compiler():
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "[]\n", done.stderr
