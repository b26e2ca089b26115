"""`slurm/ranks.py`: Slurm's numbers say which node hosts the rendezvous; which code a node ends with."""

import importlib.util
import os
import socket
import subprocess
import sys
import time

import pytest

from tests.beside.slurm.cluster import free_ports
from tests.runs import ROOT

LIMIT = 200
"""Seconds after which a test counts as hung."""

FILE = ROOT / "slurm" / "ranks.py"


@pytest.fixture(scope="module")
def ranks():
    """`slurm/ranks.py` as a module."""
    spec = importlib.util.spec_from_file_location("slurm_ranks", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_node_of_slurm_is_the_host_and_each_node_has_slurms_address(ranks):
    addresses = {"STABLETRAIN_NODE_ADDRESSES": "10.1.0.1,10.1.0.2"}
    first, second = (ranks.this_node({**addresses, "SLURM_NODEID": number}).options() for number in "01")
    assert first == ["--rdzv-conf=is_host=1", "--local-addr=10.1.0.1"]
    assert second == [f"--rdzv-conf=is_host=0,read_timeout={ranks.CONNECT}", "--local-addr=10.1.0.2"]
    assert ranks.this_node({}).options() == []


def test_only_the_loss_of_another_node_counts_as_an_end_by_slurm(ranks, capsys):
    error = ConnectionError("no answer")
    assert ranks.lost(ranks.Node(1, ["10.1.0.1", "10.1.0.2"]), "10.1.0.1:15009", error) == 143
    said = "node 0 of the job has exited or cannot be reached at 10.1.0.1:15009, which ends the ranks of node 1 too"
    assert said in capsys.readouterr().err
    assert ranks.lost(ranks.Node(0, ["10.1.0.1"]), "10.1.0.1:15009", error) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    for part in ("node 0 cannot host the rendezvous", "10.1.0.1:15009 (no answer)", "`hostname -I` lists 10.1.0.1"):
        assert part in said


def run(place, *options, script=FILE, **variables):
    """Runs `ranks.py`, or a script in its place, to its end."""
    words = [sys.executable, str(script), "--nproc-per-node=1", "--rdzv-backend=c10d", *options, "rank.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT)


STRANGER = f"""
import runpy, sys
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

c10d_rendezvous_backend._matches_machine_hostname = lambda host: False
sys.argv[0] = {str(FILE)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""`ranks.py` on a node that does not recognise its own address."""


@pytest.mark.slow
def test_a_node_that_does_not_recognise_its_own_address_is_the_host_nevertheless(tmp_path):
    (tmp_path / "stranger.py").write_text(STRANGER)
    (tmp_path / "rank.py").write_text("print('trained')")
    options = ["--nnodes=1", f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}", "--rdzv-id=1"]
    node = {"STABLETRAIN_NODE_ADDRESSES": "127.0.0.1", "SLURM_NODEID": "0"}
    done = run(tmp_path, *options, script=tmp_path / "stranger.py", **node)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


@pytest.mark.slow
def test_another_node_is_never_the_host_though_the_address_is_its_own_too(tmp_path):
    options = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}", "--rdzv-id=1"]
    node = {"STABLETRAIN_NODE_ADDRESSES": "127.0.0.1,127.0.0.1", "SLURM_NODEID": "1"}
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    done = run(tmp_path, *options, script=tmp_path / "impatient.py", **node)
    assert done.returncode == 143, done.stderr
    assert "node 0 of the job has exited or cannot be reached at 127.0.0.1:" in done.stderr


IMPATIENT = f"""
import importlib.util, os, sys

spec = importlib.util.spec_from_file_location("ranks", {str(FILE)!r})
ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ranks)
ranks.CONNECT = 2
os._exit(ranks.main(sys.argv[1:]))
"""
"""`ranks.py` that waits for node 0 for two seconds only."""


@pytest.mark.slow
def test_a_host_whose_port_is_taken_says_so_and_does_not_count_as_an_end_by_slurm(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        node = {"STABLETRAIN_NODE_ADDRESSES": "127.0.0.1,127.0.0.1", "SLURM_NODEID": "0"}
        done = run(tmp_path, "--nnodes=2", f"--rdzv-endpoint={endpoint}", "--rdzv-id=1", **node)
    assert done.returncode == 1
    assert f"stabletrain: node 0 cannot host the rendezvous of the ranks at {endpoint} (" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "saved"), [("1", False), ("60", True)])
def test_ranks_may_save_after_sigterm_for_as_long_as_the_variable_says(tmp_path, seconds, saved):
    (tmp_path / "rank.py").write_text(SAVING)
    words = [sys.executable, str(FILE), "--standalone", "--nproc-per-node=1", "rank.py"]
    environment = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds}
    torchrun = subprocess.Popen(words, cwd=tmp_path, env=environment)
    end = time.monotonic() + LIMIT
    while not (tmp_path / "up").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    torchrun.terminate()
    assert torchrun.wait(LIMIT) == 143
    assert (tmp_path / "saved").exists() == saved


SAVING = """
import signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(4)
    Path("saved").touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
Path("up").touch()
time.sleep(600)
"""
"""A rank that saves for 4 seconds when it is told to end."""


RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
{body}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("sys.exit(75)", 75),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(600)", 137),
        ("sys.exit(3) if rank else time.sleep(600)", 3),
    ],
    ids=["saved", "killed", "halted"],
)
def test_several_ranks_end_with_the_code_of_the_first_that_failed(tmp_path, body, code):
    (tmp_path / "rank.py").write_text(RANK.format(body=body))
    words = [sys.executable, str(FILE), "--standalone", "--nproc-per-node=2", "rank.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == code, done.stderr
