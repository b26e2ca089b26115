"""Which samples a step reads: permutations in O(1) memory, epochs, skipped ranges."""

import tracemalloc

import numpy as np
import pytest

from stabletrain.data.order import Sources, key, pass_ids, permute, position, sample_ids, split_hash, uniform


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 1000, 2**16 - 1, 2**16, 2**16 + 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_index_goes_to_one_place_of_its_own(n, seed):
    assert sorted(permute(np.arange(n), n, key(seed)).tolist()) == list(range(n))


def test_keys_give_unlike_permutations():
    orders = [permute(np.arange(1000), 1000, key(0, epoch)) for epoch in range(20)]
    same = [(a == b).sum() for i, a in enumerate(orders) for b in orders[:i]]
    assert np.mean(same) == pytest.approx(1, abs=0.5), "two random permutations agree in one place on average"


def test_places_are_spread_evenly():
    """Chi-square over 10 x 10 cells of (index, place): 99 degrees of freedom, so above 149 once in a thousand."""
    n = 20_000
    where = permute(np.arange(n), n, key(3))
    cells, _, _ = np.histogram2d(np.arange(n), where, bins=10)
    assert ((cells - n / 100) ** 2 / (n / 100)).sum() < 149


def test_a_billion_samples_take_no_memory():
    tracemalloc.start()
    ids, _ = sample_ids(123_456_789_012, 64, 10**9, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    assert len(set(ids.tolist())) == 64
    assert ids.min() >= 0
    assert ids.max() < 10**9


def test_each_epoch_reads_every_sample_once_in_an_order_of_its_own():
    ids, epochs = sample_ids(0, 30, 10, seed=5)
    passes = [ids[epochs == epoch].tolist() for epoch in range(3)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3


def test_a_batch_across_epochs_equals_its_parts():
    whole, _ = sample_ids(0, 40, 7, seed=1)
    parts = [sample_ids(start, 5, 7, seed=1)[0] for start in range(0, 40, 5)]
    assert whole.tolist() == np.concatenate(parts).tolist()


def test_a_pass_covers_everything_once_and_ends():
    assert np.concatenate([pass_ids(step, 4, 10) for step in range(3)]).tolist() == list(range(10))
    with pytest.raises(IndexError):
        pass_ids(3, 4, 10)


def test_skipped_ranges_are_never_read_and_nothing_else_is_lost():
    skipped = [(20, 22), (5, 8), (6, 10)]
    positions = [position(step, skipped) for step in range(40)]
    assert positions == [p for p in range(100) if not (5 <= p < 10 or 20 <= p < 22)][:40]
    assert [position(step, []) for step in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("now", [0, 3, 9])
def test_a_range_added_ahead_changes_no_earlier_step(now):
    before = [(2, 4)]
    here = position(now, before)
    after = [*before, (here, here + 6)]
    assert [position(s, before) for s in range(now)] == [position(s, after) for s in range(now)]
    assert position(now, after) == here + 6


def test_numbers_looked_up_by_number_are_uniform_and_independent_of_their_neighbours():
    numbers = uniform(np.arange(20_000), key(1), 3)
    assert np.abs(numbers.mean(axis=0) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.03
    assert np.abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03
    assert np.array_equal(uniform(np.array([777]), key(1), 3)[0], numbers[777])


def test_a_name_has_its_place_whatever_else_there_is():
    assert split_hash("a.py") == split_hash("a.py") != split_hash("b.py")
    places = [split_hash(f"file{i}") for i in range(5000)]
    assert np.mean(np.array(places) < 0.1) == pytest.approx(0.1, abs=0.015)


def test_sources_are_formatted_on_access():
    asked = []
    sources = Sources(lambda index: asked.append(index) or f"sample {index}", np.array([4, 8, 15]))
    assert len(sources) == 3
    assert not asked
    assert sources[1:][0] == "sample 8"
    assert asked == [8]
