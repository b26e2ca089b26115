"""The search for guilty samples names exactly these, in few runs, and what it keeps was run."""

import math
import random

import pytest

from stabletrain.guard.guilty import Sample, Search, all_samples

SHAPES = {
    "one batch": [[16]],
    "micro-batches": [[4, 4, 4]],
    "of other sizes": [[5, 1, 2]],
    "two ranks": [[4, 4], [4, 4]],
}


def search(counts, guilty, sound=None):
    """What the search finds, the sets of samples it kept in its runs, and how often it ran."""
    kept_in_runs, whole = [], set(all_samples(counts))

    def is_sound(left_out):
        kept = whole - set(left_out)
        kept_in_runs.append(kept)
        return sound(kept) if sound else not guilty & kept

    return Search(counts, is_sound).find(), kept_in_runs


@pytest.mark.parametrize("name", SHAPES)
def test_a_guilty_sample_is_found_wherever_it_is(name):
    counts = SHAPES[name]
    samples = all_samples(counts)
    for each in samples:
        found, runs = search(counts, {each})
        assert found == [each]
        assert len(runs) <= 1 + 2 * math.ceil(math.log2(len(samples))) + (name != "one batch")
        assert set(samples) - {each} in runs, "what is kept was run as a whole"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [2, 3])
def test_several_are_found_or_left_out_with_others(name, count):
    counts, dice = SHAPES[name], random.Random(0)
    samples = all_samples(counts)
    for _ in range(30):
        guilty = set(dice.sample(samples, count))
        found, runs = search(counts, guilty)
        assert not found or guilty <= set(found)
        assert not found or set(samples) - set(found) in runs
        assert len(runs) <= 9 + 4 * math.ceil(math.log2(len(samples)))
        if name == "one batch":
            assert set(found) == guilty


def test_a_micro_batch_that_cannot_be_run_in_part_is_left_out_as_a_whole():
    counts = [[2, 2, 2, 2]]

    def sound(kept):
        by_number = [sum(each.micro_batch == number for each in kept) for number in range(4)]
        return all(size in (0, 2) for size in by_number) and by_number[2] == 0

    found, _ = search(counts, set(), sound)
    assert found == [Sample(0, 2, 0), Sample(0, 2, 1)]


def test_a_step_that_is_sound_with_all_samples_has_no_guilty_ones():
    found, runs = search([[8]], set())
    assert (found, len(runs)) == ([], 1)


@pytest.mark.parametrize("counts", [[], [[1]], [[1], [1]]])
def test_nothing_is_left_out_of_a_step_that_cannot_do_without(counts):
    found, _ = search(counts, set(all_samples(counts)))
    assert found == []


def test_samples_that_are_too_many_together_are_kept_as_far_as_they_go():
    """A spike: any three of four heavy samples exceed the limit, so two are left out."""
    found, _ = search([[16]], set(), lambda kept: len({1, 5, 9, 13} & {each.row for each in kept}) <= 2)
    assert len(found) == 2
    assert {each.row for each in found} < {1, 5, 9, 13}


def test_every_micro_batch_of_every_rank_keeps_a_sample():
    counts = [[2, 2], [2, 2]]
    _, runs = search(counts, {Sample(1, 1, 0), Sample(1, 1, 1)})
    assert all(len({(each.rank, each.micro_batch) for each in kept}) == 4 for kept in runs)
