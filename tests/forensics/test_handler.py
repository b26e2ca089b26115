"""The incident handler: its budget, a full disk, and runs that end in the same bits with and without it."""

import errno
import json
import math
import os
import re

import pytest
import torch

from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.tree import flatten, to_host
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.forensics import handler, incident
from stabletrain.forensics import saved_step as files
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.handler import IncidentHandler, NoIncidentHandler
from stabletrain.forensics.investigate import IncidentRequest
from stabletrain.forensics.rerun import VARIANTS
from stabletrain.forensics.subject import StepSubject
from stabletrain.parallel.whole import WholeState
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.forensics.given import findings
from tests.runs import TINY_GPT, TINY_RESNET, composed

QUIET = ["checkpoint=off", "monitors=none", "steps=11"]
MODELS = {"gpt": [*TINY_GPT, "model.dropout=0.1"], "resnet": [*TINY_RESNET, "model.depth=8"]}


def trained(folder, *overrides):
    """Trains a run to its end."""
    with composed(*QUIET, *overrides) as cfg:
        job = build(cfg, folder)
        train(job)
    return job


def bits(job):
    """The run's state as bytes: weights, buffers, moments, guard, precision; without times."""
    parts = {name: part for name, part in job.saved.parts.items() if name != "history"}
    tensors, skeleton = flatten(to_host(capture(job.state, parts)))
    return {name: tensor.numpy(force=True).tobytes() for name, tensor in tensors.items()}, str(skeleton)


def events(folder, kind):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def opened(folder, **values):
    """A handler of a run with these settings."""
    own = IncidentHandler()
    own.open(folder, RunSettings(values=values))
    return own


FAULTS = {
    "gradient": ["faults=gradient", "faults.at=[5,9]"],
    "label": ["faults=label", "faults.at=[5,9]"],
    "activation": ["faults=activation", "faults.at=[5,9]"],
}


@pytest.mark.beside
@pytest.mark.slow(unless=lambda model: model == "gpt")
@pytest.mark.parametrize(("model", "fault"), [("gpt", "activation"), ("resnet", "gradient"), ("resnet", "label")])
def test_a_run_whose_incidents_are_explained_ends_in_the_same_bits_as_one_without(tmp_path, model, fault):
    chosen = [*MODELS[model], *FAULTS[fault], "precision=bf16"]
    on = trained(tmp_path / "on", *chosen)
    off = trained(tmp_path / "off", *chosen, "forensics=off")
    assert bits(on) == bits(off)
    steps = [6, 10] if fault == "label" else [6, 9]  # a step that is taken again takes one more tick
    names = [path.name for path in sorted((tmp_path / "on" / "incidents").iterdir())]
    assert names == [f"step-{step:08}" for step in steps]
    assert not (tmp_path / "off" / "incidents").exists()
    assert [event["step"] for event in events(tmp_path / "off", "skip")] == steps
    assert [event["step"] for event in events(tmp_path / "on", "incident")] == steps


CONTRACT = {
    *("step", "kind", "cause", "confidence", "origin", "samples", "rank", "replays"),
    *("verdict", "fix", "evidence"),
}
PAGE = ("# Step 6: ", "## Fix", "## Replay it yourself", "stabletrain replay ")


@pytest.mark.beside
@pytest.mark.slow
def test_the_folder_holds_every_field_and_section_of_the_contract(tmp_path):
    unsafe = ["precision=fp16", "precision.init_scale=1", "init=normal", "init.std=30"]
    trained(tmp_path / "a", *MODELS["gpt"], *FAULTS["label"])
    with pytest.raises(TrainingHalted):
        trained(tmp_path / "b", *MODELS["gpt"], *unsafe)
    for folder in [*tmp_path.glob("*/incidents/step-*")]:
        record = json.loads((folder / "diagnosis.json").read_text(), parse_constant=pytest.fail)
        assert set(record) >= CONTRACT
        assert set(record["replays"]) == set(VARIANTS)
        assert {file.name for file in folder.iterdir()} >= {"diagnosis.json", "report.md", "batch.safetensors"}
    page = (tmp_path / "a" / "incidents" / "step-00000006" / "report.md").read_text()
    for words in PAGE:
        assert words in page
    assert not re.search("n[o']t.?finite|non.?finite", page), "only the label is wrong"
    finite = (tmp_path / "a" / "incidents" / "step-00000006" / "diagnosis.json").read_text()
    assert json.loads(finite)["kind"] == "bad_data"
    assert "nonfinite" not in finite
    first = tmp_path / "b" / "incidents" / "step-00000001"
    origin = json.loads((first / "diagnosis.json").read_text())["origin"]
    assert {"module", "op", "direction", "dtype", "source", "inputs", "outputs"} <= set(origin)
    for tensor in [*origin["inputs"], *origin["outputs"]]:
        assert {"shape", "dtype", "absmax", "finite"} == set(tensor)
    page = (first / "report.md").read_text()
    for words in (origin["op"], origin["source"], "!!!!", "unchanged | **no** |"):
        assert words in page


def test_existing_folders_count_against_the_budget(tmp_path):
    def never():
        raise AssertionError("an incident past the budget is only counted")

    (tmp_path / "step-00000001").mkdir()
    forensics = IncidentHandler(max_incidents=1)
    forensics.open(tmp_path, RunSettings())
    request, states = IncidentRequest("nonfinite"), WholeState(torch.nn.Linear(1, 1), never)
    assert forensics.handle(request, never, states) is None
    assert NoIncidentHandler().handle(request, never, states) is None


@pytest.mark.beside
def test_a_run_looks_into_no_more_incidents_than_its_budget_and_skips_the_rest_as_before(tmp_path):
    job = trained(tmp_path, *MODELS["gpt"], "faults=label", "faults.at=[3,6,9]", "forensics.max_incidents=2")
    assert len(list((tmp_path / "incidents").iterdir())) == 2
    assert len(events(tmp_path, "skip")) == 3
    assert job.state.step == 11


@pytest.mark.parametrize("bad", [{"max_incidents": 0}, {"max_seconds": 0.0}, {"max_seconds": math.nan}])
def test_an_empty_budget_is_refused(bad):
    with pytest.raises(ConfigError, match=f"forensics.{next(iter(bad))}="):
        IncidentHandler(**bad)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The bits of a run with two bad labels and no handler."""
    return bits(trained(tmp_path_factory.mktemp("off"), *MODELS["gpt"], *FAULTS["label"], "forensics=off"))


@pytest.mark.beside
@pytest.mark.slow(unless=lambda place: place == "state")
@pytest.mark.parametrize("place", ["mkdir", "state", "diagnosis"])
def test_a_full_disk_costs_the_folder_and_neither_the_cause_nor_the_run(tmp_path, monkeypatch, capsys, without, place):
    write = files.write

    def full(path, *arguments, **options):
        if path.name == files.BATCH:  # is written first, and has room
            return write(path, *arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, name = {
        "mkdir": (handler, "file_incident"),
        "state": (files, "write"),
        "diagnosis": (incident, "replace"),
    }[place]
    monkeypatch.setattr(owner, name, full)
    on = trained(tmp_path / "on", *MODELS["gpt"], *FAULTS["label"])
    monkeypatch.undo()
    assert bits(on) == without
    found = events(tmp_path / "on", "incident")
    assert [(event["cause"], event["path"]) for event in found] == [("bad_label", None)] * 2
    assert capsys.readouterr().out.count("could not be written (No space left on device)") == 2
    left = [file.name for file in tmp_path.glob("on/incidents/*/*")]
    assert not {"step.json", "batch.safetensors", "state.safetensors"} & set(left)
    assert left.count("diagnosis.json") == (2 if place == "state" else 0)


@pytest.mark.beside
@pytest.mark.slow(unless=lambda part: part == "investigate")
@pytest.mark.parametrize("part", ["investigate", "file_incident"])
def test_an_error_while_explaining_is_one_line_and_the_run_goes_on(tmp_path, monkeypatch, capsys, without, part):
    monkeypatch.setattr(handler, part, lambda *_, **__: 1 / 0)
    on = trained(tmp_path / "on", *MODELS["gpt"], *FAULTS["label"])
    monkeypatch.undo()
    assert bits(on) == without
    reasons = [event["reason"] for event in events(tmp_path / "on", "not_investigated")]
    assert reasons == ["ZeroDivisionError: division by zero"] * 2
    assert capsys.readouterr().out.count("this incident is not investigated: ZeroDivisionError") == 2


@pytest.mark.beside
def test_without_state_the_folder_is_small_and_still_names_the_cause(tmp_path):
    trained(tmp_path, *MODELS["gpt"], *FAULTS["label"], "forensics.keep_state=false")
    folder = tmp_path / "incidents" / "step-00000006"
    assert json.loads((folder / "diagnosis.json").read_text())["cause"] == "bad_label"
    assert not (folder / "state.safetensors").exists()


def test_a_resumed_run_knows_what_was_filed_under_its_settings(tmp_path, repro):
    """A killed run meets the same step again, at the same tick."""
    (tmp_path / ".step-00000050.dead").mkdir()  # a killed process was writing it
    before, found = opened(tmp_path, lr=0.1, resume="none"), findings()
    assert not list(tmp_path.iterdir())
    told = before.write_incident(StepSubject(repro), found, tick=60)
    after = opened(tmp_path, lr=0.1, resume="auto")
    again = after.filed_at(60)
    assert (again.path, again.cause, again.fix) == (told.path, told.cause, told.fix)
    assert again.lines == [*told.lines[:2], f"{told.lines[2]} (filed already)"]
    assert after.filed_at(61) is None
    assert after.write_incident(StepSubject(repro), found, tick=70).known
    other = opened(tmp_path, lr=0.2, resume="auto")
    assert other.filed_at(60) is None
    assert other.write_incident(StepSubject(repro), found, tick=60).path.name == "step-00000050-2"


def test_a_mistake_that_another_rank_has_filed_is_known(tmp_path, repro):
    found = findings()
    first, second = opened(tmp_path), opened(tmp_path)
    second.noted(first.noted(first.write_incident(StepSubject(repro), found, tick=60)))
    assert second.write_incident(StepSubject(repro), found, tick=70).known
    assert len(first.found) == len(second.found) == 1


@pytest.mark.parametrize("text", ["{}", "[]", "half", '{"cause": 5}'])
def test_a_damaged_diagnosis_does_not_stop_a_resumed_run(tmp_path, text):
    (tmp_path / "step-00000050").mkdir()
    (tmp_path / "step-00000050" / "diagnosis.json").write_text(text)
    assert opened(tmp_path).filed_at(60) is None


@pytest.mark.beside
@pytest.mark.slow
def test_an_incident_met_again_after_a_kill_is_filed_once_and_nothing_of_a_half_one_is_left(tmp_path):
    chosen = [*QUIET[1:], *MODELS["gpt"], "faults=label", "faults.at=[5]", "checkpoint.every=4"]
    with composed(*chosen) as cfg:
        job = build(cfg, tmp_path)
        event = job.tracker.event

        def dies(what, *step, **fields):
            if what == "incident":  # filed, and not recorded yet
                raise KeyboardInterrupt
            event(what, *step, **fields)

        job.tracker.event = dies
        with pytest.raises(KeyboardInterrupt):
            train(job)
    (tmp_path / "incidents" / ".step-00000006.half").mkdir()
    with composed(*chosen, "resume=auto") as cfg:
        train(build(cfg, tmp_path))
    assert [path.name for path in (tmp_path / "incidents").iterdir()] == ["step-00000006"]
    from stabletrain.beside.comparison.reading.runs import read_events

    assert [found["path"] for found in read_events(tmp_path)[0].incidents] == ["incidents/step-00000006"]


@pytest.mark.beside
@pytest.mark.slow
def test_a_mistake_that_shows_again_is_filed_once_and_leaves_room_for_another(tmp_path):
    """A far too high learning rate fails after every rollback and is filed once; each bad label is filed."""
    wild = ["optimizer.lr=1e4", "warmup=none", "precision=fp32", "guard.patience=2", "guard.max_rollbacks=3"]
    with composed(*QUIET, *MODELS["gpt"], *wild, "steps=40") as cfg:
        job = build(cfg, tmp_path / "a")
        with pytest.raises(TrainingHalted):
            train(job)
    causes = [json.loads(file.read_text())["cause"] for file in tmp_path.glob("a/incidents/*/diagnosis.json")]
    assert len(causes) == len({*causes})
    assert sum(job.forensics.handler.recurrences.values()) >= 1
    trained(tmp_path / "b", *MODELS["gpt"], "faults=label", "faults.at=[3,6,9]")
    assert len([*(tmp_path / "b" / "incidents").iterdir()]) == 3
