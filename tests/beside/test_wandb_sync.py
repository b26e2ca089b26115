"""`stabletrain sync` against a stand-in for W&B's server: everything arrives, once, and a continued run as one."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stabletrain.beside.wandb_sync import batches, is_running, pieces
from stabletrain.cli.commands import main
from tests import forkserver
from tests.once import once
from tests.runs import ROOT
from tests.tracking.wandb_server import KEY, serving

RUNS = textwrap.dedent("""
    import sys
    from pathlib import Path
    from stabletrain.tracking.wandb import Wandb

    root = Path(sys.argv[1])

    def stretch(run, steps, exit_code):
        wandb = Wandb(mode="offline", project="proof", entity="me")
        wandb.start(root / run, f"{run}id", {"groups": {"qknorm": "none"}, "hardware": {"name": "A100"}})
        for step in steps:
            wandb.log(step, {"train/loss": 1 / step})
        wandb.summary({"status": "finished" if exit_code == 0 else "preempted", "last": steps[-1]})
        wandb.finish(exit_code)

    stretch("a", [1, 2, 3], 75)
    stretch("b", [1, 2], 3)
    import time
    time.sleep(1.1)  # the library's folders are named by the second
    stretch("a", [3, 4, 5], 0)
""")


def environment(home, url=None, key=KEY):
    """Returns the environment of a user with this key and server."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    clean |= {"HOME": str(home), "PYTHONPATH": str(ROOT)}
    clean |= {"WANDB_BASE_URL": url, "WANDB_ERROR_REPORTING": "false"} if url else {}
    return clean | ({"WANDB_API_KEY": key} if url and key else {})


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Offline data of two runs in one folder; one of the runs was resumed."""

    def make(home):
        (home / "sweep").mkdir(parents=True)
        done = forkserver.run(["-c", RUNS, str(home / "sweep")], home, environment(home), timeout=240)
        assert done.returncode == 0, done.stderr
        for run in ("a", "b"):
            (home / "sweep" / run / "run.json").write_text('{"status": "finished"}')

    return once(tmp_path_factory, "wandb_kept", make) / "sweep"


@pytest.fixture
def runs(kept, tmp_path):
    return Path(shutil.copytree(kept, tmp_path / "sweep", symlinks=True))


def sync(home, *typed, url, key=KEY, **more):
    words = ["-m", "stabletrain.cli.commands", "sync", *map(str, typed)]
    return forkserver.run(words, home, environment(home, url, key) | more, timeout=240)


@pytest.mark.slow
def test_a_continued_run_arrives_as_one_with_all_its_points_and_its_last_status(runs, tmp_path):
    with serving() as server:
        done = sync(tmp_path, runs, url=server.url, WANDB_MODE="offline", WANDB_RUN_ID="another")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "3 uploaded, 0 still running, 0 uploaded before\n"
        assert [(point["_step"], point["step"]) for point in server.history("aid")] == [*enumerate([1, 2, 3, 3, 4, 5])]
        assert [point["train/loss"] for point in server.history("bid")] == [1, 0.5]
        assert {run: server.runs[run]["exitcode"] for run in server.runs} == {"aid": 0, "bid": 3}
        summary = json.loads(server.runs["aid"]["lines"]["wandb-summary.json"][0])
        assert (summary["status"], summary["last"], summary["card"]) == ("finished", 5, "A100")
        assert server.runs["aid"]["jobType"] == "A100"
        assert "qknorm:none" in server.runs["aid"]["tags"]


@pytest.mark.slow
def test_what_is_uploaded_later_goes_on_where_the_run_ends_and_nothing_goes_twice(runs, tmp_path, capsys):
    with serving() as server:
        last = sorted((runs / "a" / "wandb").glob("offline-run-*"))[-1]
        aside = last.rename(tmp_path / last.name)
        assert sync(tmp_path, runs / "a", url=server.url).returncode == 0
        aside.rename(last)
        done = sync(tmp_path, runs / "a", "--project", "elsewhere", url=server.url)
        assert done.stdout == "1 uploaded, 0 still running, 1 uploaded before\n"
        assert [point["_step"] for point in server.history("aid")] == [*range(6)]
        assert server.runs["aid"]["project"] == "elsewhere"
    assert main(["sync", str(runs / "a")]) == 0
    assert capsys.readouterr().out == "0 uploaded, 0 still running, 2 uploaded before\n"


def test_what_the_server_does_not_take_is_not_called_uploaded(runs, tmp_path):
    with serving() as server:
        server.refuses = True
        done = sync(tmp_path, runs, url=server.url)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 uploaded, 0 still running, 0 uploaded before"
    assert "user is not logged in" in done.stderr
    assert "3 of 3 were not uploaded" in done.stderr.splitlines()[-1]


def test_without_a_network_it_says_so_at_once(runs, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # no server listens there
        done = sync(tmp_path, runs, url=url)
    assert done.returncode == 2
    assert done.stderr.startswith(f"stabletrain: {url} cannot be reached")
    assert done.stderr.count("\n") == 1


def test_without_a_key_it_says_so_at_once(runs, capsys, monkeypatch):
    monkeypatch.setattr("stabletrain.tracking.wandb_setup.has_key", lambda _: False)
    assert main(["sync", str(runs)]) == 2
    assert capsys.readouterr().err.startswith("stabletrain: no API key was found: log in once with `wandb login`")


def made(run, *times, status="finished", host=None):
    """Writes a run folder with these pieces, whose files are empty."""
    for time in times:
        piece = run / "wandb" / f"offline-run-{time}-x"
        piece.mkdir(parents=True)
        (piece / "run-x.wandb").touch()
    (run / "run.json").write_text(json.dumps({"status": status, "host": host}))
    (run / ".lock").touch()
    return run


def test_a_dry_run_contacts_no_server_and_prints_what_would_be_done(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stabletrain.beside.wandb_sync.upload", None)
    made(tmp_path / "outputs" / "done, it is", 1, 2)
    made(tmp_path / "multirun" / "1" / "0", 1, 2, status="running", host="another")
    (tmp_path / "outputs" / "done, it is" / "wandb" / "offline-run-1-x" / "run-x.wandb.synced").touch()
    (tmp_path / "outputs" / "done, it is" / "wandb" / "latest-run").symlink_to("offline-run-2-x")
    assert main(["sync", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "would upload  multirun/1/0/wandb/offline-run-1-x",
        "would upload  outputs/done, it is/wandb/offline-run-2-x",
        "still running multirun/1/0/wandb/offline-run-2-x (--all uploads it anyway)",
        "2 to upload, 1 still running, 1 uploaded before",
    ]
    assert main(["sync", "--dry-run", "--all"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 to upload, 0 still running, 1 uploaded before"


@pytest.mark.parametrize(
    ("typed", "message"), [([], "neither outputs nor multirun"), (["none"], "none is not a folder")]
)
def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch, capsys, typed, message):
    monkeypatch.chdir(tmp_path)
    assert main(["sync", *typed]) == 2
    assert message in capsys.readouterr().err


def test_a_killed_run_is_over_and_one_that_holds_its_lock_is_not(tmp_path):
    here = made(tmp_path / "here", 1, status="running", host=os.uname().nodename)
    there = made(tmp_path / "there", 1, status="running", host="another")
    over = made(tmp_path / "over", 1, status="finished", host="another")
    assert [is_running(run) for run in (here, there, over)] == [False, True, False]
    with open(here / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_running(here)
    assert not is_running(tmp_path)


def test_a_runs_pieces_stay_together_and_no_folder_counts_twice(tmp_path):
    for number in range(5):
        made(tmp_path / "sweep" / str(number), 2, 10, 1)
    found = pieces([tmp_path, tmp_path / "sweep" / "0"])
    assert len(found) == 15
    bundles = [*batches(found, runs=2)]
    assert [len(bundle) for bundle in bundles] == [6, 6, 3]
    assert len({piece.run for bundle in bundles[:1] for piece in bundle}) == 2


def test_the_script_for_login_nodes_is_the_same_command(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [str(ROOT / "slurm" / "sync.sh"), "--dry-run", "gone"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("stabletrain: gone is not a folder")
