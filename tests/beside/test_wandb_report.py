"""`stabletrain wandb-report` plots only what runs log, and saves the report through the library."""

import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import stabletrain
from stabletrain.beside.wandb_report import CURVES, HALF, ROW, THROUGHPUT, below, placed, spec, specification
from stabletrain.cli.commands import main
from stabletrain.config.make import leaves
from stabletrain.errors import ConfigError
from stabletrain.machine.hardware import Usage
from stabletrain.tracking.wandb import INCIDENT_COLUMNS
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.beside.comparison.written import write
from tests.runs import ROOT, TINY_GPT, TINY_RESNET, composed
from tests.tracking.wandb_file import read, table
from tests.tracking.wandb_server import KEY, serving

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")  # in wandb-workspaces itself

SHORT = ["wandb=offline", "steps=12", "eval_every=6", "monitors.every=3"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The names of metrics, summaries and config keys that W&B has of a GPT with a NaN and of a ResNet."""
    found = {"history": set(), "summary": set(), "config": set()}
    faulty = [*TINY_GPT, *SHORT, "faults=gradient", "faults.at=[8]"]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB")]:
            patch.delenv(name)
        for overrides in (faulty, [*TINY_RESNET, "wandb=offline", "steps=1"]):
            folder = tmp_path_factory.mktemp("run")
            with composed(*overrides) as cfg:
                train(build(cfg, folder))
            held = read(folder)
            found["history"] |= {name for point in held["history"] for name in point}
            found["summary"] |= held["summary"].keys()
            found["config"] |= {key for key, _ in leaves(held["config"])}
            if overrides is faulty:
                assert table(folder)[0].keys() == {*INCIDENT_COLUMNS}
    on_cards = Usage(torch.device("cpu"), flops_per_unit=1.0, peak=1.0).metrics(1.0)  # what a CPU does not have
    return found | {"summary": found["summary"] | on_cards.keys()}


@pytest.fixture(scope="module")
def grids():
    report = spec(specification("me", "proof", ["2026-11-21_16-45-39", "other"]))
    return [block["metadata"] for block in report["blocks"] if block["type"] == "panel-grid"]


def panels(grids, kind):
    every = [panel for grid in grids for panel in grid["panelBankSectionConfig"]["panels"]]
    return [panel["config"] for panel in every if panel["viewType"] == kind]


def plain_key(name):
    """Converts a config key from W&B's form, `optimizer.value.lr`, to ours, `optimizer.lr`."""
    first, value, *rest = name.split(".")
    assert value == "value"
    return ".".join([first, *rest])


@pytest.mark.slow
def test_every_curve_is_drawn_from_a_metric_that_is_logged_for_each_card(grids, logged):
    found = panels(grids, "Run History Line Plot")
    assert {name for panel in found for name in panel["metrics"]} == CURVES.keys()
    assert {"train/loss", "val/loss", "grad/norm", "monitors/attn_logit_max"} <= CURVES.keys() <= logged["history"]
    assert {(panel["xAxis"], panel["groupBy"]) for panel in found} == {("step", "jobType")}
    assert "step" in logged["history"]


@pytest.mark.slow
def test_every_bar_is_a_number_of_the_summary(grids, logged):
    found = panels(grids, "Bar Chart")
    names = {name for panel in found for name in panel["metrics"]}
    assert {"val/loss", "incident/count", "guard/skipped", "spike/score", *THROUGHPUT} <= names <= logged["summary"]
    for panel in found:
        by = panel["groupBy"]
        assert by == "jobType" or plain_key(by) in logged["config"]


@pytest.mark.slow
def test_sensitivity_is_drawn_over_the_learning_rate(grids, logged):
    [scatter] = panels(grids, "Scatter Plot")
    assert (scatter["xAxis"], scatter["yAxis"]) == ("config:optimizer.value.lr", "summary:val/loss")
    assert scatter["xAxisLogScale"]
    [ways] = panels(grids, "Parallel Coordinates Plot")
    [importance] = panels(grids, "Parameter Importance")
    assert importance["targetKey"] in logged["summary"]
    accessors = [column["accessor"] for column in ways["columns"]]
    for section, name in (accessor.split(":") for accessor in [*accessors, scatter["xAxis"], scatter["yAxis"]]):
        assert (plain_key(name) if section == "config" else name) in logged[section]


@pytest.mark.slow
def test_incidents_are_the_table_that_runs_log(grids, logged):
    [panel] = panels(grids, "Weave")
    assert '"incidents"' in re.sub(r"\\", "", str(panel).replace("'", '"'))
    assert "incidents.path" in logged["summary"]


@pytest.mark.slow
def test_every_column_of_the_table_of_runs_is_there(grids, logged):
    for grid in grids:
        [runs] = grid["runSets"]
        for section, name in (column.split(":") for column in runs["runFeed"]["columnOrder"] if column[:3] != "run"):
            assert (plain_key(name) if section == "config" else name) in logged[section], name
        [key] = runs["sort"]["keys"]
        assert key["key"] == {"section": "summary", "name": "val/loss"}
        assert key["ascending"]


def test_only_the_runs_of_the_sweeps_are_compared(grids):
    for grid in grids:
        [rule] = grid["runSets"][0]["filters"]["filters"]
        assert (rule["key"], rule["op"]) == ({"section": "run", "name": "group"}, "IN")
        assert rule["value"] == ["2026-11-21_16-45-39", "other"]
    everything = spec(specification("me", "proof"))
    [first, *_] = [block["metadata"] for block in everything["blocks"] if block["type"] == "panel-grid"]
    assert first["runSets"][0]["filters"]["filters"] == []


def test_panels_stand_two_in_a_row_and_the_table_under_them():
    made = [SimpleNamespace(layout=SimpleNamespace(x=9, y=9, w=9, h=9)) for _ in range(4)]
    *found, table = *placed(made[:3]), below(made[3], 3)
    assert [(panel.layout.x, panel.layout.y) for panel in found] == [(0, 0), (HALF, 0), (0, ROW)]
    assert {(panel.layout.w, panel.layout.h) for panel in found} == {(HALF, ROW)}
    assert table.layout.y == 2 * ROW


def test_panels_do_not_lie_on_one_another(grids):
    for grid in grids:
        taken = set()
        for panel in grid["panelBankSectionConfig"]["panels"]:
            at = panel["layout"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken
            assert max(x for x, _ in cells) < 24
            taken |= cells


@pytest.mark.parametrize(
    ("by", "key"),
    [("precision", "groups.value.precision"), ("seed", "seed.value"), ("model.n_layer", "model.value.n_layer")],
)
def test_runs_are_compared_by_a_group_or_a_key(by, key):
    report = spec(specification("me", "proof", by=by))
    grids = [block["metadata"] for block in report["blocks"] if block["type"] == "panel-grid"]
    assert {panel["groupBy"] for panel in panels(grids, "Bar Chart")} == {key, "jobType"}


def test_the_rows_by_setting_are_those_of_the_comparison(tmp_path, capsys):
    for precision, losses in (("fp32", [2.0, 2.25, 2.5]), ("bf16", [2.5, 3.0, math.nan])):
        for seed, loss in enumerate(losses):
            write(tmp_path / f"{precision}-{seed}", [f"precision={precision}", f"seed={seed}"], loss)
    assert main(["wandb-report", "me/proof", "--by", "precision", "--json", "--runs", str(tmp_path)]) == 0
    blocks = json.loads(capsys.readouterr().out)["blocks"]
    [table] = [block["content"] for block in blocks if block["type"] == "markdown-block"]
    rows = stabletrain.compare(tmp_path).by_setting("precision")
    found = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [cells[0] for cells in found] == rows.index.tolist() == ["precision=fp32", "precision=bf16"]
    for cells, (_, row) in zip(found, rows.iterrows(), strict=True):
        assert cells[1] == f"{row['val_loss']:.4g} ± {row['val_loss_sd']:.2g}"
    assert found[1][2:] == ["2 of 3, 1 broke", "+0.62 (-0.96 to +2.2), not told apart"]
    assert found[1][3].startswith(f"{rows['difference'].iloc[1]:+.2g} ({rows['low'].iloc[1]:+.2g}")
    with pytest.raises(ConfigError, match="--by stability: no two runs differ in it; these differ: precision"):
        specification("me", "proof", runs=[tmp_path])


def test_a_mistake_is_one_sentence(capsys, monkeypatch):
    with pytest.raises(ConfigError, match="did you mean stability"):
        specification("me", "proof", by="stabilty")
    for name in ("proof", "/proof", "me/", "a/b/c"):
        assert main(["wandb-report", name]) == 2
        assert "is not entity/project" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    assert main(["wandb-report", "me/proof", "--json"]) == 2
    assert "pip install 'stabletrain[report]'" in capsys.readouterr().err


@pytest.mark.slow
def test_it_is_saved_by_the_library_and_never_to_a_project_that_is_not_there(tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    with serving() as server:
        env = clean | {"HOME": str(tmp_path), "WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
        words = [sys.executable, "-c", "import sys; from stabletrain.cli.commands import main; "]
        words[2] += "print([main(['wandb-report', each]) for each in sys.argv[1:]])"
        done = subprocess.run(
            [*words, "me/proof", "me/profo"],
            env=env | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        [saved] = server.reports
    assert done.stdout.splitlines()[-1] == "[0, 2]", done.stderr
    assert done.stdout.startswith(f"report   {server.url}/me/proof/reports/")
    assert (saved["entityName"], saved["projectName"], saved["type"]) == ("me", "proof", "runs")
    assert "the project me/profo does not exist: existing projects are proof" in done.stderr.splitlines()[-1]
