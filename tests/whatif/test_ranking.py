"""The ranking: tiers first, then paired losses; ties are said; and which arms go on."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stabletrain.whatif.arms import Arm
from stabletrain.whatif.outcome import Outcome
from stabletrain.whatif.ranking import finalists, rank, to_reference

NOISE = np.random.default_rng(0).normal(size=100)
"""Of the batches: all arms meet the same."""


def ended(name, level=2.0, *, broke="", skips=0, rollbacks=0, val=2.0, first=0, wobble=0.0):
    losses = {first + n: level + noise + wobble * math.sin(n) for n, noise in enumerate(NOISE)}
    return Outcome(Arm(name), Path(name), 100, broke, skips, rollbacks, (), losses, val, 0.1)


def names(ranking):
    return [each.outcome.arm.name for each in ranking.places]


def test_the_noise_of_the_batches_cancels():
    found = rank([ended("nothing", val=2.5), ended("better", 1.99), ended("worse", 2.01)], 0)
    assert names(found) == ["better", "nothing", "worse"]
    assert found.places[0].difference.mean == pytest.approx(-0.01)
    assert (found.reference, found.winner, found.tied) == ("nothing", "better", ["better"])
    assert found.verdict == "better is best, ahead of nothing by 0.0100 (0.0100 to 0.0100)."


def test_batches_before_the_trouble_do_not_count():
    early = ended("early")
    early.losses.update(dict.fromkeys(range(50), 0.0))
    assert names(rank([ended("nothing"), early], 0)) == ["early", "nothing"]
    assert [each.difference.mean for each in rank([ended("nothing"), early], 50).places] == [0.0, 0.0]


def test_an_arm_whose_trouble_came_back_ranks_below_one_that_held():
    found = rank([ended("nothing", 1.0, rollbacks=1), ended("a", 3.0), ended("b", 2.0, skips=2)], 0)
    assert names(found) == ["a", "nothing", "b"]
    assert found.verdict == "a is best.", "nothing has a lower loss, and has not held"
    assert not replace(ended("one skip", skips=1), losses={0: 1.0}).came_back
    assert ended("many", skips=2).came_back == "2 skips"


def test_an_arm_that_lost_what_was_learnt_has_not_held():
    # Without a skipped step: its loss jumped by less than the guard takes for a spike, and stayed there.
    outcomes = [ended("nothing", 3.0, rollbacks=1), ended("jumped", 3.5), ended("lower", 3.1)]
    assert names(rank(outcomes, 0)) == ["lower", "jumped", "nothing"]
    found = rank(outcomes, 0, first_loss=6.0 + NOISE.mean())  # the best has learnt 3: a tenth of it is 0.3
    assert names(found) == ["lower", "nothing", "jumped"]
    assert [each.trouble for each in found.places] == ["", "came back: 1 rollback", "loss 0.5 above the best"]
    assert names(rank([ended("nothing", 9.0), ended("a", 8.0)], 0, first_loss=5.0)) == ["a", "nothing"]


def test_arms_that_are_not_told_apart_are_a_tie_and_nothing_is_taken():
    found = rank([ended("nothing"), ended("a", 1.98, wobble=0.5), ended("b", 2.5)], 0)
    assert found.tied == ["a", "nothing"]
    assert found.winner == "nothing"
    assert found.verdict == "Too close to call: nothing, a. Taken: nothing."


def test_if_nothing_broke_the_best_validation_loss_is_the_reference():
    found = rank([ended("nothing", broke="halt"), ended("a", 2.0, val=2.2), ended("b", 1.9, val=2.1)], 0)
    assert (found.reference, found.winner) == ("b", "b")
    assert names(found) == ["b", "a", "nothing"]
    assert rank([ended("nothing", broke="x"), ended("a")], 0).verdict == "a is the only arm that holds."


def test_if_every_arm_broke_there_is_no_winner():
    found = rank([ended("nothing", broke="halt"), ended("a", broke="halt")], 0)
    assert (found.winner, found.reference, found.tied) == ("", "", [])
    assert found.verdict == "No arm holds: each of them broke."
    assert finalists(found, 3) == []


def test_an_arm_that_skipped_data_is_compared_on_the_batches_it_has_read():
    shifted = ended("skip", first=30)
    shifted.losses.update({30 + n: 1.5 + NOISE[30 + n] for n in range(70)})
    found = rank([ended("nothing"), shifted], 0)
    assert found.places[0].difference.mean == pytest.approx(-0.5)
    assert found.places[0].difference.count == 70


def test_the_best_go_on_and_nothing_with_them():
    ranking = rank([ended("nothing", 3.0), ended("a", 1.0), ended("b", 2.0), ended("c", 2.5), ended("d", broke="x")], 0)
    assert finalists(ranking, 2) == ["a", "b", "nothing"]
    assert finalists(ranking, 9) == ["a", "b", "c", "nothing"]


def test_an_arm_of_the_first_heat_gets_the_last_reference():
    ranking = rank([ended("nothing"), ended("a", 1.0)], 0)
    moved = to_reference(ranking.places[1], ended("a", 1.0), 0)
    assert moved.difference.mean == pytest.approx(1.0)
    assert not moved.tied
