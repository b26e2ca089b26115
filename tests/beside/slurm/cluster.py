"""A two-node Slurm cluster on this machine, with its own key, sockets, ports and folders."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests import forkserver
from tests.runs import ROOT

PATIENCE = 400
"""Seconds that anything may take before it counts as hanging, on a machine that is busy with other tests."""

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={first_job}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
ReturnToService=0
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=2,batch_sched_delay=1,defer
SlurmdParameters=config_overrides
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/slurmd.%n
SlurmdPidFile={place}/slurmd.%n.pid
SlurmdLogFile={place}/slurmd.%n.log
SlurmctldPidFile={place}/slurmctld.pid
SlurmctldLogFile={place}/slurmctld.log
KillWait=15
UnkillableStepTimeout=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=a100 Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=v100 Nodes=n1,n2 MaxTime=INFINITE State=UP
"""

CLUSTER_CONF = """\
[DEFAULT]
gres =
cpus_per_gpu = 1
notice = 60
python = {python}
environment = export OMP_NUM_THREADS=1
srun =
    --unbuffered
    --open-mode append
[any]
[a100]
partition = a100
[v100]
partition = v100
"""


def missing() -> str:
    """Returns why no cluster can run here; empty if it can."""
    if absent := [name for name in PROGRAMS if shutil.which(name, path=search()) is None]:
        return f"Slurm is not installed here, {absent[0]} is missing: apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "a Slurm cluster for the tests needs root, as which its daemons run jobs"


def search() -> str:
    """Returns PATH plus the folders of daemons."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


PYTHON = """\
#!/usr/bin/env bash
case $1 in
*/ranks.py | */pack.py) exec {anew} "$@" ;;
*) exec {forked} "$@" ;;
esac
"""
"""Python on the nodes: in forks, except what starts further processes, which Slurm must know as those of the job."""


class Cluster:
    """A running cluster; jobs inherit the environment of this process.

    Attributes:
        place: the cluster's folder.
        environment: the environment of commands that talk to the cluster.
        home: the folder from which a job was last launched.
        python: the interpreter on the nodes, as `cluster.conf` in the cluster's folder has it.
    """

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # the length of a socket's path is limited
        self.place.chmod(0o755)
        self.home = self.place
        self.environment = {**os.environ, "SLURM_CONF": str(self.place / "slurm.conf"), "PATH": search()}
        self.environment["PYTHON"] = forkserver.python()  # of slurm/launch.sh
        self.environment["PYTHON_EXEC"] = forkserver.python()  # of the ranks that torchrun starts
        self.python = self.place / "python"
        self.python.write_text(PYTHON.format(anew=sys.executable, forked=forkserver.python()))
        self.python.chmod(0o755)
        for name in [name for name in self.environment if name.startswith(("SBATCH_", "SLURM_JOB", "PYTEST"))]:
            del self.environment[name]
        host = socket.gethostname().partition(".")[0]
        # Ranks meet at a port that follows from the job's number, so clusters side by side have other numbers.
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        first_job = 3000 * worker + random.SystemRandom().randrange(1, 2900)
        values = {"host": host, "place": self.place, "ports": free_ports(3), "first_job": first_job}
        (self.place / "slurm.conf").write_text(SLURM_CONF.format(**values))
        (self.place / "cluster.conf").write_text(CLUSTER_CONF.format(python=self.python))
        (self.place / "state").mkdir()

    def start(self) -> None:
        """Starts the daemons and waits until both nodes are idle."""
        key = self.place / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed"}
        files = [f"--{option}={self.place / name}" for option, name in names.items()]
        self.run("munged", "--force", f"--key-file={key}", *files)
        self.run("slurmctld", "-c")
        for node in ("n1", "n2"):
            self.run("slurmd", "-N", node)
        self.wait(lambda: self.run("sinfo", "-h", "-N", "-p", "a100", "-o", "%T").split() == ["idle", "idle"])

    def stop(self) -> None:
        """Cancels every job, stops the daemons by their pid files, and removes the folder."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, capture_output=True, timeout=30)
        end = time.monotonic() + 20
        while (
            time.monotonic() < end
            and subprocess.run(["squeue", "-h"], env=self.environment, capture_output=True, timeout=30).stdout
        ):
            time.sleep(0.5)
        for name in ("slurmd.n1", "slurmd.n2", "slurmctld", "munged"):
            stop(self.place / f"{name}.pid")
        shutil.rmtree(self.place, ignore_errors=True)

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 60) -> str:
        """Returns what a command prints; fails the test if the command fails."""
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def launch(self, *arguments: str, cwd: Path) -> str:
        """Submits with `slurm/launch.sh`; returns the number of its first job."""
        self.home = cwd
        script = str(ROOT / "slurm" / "launch.sh")
        said = self.run(script, "--cluster", str(self.place / "cluster.conf"), *arguments, cwd=cwd)
        return said.split()[1]

    def state(self, job: str) -> str:
        """Returns a job's state as Slurm names it (RUNNING ...); for an array, its tasks' distinct states, sorted."""
        lines = self.run("scontrol", "show", "job", "--oneliner", job).splitlines()
        return " ".join(sorted({line.partition("JobState=")[2].split()[0] for line in lines}))

    def ended(self, job: str) -> str:
        """Waits until a job has ended, starting a requeued job at once; returns its state."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

        def look() -> bool:
            self.hurry(job)
            return set(self.state(job).split()) <= over

        self.wait(look)
        return self.state(job)

    def hurry(self, job: str) -> None:
        """Lets a requeued job start now instead of after Slurm's delay."""
        if "Reason=BeginTime" in self.run("scontrol", "show", "job", job):
            subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=self.environment, timeout=30)

    def wait(self, until: Callable[[], object]) -> None:
        """Waits until the condition holds; after `PATIENCE` seconds, fails with the logs of the daemons and jobs."""
        end = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < end, f"not within {PATIENCE} s\n{self.logs()}"
            time.sleep(0.3)

    def logs(self) -> str:
        """Returns the queue and the last lines of the daemons' logs and of the last-launched jobs' logs."""
        queue = subprocess.run(["squeue"], env=self.environment, capture_output=True, text=True, timeout=30).stdout
        logs = [*sorted(self.place.glob("*.log")), *sorted(self.home.rglob("slurm.log"))]
        return "\n".join([queue, *(tail(file) for file in logs)])


def tail(file: Path, lines: int = 25) -> str:
    """Returns the last lines of a log."""
    return f"--- {file}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-lines:])


def stop(pid_file: Path) -> None:
    """Terminates the process of a pid file and waits until it has exited."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        return
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


def free_ports(count: int) -> Sequence[int]:
    """Returns ports that no process listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A two-node cluster; skips with the reason if none can run here."""
    if reason := missing():
        pytest.skip(reason)
    made = Cluster()
    try:
        made.start()
        yield made
    finally:
        made.stop()
