"""`stabletrain diagnose` lists incidents, and `stabletrain replay` replays them from their folder alone."""

import json
import shutil
import textwrap

import pytest

from stabletrain.cli.commands import main
from stabletrain.cli.replay import recorded_config
from stabletrain.stored.json_files import DamagedFile
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import ROOT, TINY_GPT, TINY_RESNET, command, composed, python

QUIET = ["checkpoint=off", "monitors=none", "steps=12", "guard=skip"]
RUNS = {
    "gpt": [*TINY_GPT, "model.dropout=0.1", "precision=bf16", "grad_accum_steps=2"],
    "resnet": [*TINY_RESNET, "model.depth=8", "precision=fp32"],
}


def incident_of(folder, *overrides):
    """Trains in `folder` and returns its first incident."""
    with composed(*QUIET, *overrides) as cfg:
        train(build(cfg, folder))
    return sorted(folder.glob("incidents/step-*"))[0]


@pytest.fixture(scope="module", params=RUNS)
def incident(request, tmp_path_factory):
    """An incident's folder, without the run it came from."""
    made = tmp_path_factory.mktemp("run")
    alone = tmp_path_factory.mktemp("elsewhere") / "incident"
    shutil.move(incident_of(made, *RUNS[request.param], "faults=label", "faults.at=[6]"), alone)
    shutil.rmtree(made)
    return request.param, alone


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("precision", None),
        ("model", {}),
        ("model", {"_target_": 5}),
        ("seed", "x"),
        ("device", 5),
        ("clipping", "${x}"),
    ],
)
def test_a_damaged_configuration_is_refused_in_one_line(tmp_path, key, value):
    whole = json.loads(next((ROOT / "tests" / "fixtures" / "incident").rglob("step.json")).read_text())["about"][
        "config"
    ]
    recorded_config(tmp_path, whole)
    for damaged in ({**whole, key: value}, {name: each for name, each in whole.items() if name != key}):
        with pytest.raises(DamagedFile, match="step.json is damaged: its configuration: "):
            recorded_config(tmp_path, damaged)


def replayed(capsys, *arguments):
    """The result of `stabletrain replay --json`."""
    assert main(["replay", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    """The one message of a refusal."""
    assert main([*map(str, arguments)]) == 2
    seen = capsys.readouterr()
    assert not seen.out
    return seen.err.strip().removeprefix("stabletrain: ")


@pytest.mark.beside
def test_an_incident_is_reproduced_bit_for_bit_from_its_folder_alone(incident, capsys):
    _, folder = incident
    found = replayed(capsys, folder)
    assert found["same_bits"] is True
    assert found["now"] == found["then"]
    assert isinstance(found["now"]["loss"], float)
    assert main(["replay", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("bitwise equal")


@pytest.mark.beside
def test_a_replay_that_is_not_bitwise_equal_says_so(incident, tmp_path, capsys):
    folder = shutil.copytree(incident[1], tmp_path / "changed")
    repro = json.loads((folder / "step.json").read_text())
    repro["reading"]["loss"] += 1e-6
    (folder / "step.json").write_text(json.dumps(repro))
    assert replayed(capsys, folder)["same_bits"] is False
    assert main(["replay", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("not bitwise equal")


@pytest.mark.beside
@pytest.mark.parametrize("override", ["precision=tried", "label_smoothing=0.3", "zloss=palm"])
def test_an_override_reaches_the_step(incident, capsys, override):
    name, folder = incident
    override = override.replace("tried", "fp32" if name == "gpt" else "bf16")
    found = replayed(capsys, folder, override)
    assert found["overrides"] == [override]
    assert found["same_bits"] is None
    assert found["finite"] is True
    assert found["now"]["loss"] != found["then"]["loss"]


@pytest.mark.beside
def test_a_preset_reaches_the_model_and_its_new_parts_are_named(incident, capsys):
    name, folder = incident
    if name == "resnet":
        assert "does nothing with model=resnet20" in refused(capsys, "replay", folder, "stability=qknorm")
        return
    found = replayed(capsys, folder, "stability=qknorm")
    assert "blocks.0.attention.query_norm.weight" in found["fresh_parameters"]
    assert found["now"]["loss"] != found["then"]["loss"]
    assert replayed(capsys, folder, "qknorm=layernorm", "qknorm.eps=0.5")["now"] != found["now"]


REFUSED = {
    "optimizer.lr=1": "does not affect one step's forward and backward",
    "guard=off": "does not affect one step's forward and backward",
    "stability=none": "changes nothing",
    "label_smoothing=0.0": "changes nothing",
    "precision=fp61": "there is no such option; did you mean",
    "precision.fp32=1": "there is no such key",
    "zloss.weight=1": "zloss.weight=1: there is no such key",
    "model.droput=0.5": "did you mean model.dropout?",
    "precison=bf16": "did you mean precision?",
    "precision.fp32_modules=[nothing]": "names no module",
    "model=resnet56": "the incident's weights are of model=",
    "grad_accum_steps=x": "is not a whole number",
    "zloss=palm,olmo": "one value",
    "zloss=[": "cannot be read",
}


@pytest.mark.beside
@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_tried_is_refused_with_the_reason(incident, capsys, override):
    name, folder = incident
    if "dropout" in REFUSED[override] and name == "resnet":
        pytest.skip("a ResNet has no dropout")
    more = ["precision=bf16"] if "fp32_modules" in override and name == "resnet" else []
    assert REFUSED[override] in refused(capsys, "replay", folder, *more, override)


@pytest.mark.beside
def test_a_folder_that_cannot_be_replayed_says_why(incident, tmp_path, capsys):
    assert "is not a folder" in refused(capsys, "replay", tmp_path / "nowhere")
    assert "holds no incident" in refused(capsys, "replay", tmp_path)
    unkept = shutil.copytree(incident[1], tmp_path / "unkept", ignore=shutil.ignore_patterns("step.json"))
    assert "forensics.keep_state=true" in refused(capsys, "replay", unkept)
    damaged = shutil.copytree(incident[1], tmp_path / "damaged")
    content = bytearray((damaged / "state.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "state.safetensors").write_bytes(content)
    assert "checksum" in refused(capsys, "replay", damaged)
    record = json.loads((damaged / "step.json").read_text())
    del record["about"]
    (damaged / "step.json").write_text(json.dumps(record))
    assert "holds no configuration" in refused(capsys, "replay", damaged)


CODE = """
import torch
from torch import nn
from stabletrain.records import Batch

class Model(nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, inputs):
        return self.net(inputs), None

class Data:
    num_classes = 3

    def batch(self, step, size, split):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(size, 8, generator=generator)
        if split == "train" and step == 7:
            inputs[0] = 1e5
        return Batch(inputs, torch.randint(3, (size,), generator=generator))
"""


@pytest.mark.slow
def test_a_fix_is_tried_on_a_users_own_model(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(CODE))
    for group, text in {
        "model": "_target_: mine.Model\nwidth: 16\nnum_classes: null\n",
        "data": "_target_: mine.Data\n",
    }.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(text)
    chosen = ["model=mine", "data=mine", "precision=fp16", "batch_size=16", "wandb=disabled", "device=cpu", *QUIET]
    where = ["--config-dir", "conf", "hydra.run.dir=run", "precision.init_scale=8"]
    done = command(*where, *chosen, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "model output of type tuple: its first element is taken as the logits\n" in done.stdout

    def replay(*overrides):
        words = ["-m", "stabletrain.cli.commands", "replay", "run/incidents/step-00000008", *overrides]
        done = python(*words, cwd=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    assert replay() == "bitwise equal: the step is not finite, as in the run"
    assert replay("precision=bf16") == "with precision=bf16 the step is finite"
    assert replay("precision.init_scale=4") == "with precision.init_scale=4 the step is not finite"
    mine = tmp_path / "mine.py"
    mine.write_text(mine.read_text().replace("self.net(inputs)", "self.net(inputs.clamp(-9, 9))"))
    assert replay() == f"fixed by the change in {mine}: the step is finite, and was not in the run"


# ---- diagnose


def filed(run, name, **record):
    """An incident's folder with a diagnosis only."""
    (run / "incidents" / name).mkdir(parents=True)
    about = {"kind": "nonfinite", "confidence": 0.9, "verdict": "so it was", "fix": ["first", "second"], "samples": []}
    (run / "incidents" / name / "diagnosis.json").write_text(json.dumps(about | record))


def test_incidents_are_listed_newest_last(tmp_path, capsys):
    filed(tmp_path, "step-00000007", step=7, cause="bad_batch", time="2026-01-01T10:00:00.000+00:00")
    filed(tmp_path, "step-00000009", step=9, cause="unsafe_op", time="2026-01-01T10:00:01.000+00:00")
    samples = [{"index": 3, "id": 41, "source": "book.txt:17"}]
    again = {"step": 7, "cause": "bad_label", "samples": samples, "time": "2026-01-01T10:00:02.000+00:00"}
    filed(tmp_path, "step-00000007-2", **again)  # after a rollback
    assert main(["diagnose", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    blocks = out.strip().split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [
        "step 7: bad_batch (90% sure), nonfinite",
        "step 9: unsafe_op (90% sure), nonfinite",
        "step 7: bad_label (90% sure), nonfinite",
    ]
    for words in ("so it was", "first", "id 41 (book.txt:17)", str(tmp_path / "incidents" / "step-00000007-2")):
        assert words in blocks[2]
    assert main(["diagnose", "--json", str(tmp_path / "incidents")]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["cause"] for record in records] == ["bad_batch", "unsafe_op", "bad_label"]
    assert main(["diagnose", str(tmp_path / "incidents" / "step-00000009")]) == 0
    assert capsys.readouterr().out.startswith("step 9")


def test_a_run_without_incidents_says_so(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    assert main(["diagnose", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no incidents in {tmp_path}\n"
    assert main(["diagnose", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert "is not a folder" in refused(capsys, "diagnose", tmp_path / "nowhere")
    assert "is not a run folder" in refused(capsys, "diagnose", tmp_path)
    filed(tmp_path, "step-00000007", step=7)
    (tmp_path / "incidents" / "step-00000007" / "diagnosis.json").write_text("{")
    assert "it is not valid JSON; move step-00000007 away" in refused(capsys, "diagnose", tmp_path)
