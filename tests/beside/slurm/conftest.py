"""Fixtures: a Slurm cluster, and `slurm/launch.sh` without a cluster."""

import sys

import pytest

from stabletrain.beside.slurm.__main__ import main
from tests.beside.slurm.cluster import cluster  # noqa: F401
from tests.beside.whatif.conftest import shared_run  # noqa: F401

CLUSTER = """\
[DEFAULT]
time = 8:00:00
[any]
[a100]
partition = big
account = lab
qos = long
constraint = "nvlink&ib"
gres = gpu:a100:{gpus}
gpus_per_node = 4
cpus_per_gpu = 8
memory = 64G
notice = 300
modules = cuda/12.8 gcc
environment =
    source ~/venv/bin/activate
    export A="b c"
sbatch =
    --mail-type=FAIL
    --exclude=n[7-9]
srun =
    --container-mounts="/a b:$HOME/c"
    --cpu-bind cores
[h100]
[v100]
environment = source ~/v100/bin/activate
"""


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Runs a command line in an empty folder; returns its exit code, stdout and stderr."""
    (tmp_path / "cluster.conf").write_text(CLUSTER)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)

    def launch(*typed):
        monkeypatch.setattr(sys, "argv", ["launch", "--cluster", "../cluster.conf", *typed])
        code = main()
        return code, *capsys.readouterr()

    return launch
