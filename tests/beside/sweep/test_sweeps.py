"""Sweeps: a restart runs only what is missing; one line per run; parallel runs; searches that use earlier losses."""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import yaml

from stabletrain.beside.sweep.plan import grid, hydra
from stabletrain.config.arguments import Arguments
from stabletrain.config.checks import check
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests import forkserver
from tests.once import once
from tests.runs import CONF, ROOT, TINY_GPT, command, composed

QUICK = [*TINY_GPT, "steps=6", "checkpoint.every=2", "log_every=2"]
SWEEP = [*QUICK, "-m", "optimizer.lr=1e-3,1e-2", "seed=0,1", "hydra.sweep.dir=sweep"]

needs_joblib = pytest.mark.skipif(find_spec("hydra_plugins.hydra_joblib_launcher") is None, reason="without [joblib]")
needs_optuna = pytest.mark.skipif(find_spec("hydra_plugins.hydra_optuna_sweeper") is None, reason="without [optuna]")


def params(experiment):
    """Returns what an experiment sweeps over; empty for a single run."""
    tree = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text()) or {}
    return tree.get("hydra", {}).get("sweeper", {}).get("params", {})


EXPERIMENTS = [file.stem for file in sorted((CONF / "experiment").glob("*.yaml"))]
SWEEPS = [name for name in EXPERIMENTS if params(name)]
GRIDS = [name for name in SWEEPS if name != "search"]


def contents(folder):
    """Returns the bytes of every file below a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train_sweep(place):
    """Runs a sweep of four runs to its end; `said.txt` has what it printed."""
    place.mkdir()
    first = command(*SWEEP, cwd=place)
    assert (first.returncode, first.stderr) == (0, "")
    (place / "said.txt").write_text(first.stdout)


@pytest.fixture
def swept(tmp_path_factory, tmp_path):
    """The folder of a test that may start a finished sweep again, which is a copy; and what the sweep printed."""
    place = once(tmp_path_factory, "sweep", train_sweep)
    shutil.copytree(place / "sweep", tmp_path / "sweep")
    return tmp_path, (place / "said.txt").read_text()


def losses(folder):
    """Returns the final validation loss by run folder."""
    files = sorted(folder.glob("*/run.json"))
    return {file.parent.name: json.loads(file.read_text())["final"]["val/loss"] for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_the_first_and_the_last_run_of_a_sweeps_file_train(tmp_path, name):
    with hydra(Arguments([], []), CONF) as config:
        found = grid(config, [f"experiment={name}"])
    assert found.runs is not None
    assert found.varies == list(params(name))
    small = [o for o in [*TINY_GPT, "batch_size=8"] if o.partition("=")[0] not in found.varies]
    for number in (0, -1):
        with composed(*found.runs[number], *small) as cfg:
            check(cfg)
            job = build(cfg, tmp_path / str(number))
            steps = cfg.faults.at[0] if cfg.faults.get("at") else 1
            train(replace(job, plan=replace(job.plan, steps=min(steps, 3))))
        assert read_jsonl(tmp_path / str(number) / "metrics.jsonl")[0]["train/loss"] > 0


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweeps_file_says_how_it_is_run_how_long_it_takes_and_what_comes_out(name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert f"-m experiment={name}" in head
    assert re.search(r"\d+ (small )?runs|not measured", head)


@pytest.mark.slow
def test_a_second_start_runs_only_what_is_missing_and_gives_the_same(swept):
    tmp_path, said = swept
    assert len(said.splitlines()) == 1 + 4 + 3, "it says how many, a line a run, and how it ended"
    assert [line.split()[0] for line in said.splitlines()[1:5]] == ["1/4", "2/4", "3/4", "4/4"]
    assert "stabletrain · gpt_nano" in (tmp_path / "sweep" / "0" / "output.txt").read_text()
    whole = losses(tmp_path / "sweep")
    kept = {name: contents(tmp_path / "sweep" / name) for name in ("0", "3")}

    shutil.rmtree(tmp_path / "sweep" / "1")
    preempted = tmp_path / "sweep" / "2"
    shutil.rmtree(preempted / "checkpoints" / "step-00000006")
    record = json.loads((preempted / "run.json").read_text())
    (preempted / "run.json").write_text(json.dumps(record | {"status": "preempted", "final": {}}))

    second = command(*SWEEP, cwd=tmp_path)
    assert (second.returncode, second.stderr) == (0, "")
    assert "4 runs in sweep, 2 already done" in second.stdout
    assert [line.split()[0] for line in second.stdout.splitlines() if line.endswith("(before)")] == ["1/4", "4/4"]
    assert losses(tmp_path / "sweep") == whole
    typed = [json.loads((tmp_path / "sweep" / name / "run.json").read_text())["overrides"] for name in "0123"]
    assert [run[-2:] for run in typed] == [[f"optimizer.lr={r}", f"seed={s}"] for r in (0.001, 0.01) for s in (0, 1)]
    assert kept == {name: contents(tmp_path / "sweep" / name) for name in kept}, "what was over was not touched"
    assert "resume" in [line["event"] for line in read_jsonl(preempted / "events.jsonl")]
    assert (tmp_path / "sweep" / "1" / ".hydra" / "config.yaml").exists()

    again = command("resume=sweep", cwd=tmp_path)
    assert (again.returncode, again.stdout.count("(before)")) == (0, 4)
    assert kept == {name: contents(tmp_path / "sweep" / name) for name in kept}


@pytest.mark.slow
def test_a_sweep_resumed_by_name_changes_its_runs_as_the_table_allows(tmp_path):
    few = [o.replace("1e-3,1e-2", "1e-3") for o in SWEEP]
    assert command(*few, cwd=tmp_path).returncode == 0
    before = contents(tmp_path / "sweep")
    refused = command("resume=sweep", "steps=9", "model.n_layer=3", cwd=tmp_path)
    assert refused.returncode == 2
    assert "model.n_layer=3: the run in sweep/0 has model.n_layer=2, which a resume cannot change" in refused.stderr
    assert command("resume=sweep", "seed=4,5", cwd=tmp_path).returncode == 2, "the keys that vary tell runs apart"
    assert before == contents(tmp_path / "sweep")
    done = command("resume=sweep", "clipping=agc", cwd=tmp_path)
    assert (done.returncode, done.stdout.count("(before)")) == (0, 2), "all its steps are done"
    done = command("resume=sweep", "steps=9", "clipping=agc", cwd=tmp_path)
    assert (done.returncode, done.stdout.count("(before)")) == (0, 0)
    for number in "01":
        record = json.loads((tmp_path / "sweep" / number / "run.json").read_text())
        assert record["final"]["steps"] == 9
        assert record["changes"][0]["keys"]["clipping"] == ["norm", "agc"]


@pytest.mark.slow
def test_another_sweep_in_its_folder_is_refused_and_a_longer_one_goes_on(swept):
    tmp_path, _ = swept
    before = contents(tmp_path / "sweep")

    def swept_over(rates):
        return command(*[o.replace("1e-3,1e-2", rates) for o in SWEEP], cwd=tmp_path)

    for other in ("1e-3,1e-1", "1e-3"):
        refused = swept_over(other)
        assert refused.returncode == 2
        assert refused.stderr.startswith("stabletrain: hydra.sweep.dir=sweep holds another sweep: its run 2 is ")
        assert refused.stdout == ""
    assert before == contents(tmp_path / "sweep")
    more = swept_over("1e-3,1e-2,3e-3")
    assert (more.returncode, more.stdout.count("(before)")) == (0, 4)


@pytest.mark.slow
def test_what_was_halted_is_over_and_what_failed_is_not(tmp_path):
    chosen = [*QUICK, "guard=skip", "guard.max_consecutive=2", "clipping=none", "warmup=none", "precision=fp32"]
    chosen += ["-m", "optimizer.lr=1e30,-1", "hydra.sweep.dir=sweep"]
    first = command(*chosen, cwd=tmp_path)
    assert first.returncode == 3, "of the first that did not finish"
    assert first.stderr == "stabletrain: optimizer.lr=-1 is not a finite number above 0: adamw's default is 3e-3\n"
    assert "1 halted, 1 failed" in first.stdout
    assert "resume=sweep runs what is missing or failed" in first.stdout
    halted = contents(tmp_path / "sweep" / "0")
    second = command(*chosen, cwd=tmp_path)
    assert second.returncode == 3
    assert [("(before)" in line) for line in second.stdout.splitlines()[1:3]] == [True, False]
    assert halted == contents(tmp_path / "sweep" / "0")


def stopped(tmp_path, chosen, number, running):
    """Runs a sweep of long runs and sends it a signal once `running` of them train; returns exit code, stdout and
    stderr.
    """

    def logged(file):
        return file.read_bytes().count(b"\n")

    def found():
        return list(tmp_path.glob("sweep/*/metrics.jsonl"))

    before = {file: logged(file) for file in found()}
    words = [str(ROOT / "train.py"), *TINY_GPT, "steps=100000", "log_every=1", "guard=off", *chosen]
    out, err = tmp_path / "out", tmp_path / "err"
    process = forkserver.start(words, tmp_path, dict(os.environ), out, err)
    try:
        end = time.monotonic() + 240
        while sum(logged(file) > before.get(file, 0) + 3 for file in found()) < running:
            assert time.monotonic() < end, err.read_text()
            time.sleep(0.1)
        os.kill(process.pid, number)
        code = process.wait(240)
    except BaseException:
        process.kill()
        raise
    return code, out.read_text(), err.read_text()


@pytest.mark.slow
def test_an_interrupted_sweep_saves_and_says_how_to_go_on(tmp_path):
    code, said, errors = stopped(tmp_path, ["-m", "seed=0,1", "hydra.sweep.dir=sweep"], signal.SIGTERM, 1)
    assert (code, errors) == (75, "")
    assert "1 preempted, 1 not started" in said
    assert "python train.py resume=sweep runs what is missing or failed" in said
    steps = read_jsonl(tmp_path / "sweep" / "0" / "metrics.jsonl")[-1]["step"]
    code, said, _ = stopped(tmp_path, ["-m", "seed=0,1", "hydra.sweep.dir=sweep"], signal.SIGTERM, 1)
    assert code == 75
    assert read_jsonl(tmp_path / "sweep" / "0" / "metrics.jsonl")[-1]["step"] > steps


@pytest.mark.slow
def test_a_finished_run_is_not_run_again_by_itself_either(tmp_path):
    assert command(*QUICK, "hydra.run.dir=run", cwd=tmp_path).returncode == 0
    before = contents(tmp_path / "run")
    again = command(*QUICK, "hydra.run.dir=run", "resume=auto", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "is finished already, val loss " in again.stdout
    assert before == contents(tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()  # as if it had been killed before it wrote the page
    again = command(*QUICK, "hydra.run.dir=run", "resume=auto", cwd=tmp_path)
    assert "its missing report.html is written" in again.stdout
    assert before.keys() == contents(tmp_path / "run").keys()
    more = command(*QUICK, "steps=8", "resume=run", cwd=tmp_path)
    assert "val loss" in more.stdout
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 8


@pytest.mark.slow
@needs_joblib
def test_two_at_once_give_bit_for_bit_what_one_after_the_other_gives(swept):
    tmp_path, _ = swept
    whole = losses(tmp_path / "sweep")
    for name in "01":  # the first: a process that imports torch only later is taken for one that leaks, and ended
        shutil.rmtree(tmp_path / "sweep" / name)
    two = command("resume=sweep", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", cwd=tmp_path)
    assert (two.returncode, two.stderr, two.stdout.count("(before)")) == (0, "", 2)
    assert losses(tmp_path / "sweep") == whole
    assert len(two.stdout.splitlines()) == 1 + 4 + 3
    records = [json.loads((tmp_path / "sweep" / name / "run.json").read_text()) for name in "01"]
    assert len({record["pid"] for record in records}) == 2
    assert all(" resume=sweep hydra/launcher=joblib" in record["command"] for record in records), "what was typed"
    cores = len(os.sched_getaffinity(0))
    many = command("resume=sweep", f"hydra.launcher.n_jobs={cores + 1}", cwd=tmp_path)
    assert many.returncode == 2
    said = f"hydra.launcher.n_jobs={cores + 1} is above the {cores} CPU cores here"
    assert said in many.stderr, "the sweep is resumed with its launcher"


@pytest.mark.slow
@needs_joblib
def test_asked_to_stop_all_that_run_at_once_save_and_each_has_its_share_of_the_threads(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    chosen = ["-m", "seed=0,1,2", "hydra.sweep.dir=sweep", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    code, said, errors = stopped(tmp_path, chosen, signal.SIGTERM, 2)
    assert (code, errors) == (75, "")
    assert "2 preempted, 1 not started" in said
    for name in "01":
        (saved,) = [path.name for path in (tmp_path / "sweep" / name / "checkpoints").glob("step-*")][-1:]
        last = read_jsonl(tmp_path / "sweep" / name / "metrics.jsonl")[-1]["step"]
        assert saved == f"step-{last:08}"
        record = json.loads((tmp_path / "sweep" / name / "run.json").read_text())
        assert " -m seed=0,1,2 " in record["command"], "what was typed"
        assert record["hardware"]["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.slow
@needs_optuna
def test_a_search_learns_from_the_losses_and_goes_on_with_what_it_has(tmp_path):
    search = [*QUICK, "-m", "experiment=search", "hydra.sweeper.n_trials=3", "warmup.steps=range(1,4)"]
    first = command(*search, "hydra.sweep.dir=s", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    results = tmp_path / "s" / "optimization_results.yaml"
    found, best = losses(tmp_path / "s"), yaml.safe_load(results.read_text())
    assert len(found) == 3
    assert best["best_value"] == min(found.values())
    shutil.rmtree(tmp_path / "s" / "2")
    second = command("resume=s", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("(before)") == 2
    assert losses(tmp_path / "s") == found
    assert yaml.safe_load(results.read_text()) == best
    other = command(*search, "hydra.sweep.dir=s", "hydra.sweeper.sampler.seed=1", cwd=tmp_path)
    assert other.returncode == 2
    assert "holds another sweep: its run 0 is clipping.max_norm=" in other.stderr


@pytest.mark.slow
@needs_optuna
def test_a_run_that_is_halted_is_the_worst_and_ends_no_search(tmp_path):
    chosen = [*QUICK, "guard=skip", "guard.max_consecutive=2", "clipping=none", "warmup=none", "precision=fp32"]
    chosen += ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.sampler.seed=0"]
    done = command(*chosen, "optimizer.lr=1e30,1e31", "hydra.sweep.dir=s", cwd=tmp_path)
    assert done.returncode == 3
    assert [line.split()[2] for line in done.stdout.splitlines()[1:3]] == ["halted", "halted"]


@pytest.mark.parametrize(("group", "extra"), [("launcher", "joblib"), ("sweeper", "optuna")])
def test_a_plugin_that_is_not_installed_names_its_extra(tmp_path, group, extra):
    (tmp_path / "shadow" / "hydra_plugins").mkdir(parents=True)
    (tmp_path / "shadow" / "hydra_plugins" / "__init__.py").write_text("")
    typed = ["-m", "seed=0,1", f"hydra/{group}={extra}"]
    done = command(*typed, cwd=tmp_path, torch=False, PYTHONPATH=f"{tmp_path / 'shadow'}:{ROOT}")
    assert done.returncode == 2
    assert done.stderr == f'stabletrain: hydra/{group}={extra} is not installed: pip install "stabletrain[{extra}]"\n'
