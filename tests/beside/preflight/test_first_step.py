"""`check=first_step`: what is wrong is said before the first step, and nothing of the run is changed."""

import io

import pytest
import torch
from torch import nn

from stabletrain.beside.preflight import first_step
from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.tree import flatten
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.tracking.progress import Progress
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import TINY_GPT, composed

SHORT = [*TINY_GPT, "steps=2", "checkpoint=off", "report=false", "precision=fp32"]


@pytest.fixture
def screen():
    return io.StringIO()


@pytest.fixture
def run(tmp_path, screen):
    with composed(*SHORT) as cfg:
        yield build(cfg, tmp_path / "run", Progress(10, screen))


def looked(run):
    return [(each.verdict, each.check, each.places) for each in run.monitoring.preflight.look(run)]


def events(run):
    return [each for each in read_jsonl(run.output.folder.path / "events.jsonl") if each["event"] == "check"]


def test_of_the_reference_nothing_is_said(run, screen):
    assert looked(run) == []
    train(run)
    assert events(run) == []
    assert "fault" not in screen.getvalue()


def test_a_head_made_anew_is_said_before_the_first_step(run, screen):
    run.state.model.head.weight = nn.Parameter(run.state.model.head.weight.detach().clone())
    [(verdict, check, places)] = looked(run)
    assert (verdict, check) == ("fault", "structure")
    assert "head.weight" in places
    with pytest.raises(Exception, match="parameter"):  # the snapshot before the first step refuses it as well
        train(run)
    [event] = events(run)
    assert (event["step"], event["verdict"], event["check"]) == (0, "fault", "structure")
    assert "fault    structure: " in screen.getvalue()


def test_targets_that_are_all_the_same_are_said(run):
    load = run.data.load
    run.data.load = lambda step: load(step).having(load(step).inputs, torch.zeros_like(load(step).targets))
    assert [(verdict, check) for verdict, check, _ in looked(run)] == [("note", "data")]


def test_weights_near_the_largest_number_of_fp16_are_said(tmp_path):
    with composed(*SHORT, "precision=fp16") as cfg:
        run = build(cfg, tmp_path / "run")
    with torch.no_grad():
        run.state.model.blocks[0].mlp.up.weight[0, 0] = 60_000.0
    [(verdict, check, places)] = looked(run)
    assert (verdict, check) == ("fault", "headroom")
    assert places == ("blocks.0.mlp.up.weight",)


def test_an_error_of_the_users_data_is_left_to_training(run, monkeypatch):
    monkeypatch.setattr(run.data, "load", lambda step: 1 / 0)
    assert [(each.verdict, each.text) for each in run.monitoring.preflight.look(run)] == [
        ("note", "could not be checked: ZeroDivisionError: division by zero")
    ]


def test_nothing_of_the_run_is_changed(run):
    def everything():
        tree = capture(run.state, run.saved.parts)
        tensors, skeleton = flatten(tree)
        return {name: each.clone() for name, each in tensors.items()}, skeleton, torch.get_rng_state()

    tensors, skeleton, numbers = everything()
    first_step.findings_of(run)
    after, skeleton_after, numbers_after = everything()
    assert skeleton == skeleton_after
    assert torch.equal(numbers, numbers_after)
    assert tensors.keys() == after.keys()
    assert all(torch.equal(tensors[name], each) for name, each in after.items())


def test_with_check_off_nothing_is_looked_at(tmp_path):
    with composed(*SHORT, "check=off") as cfg:
        run = build(cfg, tmp_path / "run")
    run.state.model.head.weight = nn.Parameter(run.state.model.head.weight.detach().clone())
    assert looked(run) == []
