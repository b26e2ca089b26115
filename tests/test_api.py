"""What `import stabletrain` offers: the public names, and runs that are trained, loaded and compared from Python."""

import json
import shlex
import signal
import subprocess
import sys

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

import stabletrain
from stabletrain.checkpoint.folder import find
from stabletrain.errors import ConfigError
from stabletrain.machine.signals import STOP_SIGNALS
from stabletrain.trainer import step_graph
from tests.conftest import HAS_BESIDE
from tests.runs import CONF, TINY_GPT, command

RUN = [*TINY_GPT, "precision=fp32", "model.dropout=0.1", "steps=4", "report=false", "monitors=none"]
JUNK = ["ipykernel_launcher.py", "-f", "/tmp/kernel.json"]

NOTHING_HEAVY = f"""
import sys
import stabletrain
heavy = {{"torch", "hydra", "omegaconf", "pandas", "numpy", "wandb"}} & set(sys.modules)
assert not heavy, heavy
import stabletrain.errors
from stabletrain import {"compare, " * HAS_BESIDE}load, train
assert "torch" not in sys.modules
names = {{"Batch", "Guard", "LossTerms", "compare", "load", "train"}}
assert names == set(stabletrain.__all__) <= set(dir(stabletrain))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working folder, in a process whose command line is a notebook's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*JUNK])
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", *JUNK])
    return tmp_path


def weights(folder):
    return find(folder).load_model()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_import_loads_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NOTHING_HEAVY], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.beside
def test_the_public_names_are_there_and_no_others():
    for name in stabletrain.__all__:
        assert getattr(stabletrain, name).__doc__, name
    with pytest.raises(AttributeError, match="module 'stabletrain' has no attribute 'gaurd'"):
        stabletrain.gaurd  # noqa: B018


@pytest.mark.slow
def test_a_call_gives_the_weights_of_the_command_twice_in_one_process(place):
    handlers = [signal.getsignal(each) for each in STOP_SIGNALS]
    results = [stabletrain.train(RUN) for _ in range(2)]
    assert sys.argv == JUNK
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == handlers
    done = command(*RUN, "hydra.run.dir=typed", cwd=place)
    assert done.returncode == 0, done.stderr
    first, second = (weights(result.folder) for result in results)
    assert same(first, second)
    assert same(first, weights(place / "typed"))
    assert results[0].folder != results[1].folder
    assert [result.folder.parent.parent for result in results] == [place / "outputs"] * 2
    assert {(result.status, result.reason, result.metrics["steps"]) for result in results} == {("finished", None, 4)}


def test_the_record_of_a_run_names_the_command_that_repeats_it(place):
    result = stabletrain.train([*RUN, "checkpoint=off"])
    record = json.loads((result.folder / "run.json").read_text())
    assert record["command"] == shlex.join(["stabletrain", "train", *RUN, "checkpoint=off"])
    assert (record["options"], record["overrides"]) == ([], [*RUN, "checkpoint=off"])


def test_signals_keep_their_handlers_during_a_run(place, monkeypatch):
    seen, compute = [], step_graph.compute
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    monkeypatch.setattr(
        step_graph, "compute", lambda *all: seen.append([*map(signal.getsignal, STOP_SIGNALS)]) or compute(*all)
    )
    stabletrain.train([*RUN, "checkpoint=off"])
    assert seen == [before] * 4


def test_hydra_is_left_as_it_was(place):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        HydraConfig.instance().set_config(compose("config", return_hydra_config=True))
        mine, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
        stabletrain.train([*RUN, "checkpoint=off"])
        with pytest.raises(ConfigError):
            stabletrain.train(["stepz=3"])
        assert GlobalHydra.instance().hydra is mine
        assert HydraConfig.instance().cfg is config
    HydraConfig.instance().cfg = None


@pytest.mark.beside
def test_a_halted_run_is_a_result(place, capsys):
    fault = ["guard=skip", "guard.max_consecutive=1", "faults=input", "faults.at=[2]", "forensics=off"]
    result = stabletrain.train([*RUN, *fault, "hydra.run.dir=run"])
    assert (result.status, result.folder) == ("halted", place / "run")
    assert "skipped" in result.reason
    assert result.metrics["guard/updates"] == 2
    assert "hydra" not in capsys.readouterr().err.lower(), "Hydra must not print its own report of an error"


MISTAKES = {
    "stepz=3": "stepz: there is no such key; did you mean steps?",
    "steps=0": "steps=0 is below 1",
    "optimizer.lr=-1": "optimizer.lr=-1 is not a finite number above 0",
    "seed=1,2": "these are several values: to sweep over them, add -m (stabletrain train -m ...)",
    "--lr=3": "keys are written without dashes: optimizer.lr=3",
    "-m": "-m: stabletrain.train trains one run: call it",
    "--help": "--help: stabletrain.train trains one run: call it",
    "resume=nowhere": "resume=nowhere is neither a run folder nor a checkpoint",
    "parallel=ddp": "torchrun --nproc_per_node=<processes> -m stabletrain train parallel=ddp",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_a_config_error(place, capsys, typed):
    with pytest.raises(ConfigError) as raised:
        stabletrain.train([*RUN, typed])
    assert MISTAKES[typed] in str(raised.value)
    assert capsys.readouterr().err == ""


def test_a_string_is_no_list_of_overrides(place):
    with pytest.raises(ConfigError, match=r"overrides='steps=3' is one string: write a list, \['steps=3'\]"):
        stabletrain.train("steps=3")


def test_a_rank_of_torchrun_is_refused(place, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun -m stabletrain train"):
        stabletrain.train(RUN)


def test_ctrl_c_propagates_and_the_next_call_resumes(place, monkeypatch):
    def interrupted(state, *rest):
        if state.step == 3:
            raise KeyboardInterrupt
        return compute(state, *rest)

    compute = step_graph.compute
    whole = stabletrain.train([*RUN, "hydra.run.dir=whole"])
    monkeypatch.setattr(step_graph, "compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stabletrain.train([*RUN, "checkpoint.every=2"])
    monkeypatch.setattr(step_graph, "compute", compute)
    result = stabletrain.train([*RUN, "checkpoint.every=2", "resume=auto"])
    assert result.status == "finished"
    assert [folder.name for folder in place.glob("outputs/*/*")] == [result.folder.name]
    assert same(weights(result.folder), weights(whole.folder))
    again = stabletrain.train([*RUN, "checkpoint.every=2", "resume=auto"])
    assert again.metrics == result.metrics, "a finished run is not trained again"


def test_an_error_of_the_users_own_code_is_raised_and_recorded(place, monkeypatch):
    (place / "wrong_model.py").write_text("def Model():\n    raise RuntimeError('my mistake')\n")
    (place / "conf" / "model").mkdir(parents=True)
    (place / "conf" / "model" / "mine.yaml").write_text("_target_: wrong_model.Model\n")
    monkeypatch.syspath_prepend(place)
    with pytest.raises(ConfigError, match="model=mine cannot be built from wrong_model.Model: .*my mistake"):
        stabletrain.train(["model=mine", "wandb=disabled", "hydra.run.dir=run"], config_dir=place / "conf")
    assert '"status": "failed"' in (place / "run" / "run.json").read_text()


@pytest.mark.beside
def test_runs_are_compared(place):
    for seed in (1, 2):
        stabletrain.train([*RUN, f"seed={seed}", "checkpoint=off"])
    runs = stabletrain.compare(["outputs"])
    assert isinstance(runs, pd.DataFrame)
    assert sorted(runs["seed"]) == [1, 2]
    assert stabletrain.compare("outputs", by_seed=True)["n"].tolist() == [2]
    with pytest.raises(ConfigError, match="nowhere"):
        stabletrain.compare(["nowhere"])
