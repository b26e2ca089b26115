"""`Guard(forecast_every=...)`: an own loop's trouble is foretold in train.py's words, and nothing else changes."""

import copy
import json

import pytest
import torch
from torch import nn

from stabletrain.beside.forecast.forecast import Forecast
from stabletrain.errors import ConfigError
from stabletrain.extension import HORIZON
from stabletrain.guard import loop_forecast
from stabletrain.guard.guard import Guard
from stabletrain.guard.in_code import in_code
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.parallel.single import SingleProcess
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.loop import Due, log_forecast
from tests.guard.given import Loop, batches, same
from tests.guard.test_step_numbers import spoilt

pytestmark = pytest.mark.beside

EVERY, STEPS, RATE = 5, 200, 1e-12
"""The rate is so low that no weight moves."""


class Told(NoTracker):
    """Keeps events and notes."""

    def __init__(self):
        self.events, self.notes = [], []

    def event(self, kind, step, /, **fields):
        self.events.append({"event": kind, "step": step, **fields})

    def note(self, text):
        self.notes.append(text)


def events(folder, kind="forecast"):
    """The events of one kind, without their time."""
    file = folder / "events.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{key: value for key, value in line.items() if key != "time"} for line in lines if line["event"] == kind]


def rising(folder, *, attached=False, doubles=25, first=0, **options):
    """Runs a loop whose gradient norm doubles every `doubles` steps; returns the guard and the readings."""
    model = nn.ParameterList([torch.ones(1)])
    optimizer, weight = torch.optim.SGD(model.parameters(), lr=RATE), model[0]
    options = {"policy": SkipGuard(slow="off"), "folder": folder, **options}
    guard = (Guard.attach if attached else Guard)(model, optimizer, **options)
    readings = []
    for step in range(1, STEPS + 1):
        size = 2 ** (step / doubles)
        if first:
            guard.at(first + step)
        if attached:
            optimizer.zero_grad()
            (weight * size).sum().backward()
            optimizer.step()
        else:
            guard.step(lambda size: (weight * size).sum(), size)
        readings.append(guard.last)
    assert guard.skipped == 0
    return guard, readings


def told_by_the_trainer(readings, clipping="none"):
    """What train.py tells of the same steps: events and notes, with the fixes in words for any loop."""
    told, forecast = Told(), Forecast(HORIZON, "alarm")
    forecast.set_run({"clipping": clipping}, {"lr": RATE})
    for reading in readings:
        forecast.add_loss(reading.loss)
        if reading.step % EVERY == 0:
            log_forecast(forecast, told, SingleProcess(), reading, {}, Due(False, False, False, "", True))
    for event in told.events:
        words = {fix: in_code(fix) for fix in event["fix"]}
        event["fix"] = [*words.values()]
        for fix, word in words.items():
            event["text"] = event["text"].replace(f"fix: {fix}", f"fix: {word}")
            told.notes = [note.replace(f"fix: {fix}", f"fix: {word}") for note in told.notes]
    return told


@pytest.mark.parametrize("attached", [False, True])
def test_a_gradient_norm_that_grows_is_foretold_in_the_trainers_words(tmp_path, caplog, attached):
    _, readings = rising(tmp_path, attached=attached, forecast_every=EVERY)
    told = told_by_the_trainer(readings)
    assert events(tmp_path) == told.events
    assert [record.message for record in caplog.records] == told.notes
    about = [event for event in told.events if event["signal"] == "grad_norm"]
    assert about
    assert about[0]["step"] < 25 * 6.64, "before the norm is 100"
    assert any("gradient norms double every 25 steps and reach 100 near step" in event["text"] for event in about)
    assert (
        "no percentage: fitted on small built-in GPTs and ResNets; this is neither; fix: lower the" in about[0]["text"]
    )
    assert about[0]["probability"] is None


def test_the_fix_is_not_what_the_guard_does_already(tmp_path):
    _, readings = rising(tmp_path, forecast_every=EVERY, max_norm=1.0)
    told = told_by_the_trainer(readings, clipping="norm")
    assert [event["fix"] for event in events(tmp_path)] == [event["fix"] for event in told.events]
    assert events(tmp_path)[0]["text"].endswith("fix: lower the learning rate to 3.3e-13")


def test_steps_are_those_of_the_loop_and_the_text_says_how_the_guard_counts(tmp_path):
    rising(tmp_path / "one", forecast_every=EVERY)
    rising(tmp_path / "two", forecast_every=EVERY, first=1000)
    one, two = events(tmp_path / "one"), events(tmp_path / "two")
    assert [event["step"] + 1000 for event in one] == [event["step"] for event in two]
    step = one[0]["step"]
    assert two[0]["text"] == f"{one[0]['text']} (as the guard counts steps; this is its step {step})"


@pytest.mark.parametrize("attached", [False, True])
def test_a_healthy_loop_is_told_nothing_and_its_weights_are_those_without_a_forecast(tmp_path, attached):
    loops = []
    for every in (2, 0):
        options = {"folder": tmp_path / str(every), "forecast_every": every}
        loops.append(loop := Loop(**options))
        if not attached:
            loop.run(batches(60))
            continue
        loop.guard = Guard.attach(loop.model, loop.optimizer, **options)
        torch.manual_seed(2)
        for x, y in batches(60):
            loop.optimizer.zero_grad()
            loop.loss(x, y).backward()
            loop.optimizer.step()
    assert loops[0].guard._loop.forecast.state_dict()["applied"] == 60
    assert same(loops[0].bits(), loops[1].bits())
    assert events(tmp_path / "2") == []


def looks(monkeypatch):
    """The looks that a forecast is given from now on: step and metrics."""
    seen, look = [], Forecast.look
    monkeypatch.setattr(
        Forecast, "look", lambda self, step, metrics: seen.append((step, dict(metrics))) or look(self, step, metrics)
    )
    return seen


def test_a_look_has_the_monitors_names_and_only_every_so_many_applied_steps(tmp_path, monkeypatch):
    seen, measure, measured = looks(monkeypatch), loop_forecast.measure_gradients, []
    monkeypatch.setattr(loop_forecast, "measure_gradients", lambda model: measured.append(0) or measure(model))
    loop = Loop(tmp_path, forecast_every=3, max_incidents=0)
    data = batches(8)
    data[1] = spoilt(data[1])  # not applied, so the third applied step is the fourth
    loop.run(data[:3])
    before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    assert not measured
    loop.guard.step(loop.loss, batch=data[3])
    ((step, metrics),) = seen
    assert (step, len(measured)) == (4, 1)
    place = [name for name in before if name.startswith("4.")]
    size = sum(before[name].square().sum() for name in place)
    moved = sum((loop.model.get_parameter(name).detach() - before[name]).square().sum() for name in place)
    assert metrics["monitors/update_ratio/4"] == pytest.approx(float((moved / size).sqrt()), rel=1e-4)
    count = sum(before[name].numel() for name in place)
    assert metrics["monitors/weight_rms/4"] == pytest.approx(float((size / count).sqrt()), rel=1e-4)
    assert "monitors/g_over_sqrt_v_max" in metrics
    last = loop.guard.last
    assert (metrics["grad/norm"], metrics["lr"], metrics["precision/loss_scale"]) == (last.grad_norm, 1e-2, 1.0)
    loop.run(data[4:])
    assert [step for step, _ in seen] == [4, 7]
    assert len(measured) == 2


@pytest.mark.parametrize("attached", [False, True])
def test_updates_as_large_as_the_weights_are_foretold(tmp_path, attached):
    weight = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    make = Guard.attach if attached else Guard
    guard = make(weight, optimizer, folder=tmp_path, forecast_every=EVERY, policy=SkipGuard(slow="off"))

    def loss(sign):
        """Always 0; the weights go to and fro, further and further."""
        return ((weight.weight - weight.weight.detach()) * sign).sum()

    for step in range(1, 80):
        optimizer.param_groups[0]["lr"] = 2 ** (step / 10) * 1e-3
        if attached:
            optimizer.zero_grad()
            loss((-1) ** step).backward()
            optimizer.step()
        else:
            guard.step(loss, (-1) ** step)
    told = events(tmp_path)
    assert {event["signal"] for event in told} == {"update_ratio"}
    assert told[0]["text"].startswith("updates over weights of weight ")


def test_what_cannot_be_measured_is_said_once_and_the_rest_is_looked_at(tmp_path, caplog, monkeypatch):
    seen, table = looks(monkeypatch), nn.Embedding(4, 2, sparse=True)
    guard = Guard(table, torch.optim.SGD(table.parameters(), lr=0.1), folder=tmp_path, forecast_every=1)
    for _ in range(4):
        guard.step(lambda: table(torch.tensor([1, 2])).square().sum())
    assert [sorted(metrics) for _, metrics in seen] == [["grad/norm", "lr", "precision/loss_scale"]] * 4
    notes = [record.message for record in caplog.records if "forecast_every=1" in record.message]
    assert len(notes) == 1
    assert "could not measure the weights" in notes[0]


def test_a_state_of_an_older_version_or_without_a_forecast_loads(tmp_path):
    guard, _ = rising(tmp_path, forecast_every=EVERY)
    state = copy.deepcopy(guard.state_dict())
    assert state["forecast"]["applied"] == STEPS
    other = Loop(tmp_path, forecast_every=2).guard
    other.load_state_dict(state)
    assert other.state_dict()["forecast"] == state["forecast"]
    del state["forecast"]
    other.load_state_dict(state)
    assert other.state_dict()["forecast"]["series"] == {}
    Loop(tmp_path).guard.load_state_dict(guard.state_dict())


def test_a_rollback_restores_the_series_and_not_what_was_said(tmp_path):
    policy = RollbackGuard(patience=2, snapshot_every=4, healthy_after=0)
    loop = Loop(tmp_path, policy=policy, forecast_every=1, max_incidents=0)
    forecast = loop.guard._loop.forecast
    loop.run(batches(4))
    then = copy.deepcopy(forecast.state_dict())
    loop.run(batches(2, seed=5))
    forecast._forecast._said = {"grad_norm": [6, 1.0, 2.0]}
    assert forecast.state_dict()["series"] != then["series"]
    bad = spoilt(batches(1)[0])
    while not loop.guard._loop.policy.rollbacks:
        loop.run([bad])
    assert forecast.state_dict() == then | {"said": {"grad_norm": [6, 1.0, 2.0]}}


def test_a_negative_interval_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Guard\(forecast_every=-1\) is below 0: 25 is usual, 0 predicts nothing"):
        Loop(tmp_path, forecast_every=-1)
