"""A damaged `run.json`, `sweep.json` or line of metrics stops no reader, and is never taken for another run's."""

import json

import pytest

from stabletrain.cli.finished import finished_run
from stabletrain.config.arguments import arguments_of, newest_of_same_command, parse_arguments, sweep_arguments
from stabletrain.config.resuming import check_unfinished, recorded_settings, steps_of_changes
from stabletrain.tracking.metrics import Metrics, read_jsonl
from stabletrain.tracking.run_folder import Description, RunFolder
from tests.beside.comparison.written import write

WHOLE = {"id": "abc", "status": "finished", "overrides": ["seed=1"], "final": {"steps": 9, "val/loss": 2.0}}
DEEP = "[" * 100_000
ODD = {
    "status": 5,
    "id": {},
    "reason": [],
    "choices": {"model": 3},
    "hardware": {"name": {}},
    "git": {"commit": 5},
    "options": "x",
    "overrides": [5],
    "changes": [{"step": "x", "keys": {}}],
    "resumed": 7,
    "final": {"steps": "x"},
    "host": [],
    "data": [],
    "model": 3,
    "init_from": 5,
}
RECORDS = ["{}", "[]", "5", "null", "", '{"status": "fini', DEEP, '{"final": ' + DEEP]
RECORDS += [json.dumps(WHOLE | {key: value}) for key, value in ODD.items()]
RECORDS += [json.dumps(WHOLE | {"final": final}) for final in ({"val/loss": "x"}, {"guard/skipped_spike": None}, 5)]


def damaged(place, text):
    """Returns the folder of a sweep's run with this record."""
    folder = write(place / "sweep" / "0")
    (folder / "run.json").write_text(text)
    sweep = {"command": "x", "launcher": "basic", "runs": [["seed=1"]], "varies": ["seed"], "count": 1, "began": 0.0}
    (place / "sweep" / "sweep.json").write_text(json.dumps({**sweep, "options": ["-m"], "overrides": []}))
    return folder


@pytest.mark.parametrize("text", RECORDS, ids=lambda text: text[:60])
def test_every_reader_takes_a_damaged_record(tmp_path, text, capsys):
    folder = damaged(tmp_path, text)
    recorded_settings(folder, 5)
    steps_of_changes(folder)
    check_unfinished(folder, 10, {"seed": [1, 2]})
    check_unfinished(folder, -1, {"seed": [1, 2]})  # the steps of a record without any: steps=-2 is no advice
    arguments_of(folder)
    finished_run(folder, ["seed=1"], 9)
    begun = RunFolder(folder)
    begun.start(Description(choices={}, hardware={}, data={}, overrides=["seed=1"]), resuming=True)
    assert text == "{}" or f"stabletrain: {folder}/run.json is damaged: " in capsys.readouterr().err
    begun.finish("finished", None, {"steps": 3})
    assert RunFolder(folder).read()["status"] == "finished"


@pytest.mark.beside
@pytest.mark.parametrize("text", RECORDS, ids=lambda text: text[:60])
def test_every_reader_beside_a_run_takes_a_damaged_record(tmp_path, text):
    from stabletrain.beside.comparison.pages.one_run import write_run_page
    from stabletrain.beside.comparison.reading.runs import read_run
    from stabletrain.beside.export.command import choices_in
    from stabletrain.beside.sweep import lines, plan
    from stabletrain.beside.wandb_sync import is_running

    folder = damaged(tmp_path, text)
    run = read_run(folder)
    assert run.status in ("broken", "finished")
    assert text == "{}" or run.problem
    write_run_page(folder)
    is_running(folder)
    choices_in(folder)
    found = plan.read(folder.parent)
    assert found is not None
    lines.closing(found), lines.code(found), lines.opening(found), lines.seconds_left(found)
    lines.ending(found, 0, ["seed=1"], RunFolder(folder).read(), None)


def test_a_damaged_record_is_not_that_of_a_command_without_overrides(tmp_path, monkeypatch):
    folder = tmp_path / "outputs" / "2026-01-01" / "10-00-00"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert newest_of_same_command(parse_arguments([])) is None
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("- seed=1\n- steps=5\n")
    assert newest_of_same_command(parse_arguments([])) is None
    assert newest_of_same_command(parse_arguments(["seed=1", "steps=5"])) == "outputs/2026-01-01/10-00-00"
    (folder / ".hydra" / "overrides.yaml").write_text("a: [5")
    assert newest_of_same_command(parse_arguments(["seed=1", "steps=5"])) is None


@pytest.mark.beside
@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", DEEP, '{"options": 5, "overrides": []}'], ids=lambda text: text[:9]
)
def test_a_damaged_sweep_is_none(tmp_path, text):
    from stabletrain.beside.sweep import plan

    (tmp_path / "sweep.json").write_text(text)
    assert plan.read(tmp_path) is None
    assert sweep_arguments(tmp_path) is None


METRICS = ['{"step": null}', '{"step": "x", "a": 1}', '{"step": 65.5}', '{"step": -5}', '{"step": true}', '{"a": 1}']
METRICS += [
    '{"step": 1e400}',
    '{"step": 99999999999999999999}',
    '{"step": 3, "tick": "x"}',
    '{"step": 3, "tick": null}',
]
METRICS += ["[]", "5", "null", "{", "[" * 100_000, '{"a": "\\ud800", "step": "', "\x00\x01", '"half']


def damaged_metrics(place):
    """Returns the folder of a run with two good lines of metrics, the first and the last."""
    good = ['{"step": 1, "train/ce": 5.0}', '{"step": 2, "train/ce": null, "val/loss": "x"}']
    folder = write(place / "run", lines=[])
    (folder / "metrics.jsonl").write_text("\n".join([good[0], *METRICS, good[1], ""]))
    return folder


@pytest.mark.beside
def test_damaged_lines_of_metrics_are_counted(tmp_path):
    from stabletrain.beside.comparison.pages.one_run import write_run_page
    from stabletrain.beside.comparison.reading.columns import read_columns
    from stabletrain.beside.comparison.reading.runs import read_run

    folder = damaged_metrics(tmp_path)
    columns = read_columns(folder / "metrics.jsonl")
    assert (columns.lines, columns.unreadable) == (2, len(METRICS))
    assert read_run(folder).problem == f"{len(METRICS)} lines of metrics.jsonl cannot be read"
    write_run_page(folder)


def test_damaged_lines_of_metrics_are_left_out(tmp_path):
    folder = damaged_metrics(tmp_path)
    assert [line["step"] for line in read_jsonl(folder / "metrics.jsonl")] == [1, 2]
    metrics = Metrics(folder)
    metrics.rewind(1)
    metrics.close()
    assert [line["step"] for line in read_jsonl(folder / "metrics.jsonl")] == [1]


EVENTS = [
    '"tick": []',
    '"kind": {}',
    '"path": 5',
    '"cause": {}',
    '"verdict": 5',
    '"fix": "x"',
    '"fix": [{}]',
    '"loss": {}',
]


@pytest.mark.beside
def test_damaged_events_are_counted_and_left_out(tmp_path):
    from stabletrain.beside.comparison.pages.one_run import write_run_page
    from stabletrain.beside.comparison.reading.runs import read_run

    folder = write(tmp_path / "run")
    whole = '{"event": "incident", "step": 3, "cause": "spike", "path": "incidents/a\\u0000b", "fix": ["x"]}'
    odd = [f'{{"event": "incident", "step": 4, {each}}}' for each in EVENTS]
    (folder / "events.jsonl").write_text("\n".join([whole, *odd, '{"event": "skip", "step": null}', "[]", "{", ""]))
    run = read_run(folder)
    assert [one["step"] for one in run.incidents] == [3]
    assert run.problem == f"{len(EVENTS) + 3} lines of events.jsonl cannot be read"
    write_run_page(folder)
