"""Setup shared by all tests: fast and slow tiers, one thread per worker, PyTorch's seed and global switches."""

import inspect
import os

import pytest
import torch

from tests import composing, typechecks

torch.set_num_threads(1)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA reads it only once, on its first use


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--all` and `--slow`; without them only the fast tests run."""
    tiers = parser.getgroup("tiers").addoption
    tiers("--all", action="store_true", help="run the slow tests too")
    tiers("--slow", action="store_true", help="run only the slow tests: what --all adds")


def pytest_configure(config: pytest.Config) -> None:
    """Has fast tests check types and shapes; the slow ones, more cases of the same code, run it as users do."""
    if not config.getoption("--slow"):
        typechecks.install("stabletrain")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of the other tier."""
    if config.getoption("--all"):
        return
    wanted = config.getoption("--slow")
    left_out = [item for item in items if is_slow(item) != wanted]
    items[:] = [item for item in items if is_slow(item) == wanted]
    config.hook.pytest_deselected(items=left_out)


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is marked `slow`.

    With `slow(unless=condition)`, cases whose parameters fulfil the condition are fast: a few of many, so that both
    tiers test the property.
    """
    mark = item.get_closest_marker("slow")
    if mark is None or "unless" not in mark.kwargs:
        return mark is not None
    condition, parameters = mark.kwargs["unless"], item.callspec.params  # ty: ignore[unresolved-attribute]
    return not condition(*(parameters[name] for name in inspect.signature(condition).parameters))


@pytest.fixture(autouse=True)
def _global_state():
    """Seeds torch's generator, so that no test depends on earlier ones; restores process-wide switches afterwards."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


@pytest.fixture(autouse=True, scope="session")
def _trust_nothing(tmp_path_factory):
    """Has the state folder of a user who has made and trusted nothing; subprocesses inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _compose_once():
    """Has Hydra keep what it read and merged."""
    with pytest.MonkeyPatch.context() as patch:
        composing.remember(patch)
        yield
