"""The script of a job: Slurm's options, and arguments that reach Hydra as they were typed, whatever is in them."""

import json
import os
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from stabletrain.beside.slurm.request import Card
from stabletrain.beside.slurm.script import environment, ranges
from tests import forkserver
from tests.beside.slurm.given import options
from tests.beside.slurm.stand_ins import stand_in
from tests.runs import ROOT

NASTY = [
    "wandb.name='a b/c'",
    "wandb.name='it\\'s, \"here\"'",
    'wandb.name="x=[1,2]{3}"',
    "wandb.name='$HOME `id` \\\\ !1 * ? #'",
    "precision.fp32_modules=[head,'blocks.*.attention, x']",
    "wandb.name='ends in a line\nand goes on'",
    "wandb.name=''",
    "wandb.name='über → ∞'",
    "wandb.name=';exit 3 & ('",
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(NASTY)))
def test_an_argument_reaches_hydra_as_it_was_typed(tmp_path, number):
    [got] = arguments(tmp_path, [NASTY[number], "seed=3", "steps=9"])
    assert got[:3] == [NASTY[number], "seed=3", "steps=9"]


@pytest.mark.slow
def test_swept_arguments_reach_hydra_with_their_values(tmp_path):
    values = ["a b", "c,d", "[e]", "f\"g'h", "$HOME", "{i: j}", "k\\l"]
    quoted = ",".join("'" + value.replace("'", "\\'") + "'" for value in values)
    all_got = arguments(tmp_path, ["-m", f"wandb.name={quoted}", "seed=3"], tasks=len(values))
    for got, value in zip(all_got, values, strict=True):
        assert OverridesParser.create().parse_overrides(got[:1])[0].value() == value
        assert got[1] == "seed=3"


def arguments(place, typed, tasks=0):
    """Returns the arguments of `train.py`, by running a dry run's script with scripts in place of Slurm's programs."""
    stand_in(place, "python", f'shift; {sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"')
    stand_in(place, "srun", 'while [[ $1 == -* ]]; do shift; done; exec "$@"')
    (place / "cluster.conf").write_text(f"[any]\npython = {place}/python\n")
    words = [str(ROOT / "slurm" / "launch.sh"), "--cluster", str(place / "cluster.conf"), "--dry-run", *typed]
    environment = {**os.environ, "PYTHON": forkserver.python(), "PATH": f"{place}:{os.environ['PATH']}"}
    shown = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    gots = []
    for task in range(tasks or 1):
        if tasks:
            environment |= {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": str(task)}
        done = subprocess.run(
            ["bash"], input=shown.stdout, cwd=place, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        [line] = [line for line in done.stdout.splitlines() if line.startswith("[")]
        got = json.loads(line)
        assert got[-1] == "resume=auto"
        assert got[-2].startswith("hydra.run.dir='")
        gots.append(got)
    return gots


@pytest.mark.parametrize(
    ("card", "python"),
    [
        (Card("v100"), sys.executable),
        (Card("v100", environment="export A=1"), sys.executable),
        (Card("v100", environment="export A=1\n  PATH=$PWD/v100:$PATH"), "python"),
        (Card("v100", environment="PATH=$PWD/v100:$PATH", python="/a b/python"), "/a b/python"),
        (Card("v100", modules="torch cuda"), "python"),
    ],
    ids=["none", "no python", "python", "both", "modules"],
)
def test_a_job_runs_the_python_that_its_environment_activates(tmp_path, card, python):
    for folder in ("submitted", "v100"):
        (tmp_path / folder).mkdir()
        stand_in(tmp_path / folder, "python", "")
    module = 'module() { [[ "$*" == "load torch cuda" ]] && PATH=$PWD/v100:$PATH; }'
    script = "\n".join(["set -e", module, *environment(card), 'echo "$python"'])
    path = f"{tmp_path}/submitted:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{python}\n"


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
    assert '\n  "$folder" 4 100 300 "--container-mounts=/a b:$HOME/c" --cpu-bind cores -- \\\n' in out
    assert subprocess.run(["bash", "-n"], input=out, text=True, timeout=10).returncode == 0
    told = options(
        launch("--dry-run", "--gpu", "a100", "--partition", "p", "--account", "a", "--gpus-per-node", "1")[1]
    )
    assert [told[name] for name in ("partition", "account", "gres", "time")] == ["p", "a", "gpu:a100:1", "8:00:00"]
    assert set(options(launch("--dry-run")[1])) == {
        "job-name", "nodes", "ntasks-per-node", "time", "chdir", "output", "open-mode", "signal", "requeue",
    }  # fmt: skip


def test_numbers_of_tasks_are_written_short():
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2,4,6-7"
    assert ranges([3]) == "3"
