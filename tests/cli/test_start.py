"""A fast start: heavy modules are loaded only when they are used, and the first step is logged immediately."""

import subprocess
import sys

import pytest

from stabletrain.trainer import loop, step_graph
from stabletrain.trainer.build import build
from tests.runs import ROOT, TINY_GPT, composed

HEAVY = {"torch", "torchvision", "numpy", "sklearn", "pandas", "wandb", "rich", "matplotlib", "PIL", "safetensors"}

PLAIN = """
import sys
from stabletrain.machine.compiling import uncompiled
from stabletrain.machine.determinism import Seeded
Seeded().prepare()
with uncompiled():
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


@pytest.mark.slow
def test_seeding_and_passes_aside_do_not_load_the_compiler():
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_the_first_steps_line_is_written_before_the_second_step_begins(tmp_path, monkeypatch):
    compute, written = step_graph.compute, []

    def counting(*arguments):
        metrics = tmp_path / "metrics.jsonl"
        written.append(metrics.read_text().count("\n") if metrics.exists() else 0)
        return compute(*arguments)

    monkeypatch.setattr(step_graph, "compute", counting)
    with composed(*TINY_GPT, "steps=4", "log_every=1", "monitors=none", "checkpoint=off", "report=false") as cfg:
        loop.train(build(cfg, tmp_path))
    assert written == [0, 1, 1, 2]  # later ones wait for the step after theirs, which runs meanwhile
