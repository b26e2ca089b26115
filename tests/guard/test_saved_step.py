"""How another process finds a closure again: the folder to import from, and no folder of a run."""

import importlib
import sys

import pytest
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.guard.saved_step import closure_record, import_closure

TEXT = "import torch\nmodel = torch.nn.Linear(2, 1)\n\ndef loss(x):\n    return {said!r}, model(x).sum()\n"


@pytest.fixture
def write(monkeypatch):
    """Writes a module with a closure; at the end of the test, forgets those that were imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(file, said="mine"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TEXT.format(said=said))
        importlib.invalidate_caches()
        return file

    yield write
    for name in [name for name in sys.modules if name.startswith("saved_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("saved_mine.py", "saved_mine"),
        ("saved_package/__init__.py", "saved_package"),
        ("saved_package/inner.py", "saved_package.inner"),
        ("saved_package/deep/__init__.py", "saved_package.deep"),
    ],
)
def test_a_closure_is_found_from_the_folder_of_its_outermost_package(tmp_path, write, file, module):
    write(tmp_path / file)
    sys.path.insert(0, str(tmp_path))
    mine = importlib.import_module(module)
    record = closure_record(mine.loss, mine.model)
    assert record["path"] == str(tmp_path.resolve())
    assert import_closure(record, tmp_path / "run" / "incident") == (mine.loss, mine.model)


def test_a_module_of_the_same_name_elsewhere_is_not_taken_for_it(tmp_path, write):
    write(tmp_path / "other" / "saved_twice.py", "other")
    sys.path.insert(0, str(tmp_path / "other"))
    file = write(tmp_path / "mine" / "saved_twice.py")
    record = {"module": "saved_twice", "name": "loss", "model": "model", "path": str(file.parent), "file": str(file)}
    closure, model = import_closure(record, tmp_path / "run" / "incident")
    assert closure.__code__.co_filename == str(file)
    assert isinstance(model, nn.Linear)


@pytest.mark.parametrize("name", ["saved_there", "saved_there.inner"])
def test_a_module_that_python_would_find_in_the_run_is_not_imported(tmp_path, write, name):
    incident = tmp_path / "run" / "incidents" / "step-00000002"
    write(incident / "saved_there" / "__init__.py")
    write(incident / "saved_there" / "inner.py")
    sys.path.insert(0, str(incident))
    (tmp_path / "mine").mkdir()
    record = {"module": name, "name": "loss", "model": "model", "path": str(tmp_path / "mine"), "file": "mine.py"}
    with pytest.raises(ConfigError, match=r"holds the module 'saved_there' itself .*no code is run from an incident"):
        import_closure(record, incident)
    assert name not in sys.modules
