"""`slurm/launch.sh` without Slurm: the scripts that it would submit."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stabletrain.cli.slurm.__main__ import main
from stabletrain.cli.slurm.request import seconds
from stabletrain.cli.slurm.script import ranges
from tests.cli.slurm.stand_ins import stand_in


def options(script):
    """Returns the `#SBATCH` options of a script, name to value."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_clusters_own_file_is_whole(launch, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch", "--dry-run", "-m", "--gpu", "any,a100,h100,h200,v100", "seed=0,1"])
    assert main() == 0
    out, _ = capsys.readouterr()
    assert [line for line in out.splitlines() if "--gres" in line] == [
        f"#SBATCH --gres=gpu:{card}1" for card in ("", "a100:", "h100:", "h200:", "v100:")
    ]


def test_the_file_and_the_command_line_make_slurms_options(launch):
    code, out, _ = launch("--dry-run", "--gpu", "a100", "--nodes", "2", "--name", "my job", "--time", "1-0", "seed=3")
    assert code == 0
    asked = options(out)
    assert asked.pop("chdir") == os.getcwd()
    assert asked.pop("output").endswith("/slurm.log")
    assert asked == {
        "job-name": '"my job"',
        "partition": "big",
        "account": "lab",
        "qos": "long",
        "constraint": '"\\"nvlink&ib\\""',
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "32",
        "mem": "64G",
        "gres": "gpu:a100:4",
        "time": "1-0",
        "open-mode": "append",
        "signal": "B:USR2@300",
        "requeue": "",
        "mail-type": "FAIL",
        "exclude": "n[7-9]",
    }
    assert '\nmodule load cuda/12.8 gcc\nsource ~/venv/bin/activate\nexport A="b c"\n' in out
    assert subprocess.run(["bash", "-n"], input=out, text=True, timeout=10).returncode == 0
    told = options(
        launch("--dry-run", "--gpu", "a100", "--partition", "p", "--account", "a", "--gpus-per-node", "1")[1]
    )
    assert [told[name] for name in ("partition", "account", "gres", "time")] == ["p", "a", "gpu:a100:1", "8:00:00"]
    assert set(options(launch("--dry-run")[1])) == {
        "job-name", "nodes", "ntasks-per-node", "time", "chdir", "output", "open-mode", "signal", "requeue",
    }  # fmt: skip


def test_a_dry_run_touches_nothing(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch("--dry-run", "-m", "seed=0,1")[0] == 0
    assert not os.listdir()


def test_without_slurm_it_says_so(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = launch()
    assert code == 2
    assert "there is no sbatch here" in err
    assert not os.listdir()


def test_a_refusal_by_sbatch_is_reported(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition specified: big' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, _, err = launch("--gpu", "a100")
    assert code == 1
    assert err.startswith("slurm/launch.sh: sbatch refused the job on a100: invalid partition specified: big")


def test_a_v100_is_told_of_its_preset_unless_it_has_chosen(launch):
    hint = "v100 trains in fp16: stability=v100 is the preset"
    assert hint in launch("--dry-run", "--gpu", "v100")[2]
    assert hint in launch("--dry-run", "-m", "--gpu", "a100,v100", "seed=0,1")[2]
    for typed in ("stability=v100", "precision=fp32", "experiment=resnet_digits"):
        assert launch("--dry-run", "--gpu", "v100", typed)[1:][1] == ""
    assert launch("--dry-run", "--gpu", "a100", "precision=bf16")[2] == ""


def test_cards_cross_the_sweep(launch, tmp_path, monkeypatch):
    submitted = tmp_path / "submitted"
    stand_in(tmp_path, "sbatch", f'echo "$@" >> {submitted}; echo 7')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sweep = ["--gpu", "a100,v100", "--parallel-jobs", "3", "-m", "seed=0,1", "hydra.sweep.dir=s"]
    assert launch(*sweep)[0] == 0
    assert submitted.read_text().split() == [
        w for card in ("a100", "v100") for w in ("--parsable", f"s/{card}/slurm.sh")
    ]
    for card in ("a100", "v100"):
        script = Path(f"s/{card}/slurm.sh").read_text()
        assert options(script)["array"] == "0-1%3"
        assert options(script)["output"] == f"{os.getcwd()}/s/{card}/%a/slurm.log"
        assert sorted(os.listdir(f"s/{card}")) == ["0", "1", "multirun.yaml", "slurm.sh"]


def test_a_sweep_in_an_experiments_file_is_expanded_as_hydra_does(launch, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    params = "hydra:\n  sweeper:\n    params:\n      seed: range(0,3)\n      optimizer.lr: 1e-3,1e-2\n"
    (tmp_path / "mine" / "experiment" / "grid.yaml").write_text(f"# @package _global_\n{params}")
    code, out, _ = launch(
        "--dry-run", "-m", "--config-dir", "../mine", "experiment=grid", "optimizer.lr=5e-1", "steps=9"
    )
    assert code == 0
    runs = [
        shlex.split(line.strip()[len("0) overrides=(") : -len(") ;;")])
        for line in out.splitlines()
        if ") overrides" in line
    ]
    assert runs == [[f"seed={seed}", "optimizer.lr=0.5", "experiment=grid", "steps=9"] for seed in range(3)]
    assert "train.py --config-dir ../mine" in out


@pytest.mark.slow
def test_resume_finds_the_same_command_and_a_taken_folder_is_refused(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "echo 7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch("-m", "seed=0,1")[0] == 0
    [folder] = [f"multirun/{day}/{time}" for day in os.listdir("multirun") for time in os.listdir(f"multirun/{day}")]
    assert f"folder={folder}/" in launch("--dry-run", "-m", "seed=0,1", "resume=auto")[1]
    assert f"folder={folder}/" not in launch("--dry-run", "-m", "seed=0,1,2", "resume=auto")[1]
    Path(folder, "0", "run.json").write_text('{"status": "finished"}')
    left = launch("--dry-run", "-m", "seed=0,1", "resume=auto")[1]
    assert options(left)["array"] == "1"
    assert "0) overrides" not in left
    both = launch("--dry-run", "-m", f"resume={folder}", "steps=500")[1]
    assert f"folder={folder}/" in both
    assert "1) overrides=(seed=1 steps=500)" in both
    run = {"overrides": ["seed=5"], "options": []}
    os.makedirs("mine/checkpoints")
    with open("mine/run.json", "w") as file:
        json.dump(run, file)
    assert "overrides=(seed=5 steps=7)" in launch("--dry-run", "resume=mine", "steps=7")[1]
    code, _, err = launch("hydra.run.dir=mine")
    assert code == 2
    assert "mine already holds a run: continue it with resume=auto, or choose another hydra.run.dir" in err


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [("7", 420), ("7:30", 450), ("2:00:01", 7201), ("1-0", 86400), ("1-2:03", 93780), ("1-2:03:04", 93784)],
)
def test_times_are_slurms(typed, wanted):
    assert seconds(typed) == wanted


def test_numbers_of_tasks_are_written_short():
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2,4,6-7"
    assert ranges([3]) == "3"


def test_help_names_every_option(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    out, _ = capsys.readouterr()
    named = ["--gpu", "--nodes", "--gpus-per-node", "--time", "--partition", "--account", "--name", "--dry-run"]
    assert all(f"  {name} " in out for name in [*named, "--parallel-jobs", "--max-requeues", "-m,"])
