"""A run on a real Slurm that heals itself: requeued while fixes are tried, it ends as if it had run through."""

import pytest

from stabletrain.tracking.metrics import read_jsonl
from tests.beside.slurm.paced import paced
from tests.beside.slurm.test_cluster import again, log, record
from tests.beside.whatif.test_interrupted import RUN, end, uninterrupted
from tests.once import once

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of the run without Slurm and without interruption."""
    return end(once(tmp_path_factory, "healing_whole", uninterrupted) / "run")


def tried(run):
    """Returns the number of steps in the metrics of all arms."""
    return sum(len(read_jsonl(file)) for file in run.glob("whatif/*/*/metrics.jsonl"))


def healings(run):
    return [line["event"] for line in read_jsonl(run / "events.jsonl") if line["event"] in ("heal", "unhealed")]


def test_a_job_that_queues_again_while_fixes_are_tried_heals_as_if_it_had_run_through(cluster, whole, tmp_path):
    run = tmp_path / "run"
    job = cluster.launch(*RUN, *paced(0.05), cwd=tmp_path)
    cluster.wait(lambda: tried(run) > 20)
    cluster.run("scancel", "--batch", "--signal=USR2", job)  # what --signal=B:USR2@... does
    again(cluster, job)
    assert "saved; queued again (1 of at most 100 times)" in log(run)
    assert (record(run)["status"], healings(run)) == ("preempted", [])
    assert "while fixes were tried after a halt" in record(run)["reason"]
    stopped = tried(run)

    def further():
        cluster.hurry(job)
        return tried(run) > stopped + 20

    cluster.wait(further)
    cluster.run("scontrol", "requeue", job)  # what pre-emption does; between two arms there is nothing to save
    again(cluster, job)
    assert healings(run) == []
    assert cluster.ended(job) == "COMPLETED"
    assert record(run)["status"] == "finished"
    assert healings(run) == ["heal"]
    assert [f"start {number} on" in log(run) for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert end(run) == whole
