"""What is asked of `slurm/launch.sh`, and what it refuses: one line, before anything queues."""

import os
import sys

import pytest

from stabletrain.beside.slurm.__main__ import main
from stabletrain.beside.slurm.request import seconds

MISTAKES = {
    "card": (["--gpu", "b200"], "--gpu b200 is not in ../cluster.conf, which has any, a100, h100, v100"),
    "cards": (["--gpu", "a100,h100"], "--gpu a100,h100: several cards are a sweep over them: add -m"),
    "twice": (["-m", "--gpu", "a100,a100"], "--gpu a100,a100: name each card once"),
    "nodes": (["--nodes", "0"], "--nodes: '0' is not a whole number of at least 1"),
    "gpus": (["--gpus-per-node", "two"], "--gpus-per-node: 'two' is not a whole number of at least 1"),
    "time": (["--time", "soon"], "--time soon is not a time: use minutes"),
    "zero": (["--time", "0:00"], "--time 0:00 is zero: leave --time out"),
    "short": (["--gpu", "a100", "--time", "5"], "--time 5 is 300 s, not longer than the notice of 300 s"),
    "parallel": (["--parallel-jobs", "2"], "--parallel-jobs 2: without -m there is one job"),
    "requeues": (["--max-requeues", "-1"], "--max-requeues: '-1' is not a whole number of at least 0"),
    "unknown": (["--gpus", "2"], "unrecognized arguments: --gpus"),
    "name": (["--name", "a\nb"], "'a\\nb' has a line break in it"),
    "folder": (['hydra.run.dir="it\'s"'], 'has "\'" in its name: choose one without'),
    "key": (["optimizer.lrr=1"], "optimizer.lrr: there is no such key; did you mean optimizer.lr?"),
    "option": (["model=gpt3"], "model=gpt3: there is no such option"),
    "bound": (["batch_size=0"], "batch_size=0 is below 1"),
    "several": (["seed=0,1"], "seed=0,1: these are several values: to sweep over them, add -m"),
    "run": (["-m", "steps=10,0,20"], "run 1 of 3 (steps=0): steps=0 is below 1"),
    "subdir": (["-m", "hydra.sweep.subdir=x", "seed=0,1"], "hydra.sweep.subdir: the tasks of an array"),
    "resume": (["resume=nowhere"], "resume=nowhere: there is no nowhere/run.json"),
    "grammar": (["data.path=[a"], "the command line cannot be read"),
    "bf16": (["--gpu", "v100", "precision=bf16"], "precision=bf16 on --gpu v100, which has neither bf16 nor TF32"),
    "tf32": (["--gpu", "v100", "precision=tf32"], "precision=tf32 on --gpu v100"),
    "fp8": (["--gpu", "v100", "precision=fp8"], "precision=fp8 on --gpu v100, which has neither bf16 nor TF32"),
    "narrow": (["--gpu", "v100", "precision=bf16_params"], "use stability=v100 for a GPT"),
    "batch": (
        ["--nodes", "2", "--gpus-per-node", "4", "batch_size=12", "grad_accum_steps=2"],
        "--gpu any with 8 processes (--nodes x --gpus-per-node): batch_size=12 does not divide among 8 ranks x "
        "grad_accum_steps=2; fix: batch_size=16",
    ),
    "batch_of_a_card": (
        ["--gpu", "v100,a100", "-m", "batch_size=8,6", "seed=0,1"],  # a100 has 4 of them on a node in cluster.conf
        "run 2 of 4 (batch_size=6 seed=0): --gpu a100 with 4 processes (--nodes x --gpus-per-node): batch_size=6 does "
        "not divide among 4 ranks x grad_accum_steps=1; fix: batch_size=4 or 8",
    ),
    "alone": (
        ["parallel=fsdp"],
        "--gpu any with 1 process (--nodes x --gpus-per-node): parallel=fsdp needs several processes",
    ),
    "swept": (
        ["--gpu", "a100,v100", "-m", "precision=auto,bf16", "seed=0,1"],
        "run 2 of 4 (precision=bf16 seed=0): precision=bf16 on --gpu v100",
    ),
    "experiment": (["--gpu", "v100", "--config-dir", "../mine", "experiment=half"], "precision=bf16 on --gpu v100"),
}


@pytest.mark.slow(unless=lambda name: name not in ("batch_of_a_card", "swept"))
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_left(launch, tmp_path, name):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /precision: bf16\n"
    (tmp_path / "mine" / "experiment" / "half.yaml").write_text(text)
    typed, message = MISTAKES[name]
    code, out, err = launch(*typed)
    assert code == 2
    assert out == ""
    assert err.startswith("slurm/launch.sh: ")
    assert message in err
    assert len(err.splitlines()) <= 2  # Hydra's list of options, and its hint on quoting, are a second
    assert not os.listdir()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[any]\npartitoin = x\n", "[any] partitoin: there is no such key; did you mean partition?"),
        ("[any]\nnotice = 5\n", "[any] notice = 5 is not a whole number of at least 30"),
        ("[any]\ntime = later\n", "later is not a time"),
        ("[any]\nsrun = cpu-bind=cores\n", "[any] srun: cpu-bind=cores is not one option: write one per line"),
        ("[any]\nsrun =\n  -l\n  --ntasks-per=2\n", "[any] srun: --ntasks-per=2 changes what slurm/job.sh"),
        ("[any]\nsrun = -N2\n", "[any] srun: -N2 changes what slurm/job.sh sets or relies on"),
        ("[any]\nsrun = --gpus-per-task=1\n", "[any] srun: --gpus-per-task=1 changes what slurm/job.sh"),
        ("[any]\nsrun = --export NONE\n", "[any] srun: --export changes what slurm/job.sh"),
        ("[any]\nsrun = --container-image=a b\n", "--container-image=a b is not one option"),
        ("[any]\nsrun = -l --\n", "-l -- is not one option"),
        ("[any]\nsrun = --container-image='a\n", "[any] srun: --container-image='a: No closing quotation"),
        ("partition = x\n", "File contains no section headers"),
        (None, "cannot be read (No such file or directory): see slurm/README.md"),
    ],
    ids=["key", "notice", "time", *(f"srun{n}" for n in range(8)), "section", "file"],
)
def test_a_mistake_in_the_clusters_file_is_named(launch, tmp_path, text, message):
    (tmp_path / "cluster.conf").unlink()
    if text is not None:
        (tmp_path / "cluster.conf").write_text(text)
    code, _, err = launch("--dry-run")
    assert code == 2
    assert message in err


def test_the_clusters_own_file_is_whole(launch, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch", "--dry-run", "-m", "--gpu", "any,a100,h100,h200,v100", "seed=0,1"])
    assert main() == 0
    out, _ = capsys.readouterr()
    assert [line for line in out.splitlines() if "--gres" in line] == [
        f"#SBATCH --gres=gpu:{card}1" for card in ("", "a100:", "h100:", "h200:", "v100:")
    ]


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [("7", 420), ("7:30", 450), ("2:00:01", 7201), ("1-0", 86400), ("1-2:03", 93780), ("1-2:03:04", 93784)],
)
def test_times_are_slurms(typed, wanted):
    assert seconds(typed) == wanted


def test_help_names_every_option(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    out, _ = capsys.readouterr()
    named = ["--gpu", "--nodes", "--gpus-per-node", "--time", "--partition", "--account", "--name", "--dry-run"]
    assert all(f"  {name} " in out for name in [*named, "--parallel-jobs", "--max-requeues", "-m,"])
