"""Offline runs of `train.py`, read back from W&B's files, contain every metric, config key and exit status."""

import json
import math
import os
import re
from contextlib import nullcontext

import pytest

from stabletrain.config.make import leaves
from stabletrain.errors import TrainingHalted
from stabletrain.tracking.metrics import plain, read_jsonl
from stabletrain.tracking.wandb_setup import LONGEST_TAG
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.once import once
from tests.runs import TINY_GPT, TINY_RESNET, command, composed
from tests.tracking.wandb_file import read, table

QUIET = ["wandb=offline", "steps=20", "eval_every=10", "monitors.every=5"]
NAN = ["faults=gradient", "faults.at=[12]"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two runs of a small GPT, each with a NaN in its thirteenth step, where there is no home folder."""

    def make(cwd):
        cwd.mkdir()
        done = command("-m", *TINY_GPT, *QUIET, *NAN, "qknorm=none,layernorm", cwd=cwd, HOME="", XDG_CACHE_HOME="")
        assert done.returncode == 0, done.stderr
        assert not {" ERROR ", " INFO "} & set(re.findall(" [A-Z]+ ", done.stdout + done.stderr)), "W&B's own log"

    return sorted(once(tmp_path_factory, "wandb_sweep", make).glob("multirun/*/*/[01]"))


def same(wanted, found):
    return found == wanted or (isinstance(wanted, float) and math.isnan(wanted) and math.isnan(found))


@pytest.mark.beside
def test_every_metric_of_every_logged_step_is_there(sweep):
    for folder in sweep:
        wanted = read_jsonl(folder / "metrics.jsonl")
        found = [point for point in read(folder)["history"] if "incidents.path" not in point]
        assert len(found) == len(wanted) > 4
        for line, point in zip(wanted, found, strict=True):
            for name, value in line.items():
                assert name == "time" or same(value, point[name]), name


@pytest.mark.beside
def test_every_config_key_is_there_with_the_choice_of_each_group(sweep):
    from omegaconf import OmegaConf

    for folder, qknorm in zip(sweep, ("none", "layernorm"), strict=True):
        composed = plain(OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "config.yaml"), resolve=True))
        config = read(folder)["config"]
        found = dict(leaves({key: value for key, value in config.items() if key != "_wandb"}))
        assert {key: found.get(key, "missing") for key, _ in leaves(composed)} == dict(leaves(composed))
        record = json.loads((folder / "run.json").read_text())
        assert config["groups"] == record["choices"]
        assert config["groups"]["qknorm"] == qknorm
        assert config["hardware"] == record["hardware"]


@pytest.mark.beside
def test_runs_of_a_sweep_stand_together_and_can_be_told_apart(sweep):
    first, second = map(read, sweep)
    assert first["group"] == second["group"] == f"{sweep[0].parents[1].name}_{sweep[0].parent.name}"
    assert [run["name"] for run in (first, second)] == ["0 qknorm=none", "1 qknorm=layernorm"]
    assert first["job_type"] == "cpu"
    assert {"precision:auto", "qknorm:layernorm", "model:gpt_nano"} <= {*second["tags"]}
    assert all(1 <= len(tag) <= LONGEST_TAG for tag in second["tags"])
    assert first["id"] != second["id"]


@pytest.mark.beside
def test_the_summary_is_the_line_of_a_table(sweep):
    for folder in sweep:
        summary, record = read(folder)["summary"], json.loads((folder / "run.json").read_text())
        assert {key: summary[key] for key in record["final"]} == record["final"]
        assert (summary["status"], summary["card"]) == ("finished", "cpu")
        assert (summary["guard/skipped"], summary["guard/rollbacks"], summary["guard/machine_faults"]) == (0, 0, 1)
        assert summary["incident/count"] == 1
        assert summary["incident/cause"] == table(folder)[0]["cause"]
        assert summary["tokens_per_s"] > 0
        assert summary["memory/peak_gb"] > 0.05
        assert summary["best/val_loss"] <= summary["val/loss"] < 6
        assert summary["spike/score"] == 0


@pytest.mark.beside
def test_incidents_are_a_table_and_an_alert(sweep):
    for folder in sweep:
        [incident] = [line for line in read_jsonl(folder / "events.jsonl") if line["event"] == "incident"]
        [row] = table(folder)
        assert row == {
            "step": 13,
            "kind": "nonfinite",
            "cause": incident["cause"],
            "verdict": incident["verdict"],
            "fix": "; ".join(incident["fix"]),
            "path": incident["path"],
        }
        assert (folder / row["path"]).is_dir()
        assert [title for title, _ in read(folder)["alerts"]] == [f"incident: {incident['cause']}"]


@pytest.mark.beside
def test_plots_are_drawn_against_the_step_and_only_what_one_wants_to_see(sweep):
    found = read(sweep[0])
    names = {name for point in found["history"] for name in point if name[0] != "_" and not name.startswith("incident")}
    assert {found["axes"][name] for name in names - {"step"}} == {"step"}
    seen = names - found["hidden"]
    assert {"train/loss", "val/loss", "grad/norm", "lr", "monitors/attn_logit_max", "tokens_per_s"} <= seen
    assert not {"step", "tick"} & seen
    assert not {name for name in seen if name.count("/") > 1}
    assert len(seen) < 40


def ended(folder, *overrides, ends=None):
    """Trains in this process until it raises `ends`, and returns what W&B has of the run."""
    with composed(*overrides) as cfg, pytest.raises(ends) if ends else nullcontext():
        train(build(cfg, folder))
    return read(folder)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)


def test_a_halted_run_says_so_with_its_last_numbers(tmp_path):
    wild = ["optimizer=sgd", "optimizer.lr=1e30", "clipping=none", "warmup=none"]
    halting = [*wild, "guard=skip", "guard.max_consecutive=4", "forensics=off"]
    found = ended(tmp_path, *TINY_GPT, *QUIET, *halting, ends=TrainingHalted)
    assert found["exit_code"] == 3
    assert found["summary"]["status"] == "halted"
    assert found["summary"]["guard/skipped"] == 4
    assert found["summary"]["incident/count"] == 0
    assert "incident/cause" not in found["summary"]


def test_a_loss_that_is_nan_is_never_null(tmp_path):
    wild = ["guard=off", "optimizer=sgd", "optimizer.lr=1e30", "clipping=none", "warmup=none", "forensics=off"]
    found = ended(tmp_path, *TINY_GPT, *QUIET, *wild)
    assert found["summary"]["val/loss"] == "NaN"
    assert found["exit_code"] == 0


def test_images_have_their_own_numbers(tmp_path):
    found = ended(tmp_path, *TINY_RESNET, "wandb=offline", "wandb.group=mine", "wandb.name=own", "steps=2")
    assert (found["group"], found["name"]) == ("mine", "own")
    assert found["summary"]["images_per_s"] > 0
    assert 0 <= found["summary"]["val/accuracy"] <= 1


@pytest.mark.beside
@pytest.mark.slow
def test_what_a_continued_run_met_before_is_still_in_its_table(tmp_path):
    ended(tmp_path, *TINY_GPT, *QUIET, *NAN, "checkpoint.every=5", "steps=15")
    for piece in tmp_path.glob("wandb/offline-run-*"):
        piece.rename(tmp_path.with_name(f"{tmp_path.name}-first"))
    found = ended(tmp_path, *TINY_GPT, *QUIET, *NAN, "checkpoint.every=5", "resume=auto")
    assert [row["step"] for row in table(tmp_path)] == [13]
    assert found["summary"]["incident/count"] == 1
