"""The series of the signals: what counts between looks, in fp16, and of the losses."""

import math

import pytest

from stabletrain.beside.forecast.series import Series
from stabletrain.beside.forecast.signals import BY_NAME

MARGIN = ("update_margin", "")


def test_a_signal_keeps_its_level_between_the_looks_that_measure_it():
    series = Series(500)
    first = series.add(100, {"monitors/update_margin": 4.0})
    assert series.add(200, {}).now[MARGIN] == first.now[MARGIN] == -math.log(4.0)
    assert MARGIN in series.add(599, {}).now
    assert MARGIN not in series.add(600, {}).now, "a horizon later it is too old"


@pytest.mark.parametrize(("scale", "known"), [(65536.0, False), (1.0, True)])
def test_a_routine_overflow_is_no_sign_of_trouble(scale, known):
    heights = Series(500).add(1, {"grad/norm": math.inf, "precision/loss_scale": scale})
    assert (("grad_norm", "") in heights.now) is known


def test_headroom_and_loss_scale_count_only_if_the_loss_is_scaled():
    metrics = {"monitors/headroom/blocks.0": 3.0}
    plain = Series(500).add(1, {**metrics, "precision/loss_scale": 1.0})
    assert not plain.now
    series = Series(500)
    assert set(series.add(1, {**metrics, "precision/loss_scale": 2.0}).now) == {
        ("headroom", "blocks.0"),
        ("loss_scale", ""),
    }
    at_the_end = series.add(25, {**metrics, "precision/loss_scale": 1.0})
    assert at_the_end.now["loss_scale", ""] == -math.log(2.0) / 2, "the median of both; it has been scaled before"


def test_one_odd_look_is_no_trouble():
    series, key = Series(500), ("grad_norm", "")
    for step, norm in ((25, 1.0), (50, 1.0), (75, 1e9)):
        found = series.add(step, {"grad/norm": norm})
    assert found.now[key] == 0.0
    assert series.add(100, {"grad/norm": 1e9}).now[key] == BY_NAME["grad_norm"].height(1e9), "two of three are"


def test_the_loss_rises_above_its_best_mean():
    series, key = Series(500), ("loss", "")
    for step, losses in ((1, (5.0,)), (2, (4.0, 2.0)), (3, (1.0, 1.0))):
        for loss in losses:
            series.add_loss(loss)
        found = series.add(step, {})
        assert found.now[key] == 0.0, "it falls"
    rises = []
    for step in (4, 5, 6):
        series.add_loss(3.0)
        rises.append(series.add(step, {}).now[key])
    assert rises[-1] == 0.5, "(3 - 1) / (5 - 1)"
    series.add_loss(math.nan)
    series.add(7, {})
    series.add_loss(math.inf)
    assert series.add(8, {}).now[key] == math.inf


def test_a_series_without_a_sign_of_a_trend_has_no_slope():
    series = Series(500)
    for step, norm in enumerate((1.0, 2.0, 1.0, 2.0, 1.0, 2.0), 1):
        found = series.add(25 * step, {"grad/norm": norm})
    assert found.slopes["grad_norm", ""] == 0.0
    assert not found.crossings
