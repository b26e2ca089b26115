"""Setup shared by all tests: tiers, what needs stabletrain/beside, one thread per worker, the seed, global switches."""

import atexit
import gc
import inspect
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from stabletrain.importing import unfreeze_for_nanobind
from tests import building, composing, typechecks

torch.set_num_threads(1)
if not torch.cuda.is_available():  # only Triton needs the compiler's processes, each of which imports torch
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA reads it only once, on its first use


TESTS = Path(__file__).parent

BESIDE = (TESTS / "beside", TESTS / "reliability")
"""Folders whose tests need `stabletrain/beside/`. Others say so with the mark `beside`."""

HAS_BESIDE = find_spec("stabletrain.beside") is not None
"""Whether that folder is there. Where it is not, the core is tested alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--all` and `--slow`; without them only the fast tests run. Adds `--types` and `--beside`."""
    tiers = parser.getgroup("tiers").addoption
    tiers("--all", action="store_true", help="run the slow tests too")
    tiers("--slow", action="store_true", help="run only the slow tests: what --all adds")
    tiers("--types", action="store_true", help="check every declared type and shape while the tests run")
    tiers("--beside", action="store_true", help="run only what needs stabletrain/beside: the rest tests the core")


def pytest_configure(config: pytest.Config) -> None:
    """With `--types`, has the tests check types and shapes, which takes little longer; else code runs as for users."""
    if config.getoption("--types"):
        typechecks.install("stabletrain")
    if config.getoption("--beside") and not HAS_BESIDE:
        raise pytest.UsageError("--beside: there is no folder stabletrain/beside")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out whole files: those that need `stabletrain/beside/` without it, and those with nothing asked for.

    A worker takes ten seconds to import all of them.
    """
    unasked = (config.getoption("--slow") and not names_mark(collection_path, "slow")) or (
        config.getoption("--beside") and not (lies_beside(collection_path) or names_mark(collection_path, "beside"))
    )
    return True if unasked or (not HAS_BESIDE and all_beside(collection_path)) else None


@pytest.hookimpl(tryfirst=True)  # before pytest's own `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of the other tier, and those that need `stabletrain/beside/` or only the others."""
    for item in items:
        for mark in ("slow", "beside"):
            if item.get_closest_marker(mark) and not names_mark(item.path, mark):
                raise pytest.UsageError(
                    f"{item.path}: write pytest.mark.{mark} in this file, or its tests are not found"
                )
        if lies_beside(item.path):
            item.add_marker("beside")
    tiers = [True, False] if config.getoption("--all") else [config.getoption("--slow")]
    parts = [True] if config.getoption("--beside") else [True, False] if HAS_BESIDE else [False]
    wanted = [is_slow(item) in tiers and is_beside(item) in parts for item in items]
    left_out = [item for item, kept in zip(items, wanted, strict=True) if not kept]
    items[:] = [item for item, kept in zip(items, wanted, strict=True) if kept]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Leaves what was imported and collected out of every later garbage collection, which took one second of ten."""
    gc.collect()
    gc.freeze()
    atexit.register(unfreeze_for_nanobind)


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is marked `slow`.

    With `slow(unless=condition)`, cases whose parameters fulfil the condition are fast: a few of many, so that both
    tiers test the property.
    """
    mark = item.get_closest_marker("slow")
    return mark is not None and not ("unless" in mark.kwargs and fulfils(item, mark.kwargs["unless"]))


def is_beside(item: pytest.Item) -> bool:
    """Whether a test is marked `beside`.

    With `beside(when=condition)`, only the cases whose parameters fulfil the condition need `stabletrain/beside/`.
    """
    marks = item.iter_markers("beside")
    return any("when" not in mark.kwargs or fulfils(item, mark.kwargs["when"]) for mark in marks)


def lies_beside(path: Path) -> bool:
    """Whether a folder or file of tests needs `stabletrain/beside/` by its place."""
    return any(path.is_relative_to(folder) for folder in BESIDE)


@cache
def names_mark(path: Path, mark: str) -> bool:
    """Whether a file of tests has a mark; folders and other files count as if they had."""
    return not path.match("test_*.py") or f"mark.{mark}" in path.read_text(encoding="utf-8")


def all_beside(path: Path) -> bool:
    """Whether all tests of a folder or file need `stabletrain/beside/`: by its place, or by its `pytestmark`."""
    if lies_beside(path):
        return True
    whole = r"^pytestmark = .*\bpytest\.mark\.beside\b(?!\()"
    return path.suffix == ".py" and re.search(whole, path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def fulfils(item: pytest.Item, condition: Callable[..., bool]) -> bool:
    """Whether the parameters of a test fulfil a condition, which names those that it takes."""
    parameters = item.callspec.params  # ty: ignore[unresolved-attribute]
    return bool(condition(*(parameters[name] for name in inspect.signature(condition).parameters)))


@pytest.fixture(autouse=True)
def _global_state():
    """Seeds torch's generators, so that no test depends on earlier ones; restores process-wide switches afterwards.

    Guards that a test has attached no longer see backward passes after it: dozens made later tests ten times slower.
    """
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    told = sys.modules.get("stabletrain.guard.backward_calls")
    if told is not None and told._LISTENERS:  # attached guards, which live until garbage is collected
        told._LISTENERS.clear()
        told.restore()


@pytest.fixture(autouse=True, scope="session")
def _seed_no_absent_device():
    """Without a device, has PyTorch drop the seeds for one that may come: it keeps a stack trace with each."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda.random, "_lazy_call", lambda *_, **__: None)
            patch.setattr(torch.xpu.random, "_lazy_call", lambda *_, **__: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _trust_nothing(tmp_path_factory):
    """Has the state folder of a user who has made and trusted nothing; subprocesses inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _compose_once(tmp_path_factory):
    """Has Hydra keep what it read and merged, for all processes; and runs what they compute alike each time."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "composed"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(composing.FOLDER, str(folder))  # for the server of forks
        composing.remember(patch, folder)
        building.remember(patch, folder)
        yield
