"""`stabletrain whatif --slurm`: the script of its array, and what it refuses before anything is written."""

import os
import subprocess

import pytest

from stabletrain.beside.slurm.arms import ArmJob
from stabletrain.beside.slurm.request import Card, read_request
from stabletrain.cli.commands import main
from tests.beside.slurm.given import options
from tests.beside.slurm.stand_ins import stand_in
from tests.runs import ROOT

CONF = """\
[DEFAULT]
time = 8:00:00
[a100]
partition = big
account = lab
gres = gpu:a100:{gpus}
gpus_per_node = 4
cpus_per_gpu = 8
environment = source ~/venv/bin/activate
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Returns what the command asks of the what-if, by the words after the run; `sbatch` is here."""
    (tmp_path / "cluster.conf").write_text(CONF)
    stand_in(tmp_path, "sbatch", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    got = []
    monkeypatch.setattr("stabletrain.beside.whatif.driver.whatif", got.append)

    def asked(*words):
        assert main(["whatif", "runs/a b", *words, "--cluster", str(tmp_path / "cluster.conf")]) == 0
        return got[-1]

    return asked


def test_the_script_is_that_of_launch_sh_with_one_gpu_and_an_arm_per_task(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = asked("--slurm", "--gpu", "a100", "--time", "30", "--jobs", "2", "--max-requeues", "5").slurm
    assert str(made) == "a Slurm array on a100, one task per arm, at most 2 at once"
    home = tmp_path / "runs" / "a b" / "whatif"
    text = made.script(home / "slurm" / "000", [home / "nothing", home / "lr_half"])
    got = options(text)
    assert (got.pop("output"), got.pop("chdir")) == (f'"{home}/slurm/000/%a/slurm.log"', str(tmp_path))
    assert got == {
        "job-name": "stabletrain",
        "partition": "big",
        "account": "lab",
        "nodes": "1",
        "ntasks-per-node": "1",
        "cpus-per-task": "8",
        "gres": "gpu:a100:1",
        "time": "30",
        "open-mode": "append",
        "signal": "B:USR2@120",
        "requeue": "",
        "array": "0-1%2",
    }
    assert "\nsource ~/venv/bin/activate\n" in text
    assert '\n  "$folder" 1 5 120 -- \\\n' in text
    assert options(asked("--slurm", "--gpu", "a100").slurm.script(home, [home] * 3))["array"] == "0-2"


def test_a_task_is_given_its_file_and_the_folder_of_its_arm(tmp_path):
    # job.sh with scripts in place of Slurm's programs and of Python
    stand_in(tmp_path, "python", 'echo "ran $PYTHONPATH|$*"; exit 143')
    stand_in(tmp_path, "srun", 'while [[ $1 == -* ]]; do shift; done; exec "$@"')
    stand_in(tmp_path, "scontrol", "exit 1")
    card = Card("any", python=str(tmp_path / "python"))
    request = read_request(["--gpus-per-node", "1"])
    home = tmp_path / "what if"
    array = home / "slurm" / "000"
    (array / "1").mkdir(parents=True)
    script = ArmJob(card, request).script(array, [home / "nothing", home / "lr_half"])
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    given |= {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given["PYTHONPATH"] = "mine"
    for start in range(2):
        (home / "lr_half").mkdir()
        done = subprocess.run(
            ["bash"], input=script, cwd=tmp_path, env={**os.environ, **given, "SLURM_RESTART_COUNT": str(start)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert f"ran {ROOT}:mine|-m stabletrain.beside.whatif.arm_run {array}/1/arm_run.json\n" in done.stdout, (
            done.stderr
        )
        (home / "lr_half").rmdir()  # an arm without a checkpoint begins anew: nothing of job.sh may lie there
    assert (array / "1" / "slurm.without_step").read_text() == "2\n"


@pytest.mark.slow
def test_the_array_is_named_before_it_runs(shared_run, asked, tmp_path, capsys):
    words = ["--slurm", "--gpu", "a100", "--list", "--arms", "nothing"]
    assert main(["whatif", str(shared_run), *words, "--cluster", str(tmp_path / "cluster.conf")]) == 0
    assert "\nthey run as a Slurm array on a100, one task per arm\n" in capsys.readouterr().out
    assert main(["whatif", str(shared_run), "--list", "--arms", "nothing", "--jobs", "2"]) == 0
    assert "\nthey run 2 arms at once, each in a process of its own\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slurm"], "--slurm: there is no sbatch here; fix: type the command on a login node"),
        (["--slurm", "--gpu", "b200"], "--gpu b200 is not in "),
        (["--slurm", "--time", "1"], "--time 1 is 60 s, not longer than the notice of 120 s"),
        (["--slurm", "--time", "soon"], "--time soon is not a time"),
        (["--slurm", "--list", "--jobs", "0"], "--jobs 0 is below 1"),
        (["--gpu", "a100"], "--gpu a100: the arms run on this machine; fix: add --slurm"),
        (["--max-requeues", "2"], "--max-requeues 2: the arms run on this machine; fix: add --slurm"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_submitted_is_refused_before_anything_is_written(
    shared_run, tmp_path, monkeypatch, capsys, words, said
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["whatif", str(shared_run), *words]) == 2
    assert capsys.readouterr().err.startswith(f"stabletrain: {said}")
    assert not (shared_run / "whatif").exists()


def test_an_installed_package_says_that_a_checkout_is_needed(shared_run, monkeypatch, capsys):
    monkeypatch.setattr("stabletrain.beside.slurm.request.in_checkout", lambda: False)
    assert main(["whatif", str(shared_run), "--slurm"]) == 2
    assert (
        "clone the repository, run `pip install -e .` in it, and run its `stabletrain whatif" in capsys.readouterr().err
    )
