"""A job over two nodes of a real Slurm: torchrun's ranks meet, stop together, and end together."""

import os
import signal
import sys

import pytest

from tests.runs import CONF, TINY_GPT
from tests.slurm.stand_ins import stand_in
from tests.slurm.test_cluster import again, log, record, step

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(280)]

RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist
stop = torch.zeros(1)
signal.signal(signal.SIGUSR2, lambda *_: stop.fill_(1))
dist.init_process_group("gloo")
name = f"{os.environ['SLURM_RESTART_COUNT'] if 'SLURM_RESTART_COUNT' in os.environ else 0}.{dist.get_rank()}"
with open(f"{name}.part", "w") as file:
    file.write(f"{os.getpid()} {os.environ['SLURMD_NODENAME']} {dist.get_world_size()} {sys.argv[1]}")
os.rename(f"{name}.part", name)
while True:
    told = stop.clone()
    dist.all_reduce(told)
    if told:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # as it was before, once the loop is left
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.1)
"""
"""In the place of train.py: ranks that agree on when to stop, and wait for each other."""


def test_ranks_of_two_nodes_stop_together_and_a_killed_one_ends_all(cluster, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    stand_in(tmp_path, "python", f'exec {sys.executable} "${{@/*train.py/{tmp_path}/rank.py}}"')
    conf = (cluster.place / "cluster.conf").read_text().replace("[any]", f"python = {tmp_path}/python\n[any]")
    (tmp_path / "cluster.conf").write_text(conf)
    job = cluster.launch(
        "--nodes", "2", "--cluster", str(tmp_path / "cluster.conf"), "seed=3", "hydra.run.dir=run", cwd=tmp_path
    )

    def up(start):
        cluster.hurry(job)
        return all((tmp_path / f"{start}.{rank}").exists() for rank in (0, 1))

    cluster.wait(lambda: up(0), 90)
    first = [(tmp_path / f"0.{rank}").read_text().split() for rank in (0, 1)]
    assert sorted(words[1] for words in first) == ["n1", "n2"]
    assert [words[2:] for words in first] == [["2", "seed=3"]] * 2
    cluster.run("scancel", "--batch", "--signal=USR2", job)
    cluster.wait(lambda: up(1), 90)
    assert "saved; queued again" in log(tmp_path / "run")
    pids = [int((tmp_path / f"1.{rank}").read_text().split()[0]) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    assert cluster.ended(job, 60) == "FAILED"
    assert "code 137" in log(tmp_path / "run")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.skipif(not (CONF / "parallel").is_dir(), reason="train.py trains in one process as yet")
def test_a_run_over_two_nodes_queues_again_and_finishes(cluster, tmp_path):
    run = tmp_path / "run"
    chosen = [*TINY_GPT, "steps=300", "checkpoint.every=50", "log_every=5", "eval_every=300", "parallel=ddp"]
    job = cluster.launch("--nodes", "2", *chosen, "hydra.run.dir=run", cwd=tmp_path)
    cluster.wait(lambda: step(run) > 60, 120)
    cluster.run("scancel", "--batch", "--signal=USR2", job)
    again(cluster, job)
    assert "saved; queued again" in log(run)
    assert cluster.ended(job) == "COMPLETED"
    assert record(run)["status"] == "finished"
    assert len(record(run)["resumed"]) == 1
