"""Checks the folder of an incident: its name, the fields of `diagnosis.json`, and what remains on a full disk."""

import errno
import json
import math
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from stabletrain.cli.replay import replay_incident
from stabletrain.errors import ConfigError
from stabletrain.forensics import saved_step as files
from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.facts import Culprits, Damage
from stabletrain.forensics.incident import NOT_NEEDED, Execution, as_json, file_incident, folder_for, write
from stabletrain.forensics.incident_list import block, incidents, is_complete
from stabletrain.forensics.investigate import IncidentRequest, investigate
from stabletrain.forensics.probes.update import trace_update
from stabletrain.forensics.repro import load_repro
from stabletrain.forensics.rerun import VARIANTS
from stabletrain.forensics.subject import StepSubject
from tests.forensics.diagnosis.given import FINE, NAN, READING, origin
from tests.forensics.given import EVIDENCE, findings

CONTRACT = {
    *(
        "step",
        "kind",
        "cause",
        "confidence",
        "verdict",
        "fix",
        "also",
        "part",
        "origin",
        "update",
        "samples",
        "rank",
        "replays",
        "reading",
    ),
    *("limits", "damage", "evidence", "time", "seconds", "not_looked_at", "not_replayable", "tick", "settings"),
}
FILES = {"diagnosis.json", "report.md", "step.json", "batch.safetensors", "state.safetensors"}


def test_a_second_incident_of_a_step_gets_its_own_folder(tmp_path):
    names = []
    for _ in range(3):
        names.append(folder_for(tmp_path, 7).name)
        folder_for(tmp_path, 7).mkdir(parents=True)
    assert names == ["step-00000007", "step-00000007-2", "step-00000007-3"]
    assert folder_for(tmp_path, 8) == tmp_path / "step-00000008"


def test_the_diagnosis_is_standard_json_with_all_fields_of_the_contract(tmp_path, repro):
    write(tmp_path, StepSubject(repro), findings(), rank=1, keep_state=True)
    assert {file.name for file in tmp_path.iterdir()} == FILES
    record = json.loads((tmp_path / "diagnosis.json").read_text(), parse_constant=pytest.fail)
    assert record.keys() == CONTRACT
    cause = diagnose(EVIDENCE)
    assert (record["step"], record["kind"], record["rank"], record["seconds"]) == (50, "spike", 1, 1.235)
    assert (record["cause"], record["verdict"], record["fix"]) == (cause.cause, cause.verdict, cause.fix)
    assert record["replays"].keys() == {*VARIANTS}
    assert (record["replays"]["same"]["loss"], record["replays"]["fp32"]["loss"]) == ("NaN", 4.0)
    assert record["replays"]["older_state"]["not_run"] == NOT_NEEDED.not_run
    assert record["origin"]["op"] == "aten.div"
    assert record["reading"]["grad_norm"] == 80.0
    assert record["limits"] == {"loss": 6.0, "grad_norm": 20.0}
    assert record["not_looked_at"] == ["largest input: no time"]
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# Step 50: ")
    assert f"stabletrain replay {tmp_path}" in page


def test_a_kept_state_can_be_loaded_from_the_folder(tmp_path, repro):
    write(tmp_path, StepSubject(repro), findings(), rank=None, keep_state=True)
    model = nn.Linear(3, 2)
    again = load_repro(tmp_path, model, repro.tools)
    assert torch.equal(again.batch.inputs, repro.batch.inputs)
    assert torch.equal(model.weight, repro.model.weight)
    assert again.reading == READING


def test_without_its_state_an_incident_is_two_small_files(tmp_path, repro):
    write(tmp_path / "a", StepSubject(repro), findings(), rank=None, keep_state=False)
    assert {file.name for file in (tmp_path / "a").iterdir()} == {"diagnosis.json", "report.md"}


@pytest.mark.parametrize("full_at", [files.BATCH, files.STATE])
def test_on_a_full_disk_the_diagnosis_is_written_and_no_partial_state_remains(tmp_path, repro, monkeypatch, full_at):
    written = files.write

    def full(path, tensors):
        if path.name == full_at:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(path, tensors)

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, StepSubject(repro), findings(), rank=None, keep_state=True)
    assert {file.name for file in tmp_path.iterdir()} == {"diagnosis.json", "report.md"}
    assert json.loads((tmp_path / "diagnosis.json").read_text())["cause"] == diagnose(EVIDENCE).cause


def test_an_incident_appears_only_when_it_is_complete(tmp_path, repro, monkeypatch):
    written = files.write

    def watched(path, tensors):
        assert not list(tmp_path.glob("step-*"))
        return written(path, tensors)

    monkeypatch.setattr(files, "write", watched)
    known = {"rank": None, "keep_state": True, "execution": Execution(60, "a")}
    path = file_incident(tmp_path, StepSubject(repro), findings(), **known)
    assert [path] == list(tmp_path.iterdir()) == [tmp_path / "step-00000050"]
    assert {file.name for file in path.iterdir()} == FILES
    record = json.loads((path / "diagnosis.json").read_text())
    assert (record["tick"], record["settings"]) == (60, "a")
    assert f"stabletrain replay {path}\n" in (path / "report.md").read_text()


def test_a_full_disk_leaves_the_diagnosis_and_an_error_nothing(tmp_path, repro, monkeypatch):
    def fails(path, tensors):
        raise error

    monkeypatch.setattr(files, "write", fails)
    known = {"rank": None, "keep_state": True, "execution": Execution()}
    for error, left in ((OSError("full"), ["step-00000050"]), (ValueError("odd"), [])):
        folder = tmp_path / type(error).__name__
        with pytest.raises(type(error)):
            file_incident(folder, StepSubject(repro), findings(), **known)
        assert [path.name for path in folder.iterdir()] == left


def test_culprit_samples_found_by_bisection_are_named_by_index_id_and_source(repro):
    culprits = Culprits([1, 3], True, 6)
    record = as_json(StepSubject(repro), findings(replace(EVIDENCE, culprits=culprits)), None)
    assert record["samples"] == [{"index": 1, "id": 41, "source": "b"}, {"index": 3, "id": 43, "source": "d"}]
    mute = replace(repro, batch=replace(repro.batch, ids=None, sources=None))
    assert as_json(StepSubject(mute), findings(replace(EVIDENCE, culprits=culprits)), None)["samples"] == [
        {"index": 1},
        {"index": 3},
    ]
    every = replace(EVIDENCE, culprits=replace(culprits, others_too=True))
    assert as_json(StepSubject(repro), findings(every), None)["samples"] == [], (
        "if another batch fails too, no sample is to blame"
    )


def test_bad_samples_take_precedence_over_culprits_found_by_bisection(repro):
    bad = {"index": 2, "fault": "input", "what": "input holds NaN"}
    evidence = replace(EVIDENCE, samples=[bad], culprits=Culprits([1], True, 6))
    assert as_json(StepSubject(repro), findings(evidence), None)["samples"] == [bad]


def test_contributing_causes_are_recorded_with_their_fixes(repro):
    outcomes = {"same": NAN, "fresh_batch": FINE}
    unsafe = replace(EVIDENCE, origin=origin(why="log_of_zero"), outcomes=outcomes, culprits=Culprits([1], True, 6))
    record = as_json(StepSubject(repro), findings(unsafe), None)
    assert record["cause"] == "unsafe_op"
    (other,) = record["also"]
    assert other.keys() == {"cause", "confidence", "verdict", "fix"}
    assert (other["cause"], other["fix"]) == ("bad_batch", diagnose(unsafe).also[0].fix)
    assert as_json(StepSubject(repro), findings(), None)["also"] == []


def test_damage_and_a_missing_origin_are_recorded(repro):
    evidence = replace(EVIDENCE, origin=None, damage=[Damage("buffer", "mean", "1 of 3 values are not finite")])
    record = as_json(StepSubject(repro), findings(evidence), None)
    assert record["origin"] is None
    assert [(damage["what"], damage["name"]) for damage in record["damage"]] == [("buffer", "mean")]
    assert math.isfinite(record["confidence"])


def test_an_update_that_is_not_finite_is_filed_with_the_batch_and_is_not_replayed(tmp_path, repro):
    model = repro.model
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.Adam(model.parameters(), eps=0)
    subject = StepSubject(replace(repro, update=lambda: trace_update(model, optimizer, optimizer.step)))
    found = investigate(subject, IncidentRequest("update", optimizer, classes=2), RunSettings())
    assert found.evidence.outcomes == {}
    folder = file_incident(tmp_path, subject, found, rank=None, keep_state=True, execution=Execution(3, "x"))
    assert {file.name for file in folder.iterdir()} == FILES - {"step.json", "state.safetensors"}
    ((path, record),) = incidents(folder)
    assert (record["kind"], record["cause"]) == ("update", "unsafe_optimizer")
    assert (record["origin"]["direction"], record["origin"]["module"]) == ("update", "weight")
    assert record["update"]["parameter"] == "weight"
    assert record["update"]["settings"]["eps"] == 0
    assert is_complete(record)
    assert "unsafe_optimizer (95% sure), update" in block(path, record)
    page = (folder / "report.md").read_text()
    assert "the optimizer made NaN or Inf of finite numbers" in page
    assert "Its update was undone" in page
    assert "Not possible: its forward and backward pass were finite" in page
    with pytest.raises(ConfigError, match="the optimizer's step, which was not, cannot be run from a folder"):
        replay_incident(folder)


def test_a_moment_that_was_impossible_before_the_update_is_to_blame_for_it(repro):
    model = repro.model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    damaged, *_ = optimizer.state.values()
    damaged["exp_avg_sq"].view(-1)[0] = -1.0
    subject = StepSubject(replace(repro, update=lambda: trace_update(model, optimizer, optimizer.step)))
    found = investigate(subject, IncidentRequest("update", optimizer, classes=2), RunSettings())
    assert found.evidence.update is not None
    assert found.diagnosis.cause == "corrupt_state"
    assert "a mean of squares cannot be" in found.diagnosis.verdict


def test_an_update_that_is_finite_when_it_is_run_again_is_the_machines_fault(repro):
    for update, cause in ((lambda: None, "hardware_fault"), (None, "unsafe_optimizer")):
        subject = StepSubject(replace(repro, update=update))
        found = investigate(subject, IncidentRequest("update", classes=2), RunSettings())
        assert found.diagnosis.cause == cause
        assert not any("lr" in fix for fix in found.diagnosis.fix)
    assert found.failures == ["the optimizer's step: it cannot be run again"]
