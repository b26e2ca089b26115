"""The forecast: right about when, silent across regimes, and never saying the same twice."""

import itertools
import json
import math
import random
from dataclasses import asdict

import pytest

from stabletrain.beside.forecast import forecast as room
from stabletrain.beside.forecast.forecast import Forecast
from stabletrain.beside.forecast.model import fitted, outlook
from stabletrain.beside.forecast.signals import SIGNALS
from stabletrain.errors import ConfigError
from stabletrain.extension import NoForecast
from tests.beside.forecast.given import LOGITS, LOUD, MODEL, doubling, looks

KEY = ("attention_logits", "blocks.0")
CROSSING = 100 * math.log2(1e4 / 10)


@pytest.fixture(autouse=True)
def _model(monkeypatch):
    monkeypatch.setattr(room, "fitted", lambda: MODEL)


def told(forecast, series):
    return [found for step, metrics in series for found in forecast.look(step, metrics)]


def test_a_series_that_doubles_is_foretold_at_the_right_step():
    first = next(each for each in told(Forecast(500, "alarm"), looks(doubling, range(50, 900, 50))) if each.at > 0)
    assert (first.signal, first.place, first.threshold) == ("attention_logits", "blocks.0", 1e4)
    assert first.step < 700, "long before"
    assert first.at == pytest.approx(CROSSING)
    left = CROSSING - first.step
    assert (first.low, first.high) == pytest.approx((first.step + 0.8 * left, first.step + 1.25 * left))
    words = f"largest attention logits of blocks.0 double every 100 steps and reach 10000 near step {CROSSING:,.0f}"
    assert first.text.startswith(words)
    assert first.fields()["at"] == round(CROSSING, 1)


def test_a_signal_beyond_its_threshold_has_no_crossing():
    (first,) = told(Forecast(500, "alarm"), looks(lambda step: 3e4, range(25, 200, 25)))
    assert (first.step, first.fields()["at"]) == (25, None)
    assert "are 3e+04, beyond 10000" in first.text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_no_forecast(value):
    assert told(Forecast(500, "alarm"), looks(lambda step: value, range(25, 200, 25))) == []


def test_nothing_is_extrapolated_across_the_end_of_a_warmup():
    def rate(step):
        return min(step, 400) / 400

    def value(step):
        return doubling(min(step, 400), start=100.0)

    forecast = Forecast(500, "alarm")
    found = {step: forecast.heights(step, metrics) for step, metrics in looks(value, range(25, 700, 25), rate)}
    assert found[400].crossings[KEY] == pytest.approx(100 * math.log2(100))
    assert not any(KEY in heights.crossings for step, heights in found.items() if step > 400)
    assert KEY not in found[525].slopes, "five looks are no trend"
    assert found[550].slopes[KEY] == 0


def test_a_trend_is_extended_as_far_as_its_looks_reach_back():
    forecast = Forecast(10_000, "alarm")
    found = {step: forecast.heights(step, metrics) for step, metrics in looks(doubling, range(25, 900, 25))}
    stated = [step for step, heights in found.items() if KEY in heights.crossings]
    assert stated == [*range(725, 900, 25)], "the last 12 looks reach 275 steps back"
    later = found[700].later[KEY] - found[700].now[KEY]
    assert later == pytest.approx(math.log(2) * (275 + 25) / 100), "the median of three looks is 25 steps old"


def test_the_look_at_the_first_step_is_no_part_of_a_trend():
    forecast = Forecast(500, "alarm")
    found = {step: forecast.heights(step, metrics) for step, metrics in looks(doubling, [1, *range(25, 175, 25)])}
    assert KEY not in found[125].slopes, "five looks without it"
    assert KEY in found[150].slopes


def test_the_updates_margin_is_watched_and_does_not_count():
    heights = Forecast(500, "alarm").heights(25, {"lr": 1e-3, "monitors/update_margin": 1e-3})
    assert ("update_margin", "") in heights.now
    seen = outlook(heights, MODEL)
    assert "update_margin" not in seen.levels
    assert seen.worst is None


def test_a_time_that_was_unknown_is_said_when_it_is_known():
    found = told(Forecast(10_000, "alarm"), looks(doubling, range(25, 900, 25)))
    assert [math.isnan(each.at) for each in found] == [True, False]
    assert found[1].at == pytest.approx(CROSSING)


def test_it_is_said_once_and_again_after_a_horizon():
    found = told(Forecast(200, "alarm"), looks(lambda step: 3e4, range(25, 700, 25)))
    assert [each.step for each in found] == [25, 225, 425, 625]


def test_it_is_said_again_if_the_crossing_leaves_the_interval_that_was_said():
    def faster(step):
        return doubling(step) if step <= 600 else doubling(600) * 2 ** ((step - 600) / 180)

    same = told(Forecast(10_000, "alarm"), looks(doubling, range(50, 900, 50)))
    changed = told(Forecast(10_000, "alarm"), looks(faster, range(50, 1300, 50)))
    assert len(same) == 2, "without a time, and with it"
    assert changed[1] == same[1]
    assert len(changed) > 2
    for before, after in itertools.pairwise(changed[1:]):
        assert not before.low <= after.at <= before.high


def test_one_odd_look_changes_nothing():
    def odd(step):
        return 1e9 if step == 200 else 10.0

    assert told(Forecast(500, "alarm"), looks(odd, range(25, 500, 25))) == []


def test_a_loss_that_rises_above_its_best_is_a_signal():
    forecast, found = Forecast(500, "alarm"), []
    for step, loss in ((25, 5.0), (50, 3.0), (75, 1.0), (100, 3.0), (125, 3.0)):
        forecast.add_loss(loss - 0.5)
        forecast.add_loss(loss + 0.5)
        heights = forecast.heights(step, {"lr": 1e-3})
        found.append(heights.now["loss", ""])
    assert found == [0.0, 0.0, 0.0, 0.0, 0.5], "the median of three: 2 of the 4 nats that were learnt"


def test_a_look_without_a_learning_rate_is_a_look():
    forecast = Forecast(500, "alarm")
    for step, metrics in looks(lambda step: doubling(step, every=25), range(25, 200, 25)):
        heights = forecast.heights(step, {LOGITS: metrics[LOGITS]})
    assert heights.crossings[KEY] == pytest.approx(CROSSING / 4)


@pytest.mark.parametrize("cut", [1, 5, 17, 30])
def test_a_restored_forecast_says_the_same(cut):
    def uneven(step):
        return doubling(step) * (1 + 0.3 * math.sin(step))

    def series():
        return looks(uneven, range(25, 1500, 25), lambda step: min(1, step / 300))

    def run(forecast, part):
        found = []
        for step, metrics in part:
            forecast.add_loss(5.0 + math.sin(step))
            found += [(forecast.heights(step, metrics), forecast.look(step + 12, metrics))]
            forecast.add_loss(4.0 - step / 1e3)
        return [(asdict(heights), *map(repr, said)) for heights, said in found]

    whole, before, after = (Forecast(300, "alarm") for _ in range(3))
    together = run(whole, series())
    first = run(before, series()[:cut])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert first + run(after, series()[cut:]) == together
    assert after.state_dict() == whole.state_dict()
    assert any(said for _, *said in together[cut:])


def test_a_rollback_undoes_the_series_and_not_what_was_said_and_kept(monkeypatch):
    monkeypatch.setattr(room, "fitted", lambda: LOUD)
    forecast = Forecast(500, "checkpoint")
    forecast.look(25, {"lr": 1e-3, "grad/norm": 1.0})
    before = json.loads(json.dumps(forecast.state_dict()))
    assert told(forecast, looks(lambda step: 3e4, [50]))
    forecast.keep(50)
    kept = forecast.cumulative_state()
    forecast.load_state_dict(before)
    forecast.load_cumulative_state(kept)
    assert forecast.state_dict()["series"] == before["series"]
    assert told(forecast, looks(lambda step: 3e4, [50])) == []
    assert forecast.kept == [50]


def test_the_first_and_the_newest_state_are_kept():
    forecast = Forecast(500, "checkpoint")
    for step in (10, 20, 30, 30):
        forecast.keep(step)
    assert forecast.kept == [10, 30]
    assert forecast.keeps
    assert not Forecast(500, "alarm").keeps


@pytest.mark.parametrize(("given", "message"), [((0, "alarm"), "horizon=0"), ((5, "stop"), "action=stop")])
def test_what_it_cannot_do_is_refused(given, message):
    with pytest.raises(ConfigError, match=f"forecast.{message} "):
        Forecast(*given)


def test_off_says_and_keeps_nothing():
    off = NoForecast()
    off.set_run({}, {})
    off.add_loss(math.nan)
    off.keep(3)
    assert told(off, looks(lambda step: 1e9, range(25, 500, 25))) == []
    assert (off.state_dict(), off.kept, off.keeps) == ({}, (), False)


def test_no_measurement_ends_a_run(monkeypatch):
    monkeypatch.setattr(room, "fitted", fitted)
    draw = random.Random(0)
    odd = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-300, 1e300, 5e-324, 1.0, 65504.0)
    names = [signal.metric + (place if signal.metric.endswith("/") else "") for signal in SIGNALS for place in "ab|"]
    for _ in range(20):
        forecast, step = Forecast(draw.choice((1, 500)), "alarm"), 0
        model = draw.choice(("gpt_nano", "mine"))
        forecast.set_run({"model": model, "optimizer": "sgd", "precision": "fp32"}, {"lr": 1e-3})
        for _ in range(20):
            step += draw.choice((1, 25, 10**9))
            forecast.add_loss(draw.choice(odd))
            seen = {name: draw.choice(odd) for name in names if draw.random() < 0.7}
            for found in forecast.look(step, {**seen, "lr": draw.choice(odd)}):
                assert math.isnan(found.probability) if forecast.distance else 0 <= found.probability <= 1
                json.dumps(found.fields())
            forecast.load_state_dict(json.loads(json.dumps(forecast.state_dict())))
