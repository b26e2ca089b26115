"""Sums over the parts of sharded tensors; and clipping and optimizers on shards do what they do on whole tensors."""

import json

import pytest
import torch

from stabletrain.parallel.shards import local_parts, norms_over_shards, sum_over_shards
from tests.parallel.launches import alone, forked
from tests.parallel.sharded import CASES, COPIED
from tests.runs import ROOT
from tests.stability.clipping.given import TIGHT

pytestmark = pytest.mark.timeout(600)


def test_whole_tensors_are_their_own_parts_and_nothing_is_sent():
    tensors, numbers = [torch.ones(2), torch.ones(3, 2)], torch.tensor([3.0, 4.0])
    assert all(part is tensor for part, tensor in zip(local_parts(tensors), tensors, strict=True))
    assert sum_over_shards(numbers, tensors) is numbers
    assert norms_over_shards(numbers, tensors) is numbers


@pytest.fixture(scope="module")
def four(shared_place):
    """What each of four ranks saw of each case; one launch."""
    place = shared_place / "sharded"
    place.mkdir(exist_ok=True)
    with alone(place / "lock"):
        if not (place / "rank3.json").exists():
            forked(4, "-m", "tests.parallel.sharded", str(place), cwd=ROOT, logs=place)
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *COPIED])
def test_shards_of_uneven_rows_are_treated_as_whole_tensors_are(four, case):
    assert [seen[case]["differs"] for seen in four] == [""] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TIGHT if kind != "none"])
def test_every_rank_reports_the_same_of_what_it_clipped(four, kind):
    first, *others = ((seen[kind]["coef"], seen[kind]["active"]) for seen in four)
    assert others == [first] * 3, "bit for bit"
    assert min(first[0]) < 1
