"""The user's source files that a step runs through are found from its objects, and their changes are noticed."""

import importlib
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from stabletrain.forensics.user_code import compare, files, hash_of, hashes
from stabletrain.stability.objective import CrossEntropy

SOURCES = {
    "user_model": "import torch\nimport yaml\nfrom torch import nn\nfrom stabletrain.models.gpt import GPT\n"
    "from user_ops import act\nimport user_package\n\n"
    "class Model(nn.Linear):\n    def forward(self, x):\n        return act(super().forward(x))\n",
    "user_ops": "import torch\nfrom user_constants import SCALE\n\n"
    "def act(x):\n    from user_late import shift\n\n    return torch.exp(SCALE * shift(x))\n\n"
    "class Rude:\n    def __getattr__(self, name):\n        raise RuntimeError(name)\n\n"
    "rude = Rude()\nodd = type('Odd', (), {'__module__': 3})()\n",
    "user_loss": "from stabletrain.stability.objective import NoZLoss\n\nclass ZLoss(NoZLoss):\n    pass\n",
    "user_data": "class Data:\n    pass\n",
    "user_constants": "SCALE = 2.0\n",
    "user_late": "def shift(x):\n    return x\n",
    "user_package/__init__": "from . import inner\nfrom .inner import nothing\n",
    "user_package/inner": "import user_folder.last\n\nnothing = []\n",
    "user_folder/last": "",
}


@pytest.fixture
def code(tmp_path, monkeypatch):
    """The folder of the user's modules, all of which are imported."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [name.removesuffix("/__init__").replace("/", ".") for name in SOURCES]
    importlib.invalidate_caches()
    for name in names:
        importlib.import_module(name)
    yield tmp_path
    for name in names:
        del sys.modules[name]


@pytest.fixture
def step(code, tools):
    """The model and the tools of a step."""
    zloss = sys.modules["user_loss"].ZLoss()
    return nn.Sequential(sys.modules["user_model"].Model(2, 2)), replace(tools, objective=CrossEntropy(zloss))


def test_the_modules_of_the_model_and_the_loss_and_what_they_import_are_found_and_no_others(code, step):
    found = files(*step)
    names = {name.removesuffix("/__init__").replace("/", ".") for name in SOURCES}
    assert {*found} == names - {"user_data"}
    assert found["user_ops"] == str(code / "user_ops.py")


def test_a_model_of_stabletrain_runs_through_no_file_of_the_user(tools):
    assert files(nn.Linear(2, 2), tools) == {}


def test_a_change_is_noticed_by_its_content(code, step):
    then = hashes(*step, since=math.inf)
    assert compare(then, *step) == ([], [])
    os.utime(code / "user_model.py", (0, 0))
    assert compare(then, *step) == ([], [])
    (code / "user_ops.py").write_text("def act(x):\n    return x\n")
    assert compare(then, *step) == ([str(code / "user_ops.py")], [])
    (code / "user_loss.py").unlink()
    assert compare(then, *step)[0] == [str(code / name) for name in ("user_loss.py", "user_ops.py")]


def test_a_file_that_was_written_while_the_run_trained_may_have_changed(code, step):
    for file in code.rglob("*.py"):
        os.utime(file, (100, 100))
    os.utime(code / "user_ops.py", (300, 300))
    then = hashes(*step, since=200.0)
    assert [name for name, one in then.items() if name.startswith("user") and one["sha256"] is None] == ["user_ops"]
    assert compare(then, *step) == ([], [str(code / "user_ops.py")])


def test_a_module_that_is_not_part_of_the_step_any_more_is_not_compared(step):
    then = {"gone": {"file": "/runs/gone.py", "sha256": "0"}, **hashes(*step, since=math.inf)}
    assert compare(then, *step) == ([], [])


def test_a_file_that_cannot_be_read_has_no_hash(tmp_path):
    assert hash_of(str(tmp_path / "gone.py")) is None
    assert len(hash_of(str(Path(__file__)))) == 64
