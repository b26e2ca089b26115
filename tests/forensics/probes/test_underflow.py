"""Underflow is distinguished from gradients that are 0 in fp32 too; only a real one becomes an incident."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from stabletrain.cli.commands import main
from stabletrain.errors import TrainingHalted
from stabletrain.forensics import handler
from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.diagnosis.evidence import Evidence, RunSettings
from stabletrain.forensics.probes.underflow import LostGradient, Underflow, measure
from stabletrain.records import Reading
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.forensics.test_handler import bits, events
from tests.reliability.zoo.install import behind
from tests.reliability.zoo.parts import FaintGradient, SteepBackward
from tests.runs import TINY_GPT, TINY_RESNET, composed

QUIET = ["checkpoint=off", "monitors.every=2", "warmup=none", "steps=8"]
MODELS = {"gpt": ([*TINY_GPT, "model.dropout=0.1"], "head"), "resnet": ([*TINY_RESNET, "model.depth=8"], "fc")}
SMALL = ["precision=fp16", "precision.init_scale=1"]


class NoGradient(FaintGradient):
    """Passes no gradient, in any format."""

    after = 0.0


def trained(folder, *overrides, place=None, part=FaintGradient, at=0):
    """A finished or halted run with `part` after one of its modules."""
    with composed(*QUIET, *overrides) as cfg:
        job = build(cfg, folder)
        if place:
            partial(behind, place, part, at)(job, False)
        train(job)
    return job


def diagnoses(folder):
    """The incidents of a run, in order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("incidents/*/diagnosis.json"))]


def test_only_gradients_that_are_nonzero_in_fp32_count_as_lost():
    wide = {"a": torch.tensor([1e-9, 1e-9, 0.0, 1.0]), "dead": torch.zeros(4), "kept": torch.ones(8)}
    narrow = {"a": torch.tensor([0.0, 0.0, 0.0, 1.0]), "dead": torch.zeros(4), "kept": torch.ones(8)}
    found = measure(narrow, wide, 8.0)
    assert found.worst == (LostGradient("a", 4, zeros=0.75, in_fp32=0.25, lost=2 / 3),)
    assert (found.zeros, found.in_fp32, found.lost_share) == (7 / 16, 5 / 16, 4 / 16)
    assert found.real
    assert not measure(wide, wide, 8.0).real


def test_an_idle_bias_is_no_underflow():
    """Such as a bias of keys, whose gradient is 0 except for rounding."""
    wide = {"bias": torch.full((4,), 1e-12), "weight": torch.ones(32, 32)}
    narrow = {"bias": torch.zeros(4), "weight": torch.ones(32, 32)}
    found = measure(narrow, wide, 1.0)
    assert [one.name for one in found.worst] == ["bias"]
    assert not found.real


@pytest.mark.slow(unless=lambda model: model == "resnet")
@pytest.mark.parametrize("model", MODELS)
def test_an_alarm_leads_to_an_incident_and_to_the_same_bits_as_without_forensics(tmp_path, model):
    overrides, place = MODELS[model]
    on = trained(tmp_path / "on", *overrides, *SMALL, place=place)
    off = trained(tmp_path / "off", *overrides, *SMALL, "forensics=off", place=place)
    assert bits(on) == bits(off)
    (alarm,) = (event for event in events(tmp_path / "on", "alarm") if event["kind"] == "vanishing")
    (found,) = diagnoses(tmp_path / "on")
    assert found["step"] == alarm["step"]
    assert (found["kind"], found["cause"], found["origin"]) == ("loss_scale", "fp16_underflow", None)
    assert found["fix"] == ["precision.init_scale=65536", "precision=bf16"]
    assert found["reading"]["applied"] is True
    same, fp32 = found["replays"]["same"], found["replays"]["fp32"]
    assert same["finite"]
    assert same["bitwise_equal_to_reading"] is None, "the step's own weights are gone"
    assert same["zero_gradients"] > 0.95 > 0.5 > fp32["zero_gradients"]
    (folder,) = (tmp_path / "on" / "incidents").iterdir()
    page = (folder / "report.md").read_text()
    assert "its update was applied" in page
    assert "skipped" not in page
    assert "| 0 at loss scale 1 | 0 in fp32 |" in page
    assert f"replay {folder} 'precision.init_scale=65536'" in page


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_with_the_named_fix_there_is_no_incident(tmp_path, model):
    overrides, place = MODELS[model]
    trained(tmp_path, *overrides, "precision=fp16", "precision.init_scale=65536", place=place)
    assert not diagnoses(tmp_path)
    assert all("Adam's eps" in alarm["text"] for alarm in events(tmp_path, "alarm")), "so small they are in fp32 too"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_clean_run_is_not_looked_into_at_all(tmp_path, monkeypatch, model):
    def never(*_, **__):
        raise AssertionError("nothing is wrong, so nothing is investigated")

    monkeypatch.setattr(handler, "investigate", never)
    trained(tmp_path, *MODELS[model][0], "precision=fp16", "precision.init_scale=256")
    assert not events(tmp_path, "alarm")


@pytest.mark.slow
def test_weights_and_buffers_of_the_repro_are_of_the_same_step(tmp_path, monkeypatch):
    """Both are from after the update: earlier BatchNorm statistics belong to other weights."""
    explain, seen = handler.investigate, []

    def looking(subject, *given, **more):
        pairs = zip(subject.buffers, subject.model.buffers(), strict=True)
        seen.append((subject.repro.applied, all(torch.equal(ours, live) for ours, live in pairs)))
        return explain(subject, *given, **more)

    monkeypatch.setattr(handler, "investigate", looking)
    trained(tmp_path, *MODELS["resnet"][0], *SMALL, place="fc")
    assert seen == [(True, True)]


def test_gradients_that_are_0_in_fp32_too_are_an_alarm_and_no_incident(tmp_path):
    trained(tmp_path, *MODELS["gpt"][0], *SMALL, place="head", part=NoGradient)
    assert [event["kind"] for event in events(tmp_path, "alarm")] == ["vanishing"]
    assert not diagnoses(tmp_path)
    assert not events(tmp_path, "incident")


@pytest.mark.slow
def test_an_incident_is_replayed_from_its_folder_and_a_larger_scale_is_tried(tmp_path, capsys):
    with composed(
        *QUIET, *MODELS["gpt"][0], "precision=fp16", *("precision.init_scale=1e-7", "precision.min_scale=1e-7")
    ) as cfg:
        train(build(cfg, tmp_path))
    (folder,) = (tmp_path / "incidents").iterdir()
    (then,) = diagnoses(tmp_path)
    capsys.readouterr()

    def replayed(*overrides):
        assert main(["replay", "--json", str(folder), *overrides]) == 0
        return json.loads(capsys.readouterr().out)

    again = replayed()
    assert again["same_bits"] is None
    assert again["now"] == {name: then["replays"]["same"][name] for name in ("loss", "grad_norm")}
    assert again["zero_gradients"] == then["replays"]["same"]["zero_gradients"]
    assert replayed("precision.init_scale=65536")["zero_gradients"] < 0.5
    assert replayed("precision=fp32")["zero_gradients"] < 0.5
    assert main(["replay", str(folder)]) == 0
    assert "after its update, the step is finite, and 100.0% of its gradients" in capsys.readouterr().out


@pytest.mark.beside
@pytest.mark.slow
def test_a_collapse_that_ends_the_run_is_explained_even_if_bad_data_was_skipped_before_it(tmp_path):
    halting = ["guard=skip", "guard.max_consecutive=3", "precision=fp16", "precision.init_scale=1"]
    label = ["faults=label", "faults.at=[4]", "checkpoint=off"]
    with pytest.raises(TrainingHalted):
        trained(tmp_path, *MODELS["gpt"][0], *halting, *label, place="head", part=SteepBackward, at=4)
    found = diagnoses(tmp_path)
    assert [(each["step"], each["kind"], each["cause"]) for each in found] == [
        (5, "nonfinite", "bad_label"),
        (7, "loss_scale", "loss_scale_collapse"),
    ]
    assert "Its update was skipped" in (tmp_path / "incidents" / "step-00000007" / "report.md").read_text()


READING = Reading(50, 3.0, {}, 1e-6, 1.0, 0.0, 0.0, 0.0, 1.0, True, False, False, 3e-3)
LOST = Underflow(
    1.0, zeros=0.9, in_fp32=0.1, lost_share=0.8, worst=(LostGradient("a", 9, 1.0, 0.0, 1.0),), sufficient_scale=65536.0
)


@pytest.mark.parametrize(
    ("precision", "initial", "cured_at", "fix"),
    [
        ("fp16", 1.0, 65536.0, ["precision.init_scale=65536", "precision=bf16"]),
        ("fp16", 65536.0, 65536.0, ["precision=bf16", "precision.growth_interval=200"]),
        ("fp16", 65536.0, 2.0**20, ["precision.init_scale=1048576", "precision=bf16"]),
        ("fp16", 65536.0, None, ["precision=bf16"]),
        ("auto", 65536.0, None, ["precision=fp32"]),
    ],
)
def test_the_fix_is_one_that_was_tried(precision, initial, cured_at, fix):
    """A higher init_scale does not fix a scale that overflows lowered; `auto` means fp16 without bf16."""
    values = {"precision.init_scale": initial, "precision.growth_interval": 2000}
    setting = RunSettings(choices={"precision": precision}, values=values)
    found = diagnose(
        Evidence("loss_scale", READING, underflow=replace(LOST, sufficient_scale=cured_at), setting=setting)
    )
    assert (found.cause, found.fix) == ("fp16_underflow", fix)
    assert "worst hit: a" in found.verdict


def test_too_little_lost_is_no_cause():
    assert diagnose(Evidence("loss_scale", READING, underflow=replace(LOST, lost_share=0.01))).cause == "unknown"
