"""Large libraries are imported without garbage collection, and only those that a run needs."""

import subprocess
import sys

import pytest

from tests.laws.test_imports import PACKAGE, imports


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_import_of_torch_is_not_collected_and_the_collector_works_afterwards(tmp_path):
    code = f"""
import gc, sys
from pathlib import Path
from stabletrain.cli.train import build_and_train

class Finder:
    def find_spec(name, path, target=None):
        if name == "torch":
            print(gc.isenabled())
            raise ImportError("enough seen")

sys.meta_path.insert(0, Finder)
try:
    build_and_train(None, Path({str(tmp_path)!r}))
except ImportError as error:
    print(error.msg.split()[0], gc.isenabled(), gc.get_freeze_count())
"""
    assert run(code) == ["False", "enough", "True", "0"]


def test_only_what_is_imported_for_good_leaves_the_collector():
    code = """
import gc
from stabletrain.importing import uncollected
for for_good in (False, True):
    with uncollected(for_good=for_good):
        pass
    print(gc.get_freeze_count() > 0, gc.isenabled())
gc.disable()
with uncollected(for_good=False):
    pass
print(gc.isenabled())
"""
    assert run(code) == ["False", "True", "True", "True", "False"]


@pytest.mark.parametrize("library", ["nanobind", "pybind11_builtins"])
def test_what_nanobind_made_is_collected_at_the_end_for_it_would_write_of_leaks(library):
    code = f"""
import atexit, gc, sys
from types import SimpleNamespace
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # what is registered first is called last
from stabletrain.importing import uncollected
with uncollected(for_good=True):
    metaclass = type("metaclass", (type,), {{"__module__": {library!r}}})
    sys.modules["triton._C.libtriton"] = SimpleNamespace(ir=SimpleNamespace(attribute=metaclass("attribute", (), {{}})))
"""
    assert run(code) == [str(library != "nanobind")]


def test_a_run_in_one_process_on_text_imports_neither_torchvision_nor_distributed_checkpoints():
    # What such a run imports at once, and what that imports, without running it.
    waiting = [f"stabletrain.{name}" for name in ("trainer.build", "trainer.loop", "models.gpt", "data.text")]
    seen, waiting = set(), [*waiting, "stabletrain.checkpoint.checkpoints"]
    while waiting:
        name = waiting.pop()
        file = PACKAGE.parent / f"{name.replace('.', '/')}.py"
        if name in seen or not file.exists():
            continue
        seen.add(name)
        waiting += imports(file, top_level_only=True)
    assert "stabletrain.trainer.memory" in seen
    assert "stabletrain.checkpoint.sharded" in seen
    slow = {name for name in seen if name in ("stabletrain.models.resnet", "stabletrain.checkpoint.dcp")}
    assert not slow
