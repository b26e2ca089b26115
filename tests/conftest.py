"""What every test starts from: its tier, one thread a worker, PyTorch's seed and switches."""

import inspect
import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which CUDA reads once, when the first test starts it


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all` and `--slow`; without them only the fast tests run."""
    tiers = parser.getgroup("tiers").addoption
    tiers("--all", action="store_true", help="run the slow tests too")
    tiers("--slow", action="store_true", help="run only the slow tests: what --all adds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of the tier that was not asked for."""
    if config.getoption("--all"):
        return
    wanted = config.getoption("--slow")
    left_out = [item for item in items if is_slow(item) != wanted]
    items[:] = [item for item in items if is_slow(item) == wanted]
    config.hook.pytest_deselected(items=left_out)


def is_slow(item: pytest.Item) -> bool:
    """Whether a test bears the mark `slow`.

    With `slow(unless=condition)` the cases whose parameters fulfil the condition are fast: a few of many, so that the
    property has a test in both tiers.
    """
    mark = item.get_closest_marker("slow")
    if mark is None or "unless" not in mark.kwargs:
        return mark is not None
    condition, parameters = mark.kwargs["unless"], item.callspec.params  # ty: ignore[unresolved-attribute]
    return not condition(*(parameters[name] for name in inspect.signature(condition).parameters))


@pytest.fixture(autouse=True)
def _global_state():
    """Seeds torch's generator, so that no test depends on those before it; puts back switches of the whole process."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
