"""Incidents are read back from a run's folder and formatted as blocks of lines."""

import json

import pytest

from stabletrain.errors import ConfigError
from stabletrain.forensics.incident_list import block, incidents, read, sample_name

RECORD = {
    "step": 7,
    "cause": "bad_batch",
    "confidence": 0.9,
    "kind": "nonfinite",
    "verdict": "a sample is NaN",
    "fix": ["first", "second", "third", "fourth"],
    "samples": [],
}


def filed(run, name, **fields):
    """An incident's folder with its diagnosis."""
    folder = run / "incidents" / name
    folder.mkdir(parents=True)
    (folder / "diagnosis.json").write_text(json.dumps(RECORD | fields))
    return folder


@pytest.fixture
def run(tmp_path):
    """A run with three incidents: the last was filed after a rollback, at an earlier step."""
    filed(tmp_path, "step-00000007", step=7, time="2026-01-01T10:00:00")
    filed(tmp_path, "step-00000009", step=9, time="2026-01-01T10:00:01")
    filed(tmp_path, "step-00000007-2", step=7, time="2026-01-01T10:00:02")
    (tmp_path / "incidents" / "step-00000011").mkdir()  # not diagnosed
    return tmp_path


def test_incidents_are_sorted_by_time(run):
    names = ["step-00000007", "step-00000009", "step-00000007-2"]
    assert [path.name for path, _ in incidents(run)] == names
    assert [path.name for path, _ in incidents(run / "incidents")] == names
    assert [record["step"] for _, record in incidents(run)] == [7, 9, 7]


def test_incidents_without_a_time_are_sorted_by_step(tmp_path):
    for step in (30, 4, 5):
        filed(tmp_path, f"step-{step}", step=step)
    assert [record["step"] for _, record in incidents(tmp_path)] == [4, 5, 30]


def test_one_incident_is_read_by_its_own_folder(run):
    [(path, record)] = incidents(run / "incidents" / "step-00000009")
    assert (path.name, record["step"]) == ("step-00000009", 9)


def test_a_run_without_incidents_has_none(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    assert incidents(tmp_path) == []


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a run folder: use a run folder"):
        incidents(tmp_path)
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        incidents(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "not valid JSON"), ("[]", "not an object"), ('{"fix": [5]}', "fix/0 is 5, not a text")]
)
def test_a_damaged_diagnosis_is_named(tmp_path, text, reason):
    folder = filed(tmp_path, "step-00000007")
    (folder / "diagnosis.json").write_text(text)
    with pytest.raises(ConfigError, match=f"{reason}.*move step-00000007 away"):
        read(folder)


def test_a_block_says_what_happened_what_to_do_and_where(tmp_path):
    samples = [{"id": 41, "source": "book.txt:17"}, {"index": 3}, {"id": 5}, {"id": 6}, {"id": 7}]
    lines = block(tmp_path, RECORD | {"samples": samples, "rank": 0}).splitlines()
    assert lines == [
        "step 7: bad_batch (90% sure), nonfinite",
        "  what       a sample is NaN",
        "  fix        first",
        "  or         second",
        "  or         third",
        "  samples    id 41 (book.txt:17), sample 3 of the batch, id 5 and 2 more",
        "  rank       0",
        f"  folder     {tmp_path}",
    ]


def test_contributing_causes_are_listed_with_their_best_fix(tmp_path):
    other = {
        "cause": "unsafe_op",
        "confidence": 0.9,
        "verdict": "exp overflows",
        "fix": ["model.py:7: clamp", "zloss=palm"],
    }
    lines = block(tmp_path, RECORD | {"also": [other, {**other, "cause": "lr_too_high", "fix": []}]}).splitlines()
    assert lines[5:-1] == [
        "  also       unsafe_op (90% sure): exp overflows",
        "  its fix    model.py:7: clamp",
        "  also       lr_too_high (90% sure): exp overflows",
    ]


def test_a_block_of_an_unknown_cause(tmp_path):
    lines = block(tmp_path, RECORD | {"fix": [], "samples": [], "confidence": None}).splitlines()
    assert lines[0] == "step 7: bad_batch (0% sure), nonfinite"
    assert lines[2] == "  fix        none known"
    assert len(lines) == 4


def test_a_sample_has_its_id_or_its_place():
    assert sample_name({"id": 0, "index": 3}) == "id 0"
    assert sample_name({"index": None}) == "the batch"
    assert sample_name({"index": 3, "source": "a:1"}) == "sample 3 of the batch (a:1)"
