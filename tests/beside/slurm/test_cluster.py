"""Jobs on a real two-node Slurm: a requeued job ends bit-identical to an uninterrupted one; other jobs end for good."""

import hashlib
import json
import os
import signal
import sys

import pytest
from safetensors import safe_open

from stabletrain.beside.comparison import frame
from stabletrain.beside.status import standings
from stabletrain.tracking.metrics import read_jsonl
from tests.beside.slurm.paced import paced
from tests.beside.slurm.stand_ins import stand_in
from tests.once import once
from tests.runs import TINY_GPT, command

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(900)]

SAME = ["run", "status", "steps", "val_loss", "best_val_loss", "skips", "settings.optimizer.lr"]
"""Columns of a comparison that are equal for two runs of the same sweep."""

LONG = [*TINY_GPT, "steps=500", "checkpoint.every=50", "log_every=5", "eval_every=500"]
"""A run that is stopped between its steps."""

SLOWLY = [*LONG, *paced(0.02)]
"""The same run, with ten seconds of steps at least."""

ENDLESS = [*TINY_GPT, "steps=1000000", "warmup.steps=10", "eval_every=1000000", "log_every=5"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of LONG, trained without interruption."""

    def train(place):
        place.mkdir()
        done = command(*LONG, "hydra.run.dir=run", cwd=place)
        assert done.returncode == 0, done.stderr

    return weights(once(tmp_path_factory, "slurm_whole", train) / "run")


def weights(folder):
    """Returns the newest checkpoint's name and a hash of each weight; for a sharded run, of each rank's shard."""
    newest, hashes = max((folder / "checkpoints").glob("step-*")), {}
    for file in [*newest.glob("model.safetensors"), *newest.glob("model/*.safetensors")]:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                bits = opened.get_tensor(name).numpy().tobytes()
                hashes[f"{file.name} {name}"] = hashlib.sha256(bits).hexdigest()
    assert hashes
    return newest.name, hashes


def record(folder):
    return json.loads((folder / "run.json").read_text())


def log(folder):
    return (folder / "slurm.log").read_text()


def step(folder):
    """Returns the last step in a run's metrics."""
    file = folder / "metrics.jsonl"
    return max((line["step"] for line in read_jsonl(file)), default=0) if file.exists() else 0


def again(cluster, job):
    """Waits until a job is requeued."""
    cluster.wait(lambda: cluster.state(job) == "PENDING")


def test_a_job_that_queues_again_ends_as_if_it_had_run_through(cluster, whole, tmp_path):
    run = tmp_path / "run, with a [name] of 100%"
    job = cluster.launch(*SLOWLY, f"hydra.run.dir='{run.name}'", cwd=tmp_path)
    cluster.wait(lambda: step(run) > 100)
    cluster.run("scancel", "--batch", "--signal=USR2", job)  # what --signal=B:USR2@... does
    again(cluster, job)
    assert "told to stop" in log(run)
    assert "saved; queued again (1 of at most 100 times)" in log(run)
    assert record(run)["status"] == "preempted"
    stopped = step(run)

    def further():
        cluster.hurry(job)
        return step(run) > stopped + 50

    cluster.wait(further)
    cluster.run("scontrol", "requeue", job)  # what pre-emption does, with KillWait seconds to save
    assert cluster.ended(job) == "COMPLETED"
    assert weights(run) == whole
    assert [f"start {number} on" in log(run) for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert record(run)["status"] == "finished"
    assert len(record(run)["resumed"]) == 2


def test_a_killed_rank_queues_again_from_its_last_checkpoint(cluster, whole, tmp_path):
    run = tmp_path / "run"
    job = cluster.launch(*SLOWLY, "hydra.run.dir=run", cwd=tmp_path)
    cluster.wait(lambda: step(run) > 100)
    os.kill(record(run)["pid"], signal.SIGKILL)
    again(cluster, job)
    assert "killed (code 137) after step-" in log(run)
    assert cluster.ended(job) == "COMPLETED"
    assert weights(run) == whole


def test_a_job_whose_node_fails_goes_on_elsewhere(cluster, whole, tmp_path):
    run = tmp_path / "run"
    job = cluster.launch(*SLOWLY, "hydra.run.dir=run", cwd=tmp_path)
    cluster.wait(lambda: step(run) > 100)
    node = cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    try:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        assert cluster.ended(job) == "COMPLETED"
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert weights(run) == whole
    other = {"n1": "n2", "n2": "n1"}[node]
    assert f"start 1 on {node}" in log(run)
    assert f"start 2 on {other}" in log(run)


def test_before_its_time_is_up_a_job_saves_and_keeps_to_max_requeues(cluster, tmp_path):
    run, conf = tmp_path / "run", tmp_path / "cluster.conf"
    conf.write_text((cluster.place / "cluster.conf").read_text().replace("notice = 60", "notice = 100"))
    words = ["--cluster", str(conf), "--time", "2", "--max-requeues", "0"]
    job = cluster.launch(*words, *ENDLESS, "hydra.run.dir=run", cwd=tmp_path)
    assert cluster.ended(job) == "FAILED"
    assert "told to stop" in log(run)
    assert "saved; not queued again, this was start 1 and --max-requeues is 0" in log(run)
    assert record(run)["status"] == "preempted"
    assert record(run)["reason"].startswith("SIGUSR2")
    assert weights(run)


def test_a_cancelled_job_is_over_and_its_state_saved(cluster, tmp_path):
    run, conf = tmp_path / "run", tmp_path / "cluster.conf"
    in_forks = (cluster.place / "cluster.conf").read_text()
    conf.write_text(in_forks.replace(f"python = {cluster.python}\n", ""))  # starts Python anew, as for users
    job = cluster.launch("--cluster", str(conf), *ENDLESS, "hydra.run.dir=run", cwd=tmp_path)
    cluster.wait(lambda: step(run) > 5)
    cluster.run("scancel", job)
    cluster.wait(lambda: "ended by Slurm" in log(run))
    assert cluster.ended(job) == "CANCELLED"
    assert "queued again" not in log(run)
    assert record(run)["status"] == "preempted"
    assert weights(run)


def test_a_sweep_is_an_array_in_the_folder_that_python_would_have_made(cluster, tmp_path):
    (tmp_path / "[a], 'b' \"c\" $HOME {d} #e.txt").write_text("some text to train on. " * 100)
    path = "data.path='[a], \\'b\\' \"c\" $HOME {d} #e.txt'"
    sweep = [*TINY_GPT, "-m", "data=text", path, "optimizer.lr=1e-3,1e-2", "steps=4"]
    here = command(*sweep, "hydra.sweep.dir=here", cwd=tmp_path)
    assert here.returncode == 0, here.stderr
    job = cluster.launch("--parallel-jobs", "2", *sweep, "hydra.sweep.dir=there", cwd=tmp_path)
    assert cluster.ended(job) == "COMPLETED"
    assert sorted(file.parent.name for file in (tmp_path / "there").glob("*/run.json")) == ["0", "1"]
    for number in range(2):
        mine, wanted = (record(tmp_path / place / str(number)) for place in ("there", "here"))
        assert [o for o in mine["overrides"] if not o.startswith("resume=")] == wanted["overrides"]
        assert weights(tmp_path / "there" / str(number)) == weights(tmp_path / "here" / str(number))
    assert "multirun.yaml" in os.listdir(tmp_path / "there")
    compared = [frame(tmp_path / place)[SAME].to_dict("list") for place in ("here", "there")]
    assert compared[0] == compared[1]
    assert compared[0]["settings.optimizer.lr"] == [1e-3, 1e-2]


SHORT_RUN = """\
import json, os, pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(1))  # before there is a file for which the test waits
folder = pathlib.Path(next(word for word in sys.argv if word.startswith("hydra.run.dir=")).split("'")[1])
record = {"id": folder.name, "status": "running", "overrides": sys.argv[2:3], "choices": {}, "final": {}}
(folder / "run.json").write_text(json.dumps(record))
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": time.time()}) + "\\n")
print("trains", folder.name, flush=True)
while not asked:
    time.sleep(0.1)
(folder / "run.json").write_text(json.dumps({**record, "status": "preempted"}))
sys.exit(75)
"""
"""Stands for train.py, without its imports: takes one step, and waits until it is told to stop."""


def test_all_runs_that_share_a_task_are_told_to_stop(cluster, tmp_path):
    sweep, conf = tmp_path / "sweep", tmp_path / "cluster.conf"
    (tmp_path / "short_run.py").write_text(SHORT_RUN)
    words = f'[[ $1 != *train.py ]] || exec {sys.executable} {tmp_path}/short_run.py "$@"'
    stand_in(tmp_path, "python", f'{words}\nexec {cluster.python} "$@"')
    conf.write_text((cluster.place / "cluster.conf").read_text().replace(str(cluster.python), f"{tmp_path}/python"))
    typed = ["--cluster", str(conf), "--pack", "2", "-m", "seed=0,1", "hydra.sweep.dir=sweep"]
    job = cluster.launch(*typed, cwd=tmp_path)
    cluster.wait(lambda: all((sweep / number / "metrics.jsonl").exists() for number in "01"))
    assert [(each.run, each.state) for each in standings_of(cluster, sweep)] == [("0", "running"), ("1", "running")]
    cluster.run("scancel", "--batch", "--signal=USR2", f"{job}_0")
    again(cluster, f"{job}_0")
    for number, each in zip("01", standings_of(cluster, sweep), strict=True):
        assert (each.state, each.note, each.job) == ("preempted", f"job {job}_0 is queued again", f"{job}_0")
        assert f"trains {number}\n" in log(sweep / number)
    assert "trains" not in log(sweep / "1").replace("trains 1\n", "")
    assert "sweep/1: code 75" in log(sweep / "0")
    cluster.run("scancel", job)


def standings_of(cluster, sweep):
    """Returns where the runs of a sweep stand, with the queue of the cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        return standings(sweep)


OLD_CARD = """\
[[ $1 != *train.py ]] || [[ $SLURMD_NODENAME != $(cat {bad} 2>/dev/null || tee {bad} <<<$SLURMD_NODENAME) ]] || {{
  echo "stabletrain: the card of $SLURMD_NODENAME is too old" >&2
  exit 4
}}
exec {python} "$@"
"""
"""Stands for Python on a cluster where one node, the first that is asked, has a card that no run can use."""


def test_a_node_with_another_card_is_left_and_avoided(cluster, tmp_path):
    bad, conf = tmp_path / "bad", tmp_path / "cluster.conf"
    stand_in(tmp_path, "python", OLD_CARD.format(bad=bad, python=cluster.python))
    conf.write_text((cluster.place / "cluster.conf").read_text().replace(str(cluster.python), f"{tmp_path}/python"))
    chosen = ["--parallel-jobs", "1", "-m", "seed=0,1", *TINY_GPT, "steps=2", "hydra.sweep.dir=run"]
    job = cluster.launch("--cluster", str(conf), *chosen, cwd=tmp_path)
    assert cluster.ended(job) == "COMPLETED"
    first = tmp_path / "run" / "0"
    old = bad.read_text().strip()
    assert f"the card of {old} cannot do what the run needs, as the message above says; it avoids {old} from" in log(
        first
    )
    assert f"start 2 on {({'n1': 'n2', 'n2': 'n1'})[old]}" in log(first)
    assert "start 3" not in log(first)
    assert f"ExcNodeList={old} " in cluster.run("scontrol", "show", "job", "--oneliner", f"{job}_0")
    assert record(first)["status"] == "finished"
