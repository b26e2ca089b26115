"""`stabletrain whatif --slurm` on a real two-node Slurm: its arms have the bits of arms that run in one process."""

import json
import os
import shutil
import signal
import subprocess

import pytest

from stabletrain.tracking.metrics import read_jsonl
from tests import forkserver
from tests.beside.slurm.stand_ins import stand_in
from tests.beside.whatif.given import trained
from tests.beside.whatif.test_rounds import losses
from tests.once import once
from tests.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(900)]

LONG = "guard.max_rollbacks=50,faults=none"
"""An arm that trains for long enough to be disturbed. The arm `nothing` halts as the run did."""

ARMS = ("nothing", "guard.max_rollbacks-50-faults-none")
"""The arms' folders: the numbers of their tasks."""

TYPED = ["--arms", "nothing", LONG, "--past", "600", "--steps", "0"]


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    """A run of many steps that the guard has halted at the first trouble."""
    return once(tmp_path_factory, "halted", lambda folder: trained(folder, "steps=3000", "guard.max_rollbacks=0"))


@pytest.fixture(scope="module")
def whole(halted, tmp_path_factory):
    """The folder of a what-if whose arms have run in one process."""

    def try_arms(place):
        run = shutil.copytree(halted, place / "run")
        done = finished(started(run, os.environ, *TYPED))
        assert done[0] == 0, done

    return folder_of(once(tmp_path_factory, "halted_whole", try_arms) / "run")


@pytest.fixture
def run(halted, cluster, tmp_path):
    """A copy of the run; what the arms print appears in the logs of a test that fails."""
    cluster.home = tmp_path
    return shutil.copytree(halted, tmp_path / "run")


def folder_of(run):
    [folder] = (run / "whatif").glob("step-*")
    return folder


def started(run, environment, *typed):
    """Starts `stabletrain whatif` in the background, in a group of its own as a shell does."""
    words = [forkserver.python(), "-m", "stabletrain.cli.commands", "whatif", str(run), *typed]
    variables = {**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        words, cwd=run.parent, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def finished(process, timeout=400):
    """Waits for a command; returns its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"not within {timeout} s\n{out}\n{err}")
    return process.returncode, out, err


def check_code(expected, code, out, err, cluster):
    """Fails the test with all that was printed and logged, if a command ended with another exit code."""
    if code != expected:
        pytest.fail(f"exit code {code}, not {expected}\n{out}\n{err}\n{cluster.logs()}")


def submitted(cluster, run, *typed, conf=None):
    conf = conf or cluster.place / "cluster.conf"
    words = [*TYPED, "--slurm", "--gpu", "a100", "--cluster", str(conf), *typed]
    return started(run, cluster.environment, *words)


def step(run):
    """Returns the last step of the long arm."""
    files = list((run / "whatif").glob(f"step-*/{ARMS[1]}/metrics.jsonl"))
    return max((line["step"] for file in files for line in read_jsonl(file)), default=0)


def trains(cluster, run, process):
    """Waits until the long arm trains; returns the number of the array."""

    def look():
        assert process.poll() is None, process.communicate()
        return step(run) > 120

    cluster.wait(look)
    [record] = folder_of(run).glob("slurm/*/array.json")
    return json.loads(record.read_text())["job"]


def same(run, whole):
    """Asserts that all arms have the losses of those that ran in one process."""
    for name in ARMS:
        mine = losses(folder_of(run) / name)
        assert mine == losses(whole / name)
        assert mine
    found, wanted = (json.loads((folder / "whatif.json").read_text()) for folder in (folder_of(run), whole))
    assert [(each["arm"], each["step"]) for each in found["arms"]] == [
        (each["arm"], each["step"]) for each in wanted["arms"]
    ]


def log(run, task, array="000"):
    return (folder_of(run) / "slurm" / array / str(task) / "slurm.log").read_text()


def test_an_array_gives_the_bits_of_one_process(cluster, run, whole):
    code, out, err = finished(submitted(cluster, run, "--jobs", "1"))
    check_code(0, code, out, err, cluster)
    same(run, whole)
    assert "how      as a Slurm array on a100, one task per arm, at most 1 at once\n" in out
    assert f"array    {log(run, 0).split(' job ')[1].partition('_')[0]}, 2 tasks, logs " in out
    assert "#SBATCH --array=0-1%1\n" in (folder_of(run) / "slurm" / "000" / "slurm.sh").read_text()
    assert "start 1 on n" in log(run, 1)
    assert not list(folder_of(run).glob("slurm/*/array.json"))


def test_a_task_that_is_preempted_goes_on(cluster, run, whole):
    process = submitted(cluster, run)
    job = trains(cluster, run, process)
    cluster.run("scancel", "--batch", "--signal=USR2", f"{job}_1")
    cluster.wait(lambda: "saved; queued again (1 of at most 100 times)" in log(run, 1))

    def over():
        cluster.hurry(f"{job}_1")
        return process.poll() is not None

    cluster.wait(over)
    code, out, err = finished(process)
    check_code(0, code, out, err, cluster)
    assert "start 2 on n" in log(run, 1)
    same(run, whole)


def test_ctrl_c_cancels_the_array_and_the_same_command_goes_on(cluster, run, whole):
    process = submitted(cluster, run)
    job = trains(cluster, run, process)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = finished(process)
    check_code(75, code, out, err, cluster)
    assert f"array    {job} is cancelled: waits until the arms have saved their states\n" in out
    assert "the what-if was stopped, its states are saved; fix: type it again" in err
    assert cluster.state(job) in ("CANCELLED", "CANCELLED COMPLETED")
    assert json.loads((folder_of(run) / ARMS[1] / "run.json").read_text())["status"] == "preempted"
    stopped = step(run)
    assert stopped < 600
    code, out, err = finished(submitted(cluster, run))
    check_code(0, code, out, err, cluster)
    assert json.loads((folder_of(run) / ARMS[1] / "run.json").read_text())["resumed"]
    same(run, whole)


def test_an_array_that_outlives_its_command_is_found(cluster, run, whole):
    process = submitted(cluster, run)
    job = trains(cluster, run, process)
    cluster.run("scontrol", "suspend", f"{job}_1")  # until both commands have seen it, however slowly they start
    cluster.wait(lambda: cluster.state(f"{job}_0") == "COMPLETED")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    code, out, err = finished(started(run, cluster.environment, *TYPED))
    assert (code, f"array {job} still runs" in err) == (2, True), (out, err)
    process = submitted(cluster, run)
    found = next((line for line in process.stdout if "still runs" in line), "")
    assert found == f"array    {job} still runs 1 of the arms: waits for it\n", (*finished(process), cluster.logs())
    cluster.run("scontrol", "resume", f"{job}_1")
    code, out, err = finished(process)
    check_code(0, code, out, err, cluster)
    assert [each.name for each in folder_of(run).glob("slurm/*")] == ["000"]
    same(run, whole)


def test_an_arm_whose_task_fails_is_told(cluster, run, tmp_path):
    wrong = f'[[ $SLURM_ARRAY_TASK_ID == 1 ]] && echo "no torch here" && exit 9; exec {cluster.python} "$@"'
    stand_in(tmp_path, "broken", wrong)
    conf = tmp_path / "cluster.conf"
    conf.write_text((cluster.place / "cluster.conf").read_text().replace(str(cluster.python), f"{tmp_path}/broken"))
    code, out, err = finished(submitted(cluster, run, conf=conf))
    assert code == 1, (out, err, cluster.logs())
    place = folder_of(run) / "slurm" / "000" / "1" / "slurm.log"
    assert f"the arm {LONG} ended as FAILED, its log is {place}" in err
    assert "no torch here" in log(run, 1)
    assert "nothing" in out.splitlines()[-1] or "\nnothing" in out, "the other arm has gone on"
