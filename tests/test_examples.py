"""The scripts in `examples/` run as they stand, with arguments that make them quick."""

import pytest

from tests.runs import ROOT, python

ARGUMENTS = {"train_and_load.py": ["steps=3", "model.n_layer=1", "eval_batches=1", "device=cpu"]}
"""Arguments of the examples that take any."""


ELSEWHERE = {
    "guard_loop.py": "tests/guard/test_example.py",
    "guard_actor_critic.py": "tests/guard/test_loop_programs.py",
    "guard_lbfgs.py": "tests/guard/test_loop_programs.py",
    "guard_by_hand.py": "tests/guard/test_loop_programs.py",
    "guard_gan.py": "tests/guard/test_loop_programs.py",
    "guard_logits_and_loss.py": "tests/guard/test_loop_programs.py",
    "guard_lightning.py": "tests/beside/adapters/test_lightning.py",
    "guard_transformers.py": "tests/beside/adapters/test_transformers.py",
    "no_eps.py": "tests/test_docs_held.py",
    "regression.py": "tests/test_examples_objectives.py",
    "vae.py": "tests/test_examples_objectives.py",
    "simclr.py": "tests/test_examples_objectives.py",
}
"""Examples that another test runs. (`examples/__init__.py` is none.)"""

HERE = sorted({file.name for file in (ROOT / "examples").glob("*.py")} - {*ELSEWHERE, "__init__.py"})


@pytest.mark.beside(when=lambda name: name == "train_and_load.py")
@pytest.mark.parametrize("name", HERE)
def test_an_example_runs(tmp_path, name):
    path = str(ROOT / "examples" / name)
    done = python(path, *ARGUMENTS.get(name, []), cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout
