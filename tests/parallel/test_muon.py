"""Muon, QK-clip and bf16 weights on several ranks: the bits of one process, and each matrix orthogonalised once."""

import json

import pytest

from stabletrain.parallel.owners import owners, rows_of
from tests.parallel.launches import alone, forked
from tests.parallel.muon import BAD, CASES, COPIED, STEPS
from tests.runs import ROOT

KINDS = ("ddp", "fsdp")
MATRICES = ["blocks.0.weight", BAD, "blocks.2.weight", "gate.weight"]


def test_the_most_expensive_matrix_goes_to_the_rank_with_the_least_to_do():
    assert owners([1.0, 4.0, 2.0, 2.0], 2) == [0, 0, 1, 1]
    assert owners([3.0, 3.0], 4) == [0, 1]
    assert owners([], 2) == []


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 9])
def test_rows_are_divided_as_torch_chunk_does(rows):
    import torch

    chunks = [len(chunk) for chunk in torch.zeros(rows, 1).chunk(4)] if rows else []
    assert rows_of(rows, 4) == chunks + [0] * (4 - len(chunks))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, shared_place):
    """What each rank saw of each case."""
    place = shared_place / f"muon_{request.param}"
    place.mkdir(exist_ok=True)
    with alone(place / "lock"):
        if not (place / "done").exists():
            forked(request.param, "-m", "tests.parallel.muon", str(place), cwd=ROOT, logs=place)
            (place / "done").touch()
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_bits_of_one_process(ranks, kind, case):
    for seen in ranks:
        assert seen[f"{kind}/{case}"]["equal"] == [True] * STEPS
        assert seen[f"{kind}/{case}"]["finite"] == [True] * STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_a_withheld_step_and_a_matrix_without_a_direction_change_nothing(ranks, kind):
    for seen in ranks:
        withheld, bad = seen[f"{kind}/withheld"]["kept"], seen[f"{kind}/bad"]["kept"]
        assert [len(names) == len(MATRICES) * 2 + 2 for names in withheld] == [False, True, False]
        assert bad == [[], [BAD, f"momentum of {BAD}"], []]
        held = [sum(name in names for name in MATRICES) for names in seen[f"{kind}/large"]["kept"]]
        assert 0 < sum(held) < STEPS * len(MATRICES)


@pytest.mark.parametrize("kind", KINDS)
def test_each_matrix_is_orthogonalised_once_whatever_is_sent(ranks, kind):
    """One all-gather with ddp; with fsdp rows go to the owners and back, at once for all matrices."""
    each = [seen[f"{kind}/usual"] for seen in ranks]
    counts = [sum(seen["matrices"][step] for seen in each) for step in range(STEPS)]
    assert counts == [len(MATRICES)] * STEPS
    assert all(min(seen["matrices"]) > 0 for seen in each)
    assert all(seen["sent"] == [{"ddp": 1, "fsdp": 2}[kind]] * STEPS for seen in each)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("case", COPIED)
def test_each_of_two_copies_has_the_bits_of_one_process_and_orthogonalises_each_matrix_once(ranks, case):
    each = [seen[f"hsdp/{case}"] for seen in ranks]
    for seen in each:
        assert seen["equal"] == [True] * STEPS
        assert seen["sent"] == [2] * STEPS
        assert seen["elsewhere"] == MATRICES
    for copy in (each[:2], each[2:]):
        assert [sum(seen["matrices"][step] for seen in copy) for step in range(STEPS)] == [len(MATRICES)] * STEPS


def test_a_rank_repeats_the_updates_that_it_computes_alone(ranks):
    left = [seen["ddp/usual"]["elsewhere"] for seen in ranks]
    assert all(sum(name not in names for names in left) == 1 for name in MATRICES)
    assert all(seen["fsdp/usual"]["elsewhere"] == MATRICES for seen in ranks)


def test_qk_clip_scales_the_rows_of_its_heads_on_the_ranks_that_have_them(ranks):
    for seen in ranks:
        assert seen["qkclip"] == {"equal": [True, True], "scaled": [[], [3, 4, 5]]}


def test_shards_are_rounded_to_values_of_bf16_by_the_steps_that_are_applied(ranks):
    for seen in ranks:
        assert all(seen["bf16_params"].values()), seen["bf16_params"]
