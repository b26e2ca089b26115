"""The guard on two ranks of a library's own DDP: one verdict, one folder, and training goes on."""

import json

import pytest

from tests.parallel.launches import forked
from tests.runs import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_two_ranks_withhold_and_name_one_step(tmp_path, library):
    if library == "transformers":
        pytest.importorskip("transformers.trainer", reason="pyarrow needs NumPy 2", exc_type=ImportError)
    forked(2, "-m", "tests.beside.adapters.worker", library, str(tmp_path), cwd=ROOT, logs=tmp_path)
    one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert one == other | {"calls": one["calls"]}
    assert one["skips"] == {"nonfinite": 1, "spike": 0, "overflow": 0, "state": 0, "recheck": 0, "update": 0}
    assert one["last_epoch"] == 3, "of four steps"
    assert one["calls"] == other["calls"] == 8, "two micro-batches a step; runs that explain do not count"
    assert [a == b for a, b in zip(one["weights"], one["weights"][1:], strict=False)] == [False, True, False]
    assert "rank 1: unsafe_op" in one["lines"][0]
    assert f"in_{library}.py" in "".join(one["lines"])
