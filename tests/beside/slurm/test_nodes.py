"""A job on two nodes of a real Slurm: its ranks stop together, end together, and continue bit-identically."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.beside.slurm.test_cluster import again, log, record, step, weights
from tests.once import once
from tests.parallel.launches import performed
from tests.runs import TINY_GPT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(900)]

CHOSEN = [
    *[*TINY_GPT, "model.dropout=0.1", "steps=240", "checkpoint.every=40", "log_every=5", "eval_every=120"],
    *("forensics=off", "monitors=none"),
]
KINDS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of uninterrupted two-rank runs on one machine without Slurm, by kind of parallelism."""

    def train(place):
        place.mkdir()
        performed(place, 2, {kind: {"overrides": [*CHOSEN, f"parallel={kind}"]} for kind in KINDS})

    place = once(tmp_path_factory, "slurm_whole_of_two", train)
    return {kind: weights(place / kind) for kind in KINDS}


def process(job, rank):
    """Returns the process id of a rank of this job."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"RANK={rank}".encode()}
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted <= set(file.read_bytes().split(b"\0")):
                return int(file.parent.name)
        except OSError:
            continue
    raise AssertionError(f"job {job} has no rank {rank}")


def since(pid):
    """Returns when the process of a number began, in the kernel's ticks; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def begun(cluster, job, run):
    """Waits until a job is past its first checkpoint; checks that its ranks are on two nodes."""
    cluster.wait(lambda: step(run) > 60)
    assert re.search(r"start 1 on n\[1-2\]", log(run))
    assert record(run)["choices"]["parallel"] in KINDS


def test_ranks_of_two_nodes_stop_together_queue_again_and_end_as_if_nothing_had_been(cluster, whole, tmp_path):
    run = tmp_path / "run"
    job = cluster.launch("--nodes", "2", *CHOSEN, "parallel=ddp", "hydra.run.dir=run", cwd=tmp_path)
    begun(cluster, job, run)
    cluster.run("scancel", "--batch", "--signal=USR2", job)
    again(cluster, job)
    assert "saved; queued again" in log(run)
    launch = f"slurm/launch.sh --gpu any --nodes 2 --cluster {cluster.place}/cluster.conf resume={run}"
    assert f"/{launch}" in log(run)
    assert cluster.ended(job) == "COMPLETED"
    assert weights(run) == whole["ddp"]
    assert record(run)["status"] == "finished"
    assert len(record(run)["resumed"]) == 1


def test_a_rank_killed_on_one_node_ends_both_and_the_sharded_run_goes_on_from_its_checkpoint(cluster, whole, tmp_path):
    run = tmp_path / "run"
    job = cluster.launch("--nodes", "2", *CHOSEN, "parallel=fsdp", "hydra.run.dir=run", cwd=tmp_path)
    begun(cluster, job, run)
    ranks = {pid: since(pid) for pid in (process(job, rank) for rank in (0, 1))}
    os.kill([*ranks][1], signal.SIGKILL)
    again(cluster, job)
    # The other rank may take a moment to end, and its number may be another process's by now.
    cluster.wait(lambda: not any(began and began == since(pid) for pid, began in ranks.items()))
    assert "killed (code 137) after step-" in log(run)
    failed = (run / "slurm.failed_nodes").read_text()
    assert re.fullmatch(rf"{job} n[12] a rank was killed or crashed there .code 137.\n", failed), "and not avoided yet"
    assert cluster.ended(job) == "COMPLETED"
    assert weights(run) == whole["fsdp"]


def test_a_first_node_that_cannot_be_the_host_ends_the_job_with_its_reason(cluster, tmp_path):
    held = tmp_path / "held.conf"
    held.write_text((cluster.place / "cluster.conf").read_text().replace("[any]", "sbatch = --hold\n[any]"))
    job = cluster.launch("--cluster", str(held), "--nodes", "2", *CHOSEN, "hydra.run.dir=run", cwd=tmp_path)
    port = 15000 + int(job) % 15000
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of an earlier job, whose connections linger
        other.bind(("", port))
        other.listen()
        cluster.run("scontrol", "release", job)
        assert cluster.ended(job) == "FAILED"
    assert "ExitCode=1:0" in cluster.run("scontrol", "show", "job", job)
    assert f"stabletrain: node 0 cannot host the rendezvous of the ranks at 127.0.0.1:{port} (" in log(tmp_path / "run")
    assert "queued again" not in log(tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == ["slurm.json", "slurm.log", "slurm.sh"], (
        "and no empty folder for traces"
    )
