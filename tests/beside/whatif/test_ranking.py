"""The ranking: tiers first, then paired losses; ties are said; and which arms go on."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.outcome import Outcome
from stabletrain.beside.whatif.ranking import finalists, rank, to_reference

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


def test_an_arm_whose_trouble_came_back_is_not_the_reference():
    # Its rollbacks have skipped other batches: with it as the reference, none of the others could be compared.
    back = ended("back", 1.0, rollbacks=1, val=1.0, first=1000)
    found = rank([ended("nothing", broke="halt"), back, ended("a", 2.0, val=2.2), ended("b", 1.9, val=2.3)], 0)
    assert (found.reference, names(found)[:2]) == ("a", ["b", "a"])
    assert rank([ended("nothing", broke="halt"), back], 0).reference == "back"


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


def test_an_arm_of_the_first_round_gets_the_last_reference():
    ranking = rank([ended("nothing"), ended("a", 1.0)], 0)
    moved = to_reference(ranking.places[1], ended("a", 1.0), 0)
    assert moved.difference.mean == pytest.approx(1.0)
    assert not moved.tied


def test_forecasts_decide_between_arms_that_are_not_told_apart():
    close = [
        replace(ended("nothing"), forecasts=("attention_logits", "update_ratio")),
        replace(ended("a", 1.98, wobble=0.5), forecasts=("update_ratio",)),
        replace(ended("b", 1.99, wobble=-0.5), forecasts=("update_ratio",)),
    ]
    found = rank([*close, ended("c", 2.5)], 0)
    assert names(found) == ["a", "b", "nothing", "c"], "the order is that of the loss"
    assert found.winner == "a"
    assert found.verdict == (
        "Too close to call: a, b, nothing. Taken: a, for which the forecast named 1 signal (nothing: 2)."
    )
    found = rank([*close[:2], replace(close[2], forecasts=())], 0)
    assert found.verdict.endswith("Taken: b, for which the forecast named no signals (nothing: 2).")
    same = [replace(each, forecasts=("update_ratio",)) for each in close]
    assert rank(same, 0).verdict == "Too close to call: nothing, a, b. Taken: nothing.", "it has not decided"


def test_a_forecast_does_not_outweigh_a_lower_loss():
    found = rank([ended("nothing", 2.1), replace(ended("a"), forecasts=("update_ratio",))], 0)
    assert (found.winner, found.verdict) == ("a", "a is best, ahead of nothing by 0.1000 (0.1000 to 0.1000).")


# ---- several seeds


def test_the_seeds_are_pooled_and_each_is_compared_within_itself():
    own = [ended("nothing", 2.0), ended("a", 1.9)]
    other = [ended("nothing", 5.0, val=4.0), ended("a", 4.7, val=3.0)]
    found = rank(own, 0, others={8: other}, seed=7)
    best = found.places[0]
    assert best.difference.mean == pytest.approx(-0.2)
    assert best.difference.count == 200
    assert [(seed, round(each.difference.mean, 6)) for seed, each in best.repeats.items()] == [(7, -0.1), (8, -0.3)]
    assert (best.val_loss, found.winner, found.tied) == (2.5, "a", ["a"])


def test_an_arm_holds_only_if_it_holds_with_every_seed():
    own = [ended("nothing", 1.5), ended("a", 1.0), ended("b", 1.0), ended("c", 1.0)]
    other = [ended("nothing", 1.5), ended("a", 1.0, broke="halt"), ended("b", 1.0, rollbacks=1), ended("c", 2.5)]
    found = rank(own, 0, others={1: other}, first_loss=9.0)
    assert names(found) == ["nothing", "b", "c", "a"]
    each = {place.outcome.arm.name: place for place in found.places}
    assert each["a"].broke == "broke at step 100 with seed 1: halt"
    assert each["b"].trouble == "came back with seed 1: 1 rollback"
    assert each["c"].trouble == "loss 1.5 above the best with seed 1"
    assert not each["nothing"].trouble


def test_an_arm_that_broke_with_another_seed_is_not_the_reference():
    own = [ended("nothing"), ended("a", 1.9), ended("b", 1.8)]
    other = [ended("nothing", broke="halt"), ended("a", 1.9, val=2.5), ended("b", 1.8, val=2.2)]
    assert rank(own, 0, others={1: other}).reference == "b"
    dead = [replace(each, broke="halt") for each in other]
    found = rank(own, 0, others={1: dead})
    assert (found.winner, found.reference) == ("", "")
