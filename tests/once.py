"""Runs that several tests read are trained once in a session, by the first of pytest's processes that asks."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.launches import alone


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """Returns a folder that all tests of the session share. None of them may write into it.

    Args:
        factory: the fixture `tmp_path_factory`.
        name: of the folder.
        make: writes it; its content may not depend on which process does.
    """
    base = factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once" / name
    place.mkdir(parents=True, exist_ok=True)
    with alone(place / "lock"):
        if not (place / "done").exists():
            shutil.rmtree(place / "made", ignore_errors=True)  # of a process in which `make` failed
            make(place / "made")
            (place / "done").touch()
    return place / "made"
