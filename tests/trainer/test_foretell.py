"""Forecasts in a run: logged, told, and a state that is kept."""

import json

import pytest
from omegaconf import OmegaConf

from stabletrain.beside.forecast import forecast as room
from stabletrain.beside.forecast.command import replay_forecast
from stabletrain.beside.forecast.forecast import Forecast
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import Due, log_forecast, train
from tests.beside.forecast.given import LOUD
from tests.runs import TINY_GPT, composed
from tests.trainer.given import make_run, reading

pytestmark = pytest.mark.beside

NOTHING_DUE = Due(evaluate=False, save=False, snapshot=False, stop="", reading=True)
SEEN = {"monitors/attn_logit_max/blocks.0": 3e4}


@pytest.fixture(autouse=True)
def _loud(monkeypatch):
    monkeypatch.setattr(room, "fitted", lambda: LOUD)


def run_with(forecast):
    run = make_run()
    run.monitoring.forecast = forecast
    return run, run.tracker


def logged(run, numbers):
    return log_forecast(run.monitoring.forecast, run.tracker, run.parallel, numbers, SEEN, NOTHING_DUE)


def test_a_forecast_is_an_event_a_line_and_an_alert():
    run, told = run_with(Forecast(500, "alarm"))
    assert logged(run, reading(step=1200)) == NOTHING_DUE
    ((kind, step, fields),) = told.events
    assert (kind, step, fields["signal"], fields["place"]) == ("forecast", 1200, "attention_logits", "blocks.0")
    assert set(fields) >= {"value", "threshold", "at", "low", "high", "probability", "horizon", "fix", "text"}
    text = f"step 1,200: {fields['text']}"
    assert (told.notes, told.alerts) == ([text], [("forecast", text)])
    assert logged(run, reading(step=1201)) == NOTHING_DUE
    assert len(told.events) == 1


def test_the_state_of_an_alarm_is_saved_and_kept_if_that_is_asked():
    run, _ = run_with(Forecast(500, "checkpoint"))
    assert logged(run, reading(step=7)).save
    assert run.monitoring.forecast.kept == [7]
    assert not logged(run, reading(step=8)).save, "no alarm, no state"


SMALL = [*TINY_GPT, "steps=12", "eval_every=12", "log_every=1", "guard=off", "wandb=disabled"]


def test_the_state_of_the_alarm_is_there_at_the_end_and_the_command_says_what_the_run_said(tmp_path):
    kept = ["checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_best=false", "checkpoint.asynchronous=false"]
    with composed(*SMALL, "monitors.every=2", *kept, "forecast.action=checkpoint", "forecast.horizon=1000") as cfg:
        (tmp_path / ".hydra").mkdir()
        OmegaConf.save(cfg, tmp_path / ".hydra" / "config.yaml")  # as the command line does
        job = build(cfg, tmp_path)
        train(job)
    assert len(job.monitoring.forecast.state_dict()["series"]["loss|"]) == 7, "looks at 1, 2, 4 ... 12"
    told = [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "forecast"]
    assert told
    steps = {told[0]["step"], told[-1]["step"], 12}
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        f"step-{n:08d}" for n in sorted(steps)
    ]
    again = json.loads(json.dumps(replay_forecast(tmp_path).as_json()))["forecasts"]
    known = [{name: value for name, value in event.items() if name not in ("event", "time")} for event in told]
    assert again == known


@pytest.mark.parametrize("option", ["monitors=none", "forecast=off"])
def test_without_monitors_or_with_forecast_off_nothing_is_said(tmp_path, option):
    with composed(*SMALL, "steps=4", "checkpoint=off", option) as cfg:
        train(build(cfg, tmp_path))
    assert not [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "forecast"]
