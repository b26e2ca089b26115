"""One run of a sweep: whether it is done, how it stops with the others, and what it writes and prints."""

import os
import signal
import sys
import threading
import time

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from stabletrain.beside.sweep import member, plan
from stabletrain.beside.sweep.member import Member, stop_file, stopped_with_others, stopping_all
from stabletrain.config.arguments import parse_arguments
from stabletrain.errors import ConfigError
from stabletrain.machine.signals import STOP_SIGNALS, StopRequest
from tests.beside.sweep.given import RUNS, grid_of, ran


@pytest.fixture(autouse=True)
def _handlers():
    """Restores the signal handlers after each test, also if it fails."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Returns a function that builds the member for Hydra's job number 1, for a launcher and a sweeper."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "-m", "seed=0,1"])

    def job(launcher="basic", sweeper="basic", overrides=RUNS[1]):
        hydra = {
            "runtime": {
                "output_dir": str(tmp_path / "1"),
                "choices": {"hydra/launcher": launcher, "hydra/sweeper": sweeper},
            },
            "sweep": {"dir": str(tmp_path)},
            "job": {"num": 1},
            "overrides": {"task": list(overrides)},
        }
        monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": hydra}))
        return Member()

    return job


@pytest.fixture
def sweep(job, tmp_path):
    """The sweep's record, as written by the process that started it."""
    return plan.record_sweep(tmp_path, parse_arguments(["-m", "seed=0,1,2,3"]), grid_of(RUNS))


# ---- the run


def test_it_knows_its_place(job, sweep, tmp_path):
    found = job()
    assert (found.folder, found.number, found.overrides) == (tmp_path / "1", 1, RUNS[1])
    assert found.alone
    assert not found.in_search
    assert found.sweep == sweep
    assert not job("joblib").alone
    assert job(sweeper="optuna").in_search


def test_beside_others_the_command_is_the_one_that_was_typed(job, sweep, monkeypatch):
    worker = ["python", "-m", "joblib.externals.loky"]
    monkeypatch.setattr(sys, "orig_argv", list(worker))
    job()
    assert sys.orig_argv == worker
    job("joblib")
    assert sys.orig_argv == ["python", "train.py", "-m", "seed=0,1"]


def test_without_a_record_it_belongs_to_no_sweep(job):
    assert job().sweep is None
    assert job("joblib").sweep is None


def test_it_is_over_if_it_has_its_result(job, tmp_path):
    assert job().finished_record(5) is None
    assert job().record() == {}
    record = ran(tmp_path / "1", RUNS[1])
    assert job().finished_record(5) == record == job().record()
    assert job().finished_record(6) is None
    with pytest.raises(ConfigError, match="holds another sweep: its run 1 is seed=1, here it would be seed=2"):
        job(overrides=RUNS[2]).finished_record(5)


def test_its_configuration_is_kept_at_the_first_start_only(job, tmp_path):
    job().write_hydra_record(OmegaConf.create({"steps": 5}))
    kept = {path.name: path.read_text() for path in (tmp_path / "1" / ".hydra").iterdir()}
    assert set(kept) == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert kept["config.yaml"] == "steps: 5\n"
    assert OmegaConf.create(kept["overrides.yaml"]) == RUNS[1]
    (tmp_path / "1" / "run.json").write_text("{}")
    job().write_hydra_record(OmegaConf.create({"steps": 6}))
    assert (tmp_path / "1" / ".hydra" / "config.yaml").read_text() == "steps: 5\n"


def test_it_says_how_it_ended(job, sweep, tmp_path, capsys, monkeypatch):
    record = ran(tmp_path / "1", RUNS[1])
    job().print_end(record, before=True)
    assert capsys.readouterr().out == "2/4  seed=1  finished   val loss 2.000  (before)\n"
    job().print_end(record)
    assert capsys.readouterr().out.startswith("2/4  seed=1  finished   val loss 2.000  0 s")

    def gone(*words, **how):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    job().print_end(record)  # a reader who is gone does not end the run


# ---- stopping


def test_a_signal_asks_all_runs_to_stop_and_a_second_ctrl_c_interrupts(tmp_path):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    stop_file(tmp_path).touch()  # of an earlier start
    with stopping_all(tmp_path):
        assert not stop_file(tmp_path).exists()
        signal.raise_signal(signal.SIGTERM)
        assert stop_file(tmp_path).exists()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert not stop_file(tmp_path).exists()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_run_beside_others_stops_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(member, "POLL_S", 0.001)
    before, threads = [signal.getsignal(number) for number in STOP_SIGNALS], threading.active_count()
    with stopped_with_others(tmp_path), StopRequest() as stop:
        stop_file(tmp_path).touch()
        deadline = time.monotonic() + 60
        while not stop.name and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stop.name == "SIGTERM"
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert threading.active_count() == threads, "nothing watches any more"


def test_until_it_handles_signals_it_leaves_them_to_the_sweep(tmp_path):
    with stopped_with_others(tmp_path):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert not stop_file(tmp_path).exists(), "only the process of the sweep asks all to stop"


def test_a_run_that_has_not_begun_when_the_sweep_stops_is_not_wanted(job, tmp_path):
    assert not job("joblib").is_cancelled
    stop_file(tmp_path).touch()
    assert job("joblib").is_cancelled
    assert not job().is_cancelled, "alone, the signal itself reaches it"


def test_only_beside_others_it_watches_for_the_request(job, tmp_path, monkeypatch):
    monkeypatch.setattr(member, "POLL_S", 0.001)
    before = signal.getsignal(signal.SIGTERM)
    with job().listening():
        assert signal.getsignal(signal.SIGTERM) == before
    with job("joblib").listening():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
