"""`Guard(keep="all_but_guilty")` on two ranks of DDP, of which one has the guilty samples."""

import json

import pytest
import torch
import torch.nn.functional as F

from tests.guard.given import batches
from tests.guard.keep_worker import BAD, CASES, STEPS, network
from tests.parallel.launches import forked
from tests.runs import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    place = tmp_path_factory.mktemp("keep")
    forked(2, "-m", "tests.guard.keep_worker", str(place), cwd=ROOT, logs=place)
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(2)]


def alone(rows):
    """One process with the samples of both ranks, without the bad ones; all count equally. None skips the step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, pair in enumerate(zip(batches(STEPS, seed=10), batches(STEPS, seed=11), strict=True)):
        (x, y), (other_x, other_y) = pair
        kept = [row for row in range(len(x)) if step != BAD or rows is None or row not in rows]
        if step == BAD and rows is None:
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat([x, other_x[kept]])), torch.cat([y, other_y[kept]])).backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_apply_what_is_left_over_all_of_them(ranks, name):
    first, second = (seen[name] for seen in ranks)
    assert first == second
    rows, parts = CASES[name]
    kept = len(rows) < 8 // parts  # DDP reduces in every micro-batch, so none can be left out on one rank
    assert first["counts"] == ([1, len(rows)] if kept else [0, 0])
    assert first["applied"] == [kept or step != BAD for step in range(STEPS)]
    for mine, wanted in zip(first["weights"], alone(rows if kept else None), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_sharded_weights_are_refused(ranks):
    assert all("does not work with sharded weights (fully_shard): use DDP" in seen["refusal"] for seen in ranks)
