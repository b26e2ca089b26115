"""The command line as a user sees it: mistakes, signals, sweeps, and what the run folders contain."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from stabletrain.cli.failures import traceback_text
from stabletrain.cli.train import say_closing_lines
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.tracking.tracker import NoTracker
from tests import forkserver
from tests.conftest import HAS_BESIDE
from tests.refusals import table
from tests.runs import ROOT, TINY_GPT, command, installed, python
from tests.tracking.wandb_file import read

QUICK = [*TINY_GPT, "steps=6", "eval_every=3", "log_every=2", "report=false", "hydra.run.dir=run"]


@pytest.fixture
def no_torch(tmp_path):
    """A folder that shadows torch with a module that cannot be imported."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    return str(tmp_path / "shadow")


REFUSED = {row.command.removeprefix("train "): row.message for row in table.read() if row.command.startswith("train ")}

WITHOUT_TORCH = (
    *("optimizer.lrr=1", "clipping=norn", "steps=1e3", "steps=0", "~guard", "steps=[", "steps", "--steps 100"),
    *("optimizer.lr=1e-3,1e-1", "warmup.steps=2000", "resume=nowhere", "model=resnet20 data=digits stability=full"),
)
"""Rows of the table of refusals, one of each kind, that are refused before torch is loaded."""


@pytest.mark.slow(unless=lambda typed: typed in [*WITHOUT_TORCH][::2])
@pytest.mark.parametrize("typed", WITHOUT_TORCH)
def test_a_mistake_is_one_message_without_loading_torch(tmp_path, no_torch, typed):
    done = command(*typed.split(), cwd=tmp_path, torch=False, PYTHONPATH=no_torch)
    assert done.stderr == f"stabletrain: {REFUSED[typed]}\n".replace("stabletrain train", "python train.py")
    assert (done.returncode, done.stdout) == (2, "")


def test_help_lists_every_group_without_loading_torch(tmp_path, no_torch):
    done = command("--help", cwd=tmp_path, torch=False, PYTHONPATH=no_torch)
    assert done.returncode == 0
    for group in (folder for folder in (ROOT / "conf").iterdir() if folder.is_dir()):
        options = sorted(file.stem for file in group.glob("*.yaml"))
        assert f"{group.name}: {', '.join(options)}" in done.stdout


def piped(cwd, unbuffered, *typed):
    """Starts `python train.py` with its output in pipes; without a buffer, a closed pipe is noticed at once."""
    words = [sys.executable, str(ROOT / "train.py"), *typed]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.Popen(words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow(unless=lambda typed, unbuffered: typed == "--help" and not unbuffered)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("typed", ["--help", "--cfg=job"])
def test_help_into_a_closed_pipe_ends_quietly(tmp_path, typed, unbuffered):
    process = piped(tmp_path, unbuffered, typed)
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, b"")


def test_a_bound_that_needs_torch_is_one_message_too(tmp_path):
    done = command(*QUICK, "optimizer.lr=-1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "stabletrain: optimizer.lr=-1 is not a finite number above 0: adamw's default is 3e-3\n",
    )
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "optimizer.lr=-1" in record["reason"]


def test_what_the_user_types_beats_the_preset_and_the_experiment(tmp_path):
    done = command(
        "stability=zloss_qknorm", "zloss=olmo", "experiment=resnet_digits", "steps=7", "--cfg", "job", cwd=tmp_path
    )
    text = done.stdout
    assert "coefficient: 1.0e-05" in text
    assert "steps: 7" in text
    assert "_target_: stabletrain.stability.init.TorchInit" in text, "the GPTs' init does not leak into a ResNet"


def test_a_run_says_what_it_did_where_it_is_and_what_is_next(tmp_path):
    done = command(*QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    out = done.stdout.splitlines()
    assert out[0].startswith("stabletrain · gpt_nano, 14,416 parameters · stdlib, ")
    assert out[1].startswith("precision ")
    assert [line.split()[1] for line in out if line.startswith("step")] == ["2/6", "4/6", "6/6"]
    assert any(line.startswith("val loss ") and "nats/byte" in line for line in out)
    assert any(line.startswith("sample ") for line in out)
    if HAS_BESIDE:  # what is next is a sweep
        assert out[-1].startswith("next     python ")
        assert out[-1].endswith("stability=none,zloss_qknorm optimizer.lr=1e-3,1e-1")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "val/loss" in line] == [3, 6]
    assert record["final"]["val/loss"] == lines[-1]["val/loss"]
    kept = {
        "train/loss",
        "train/ce",
        "train/zloss",
        "grad/norm",
        "clip/coef",
        "clip/fraction",
        "lr",
        "precision/loss_scale",
        "guard/skipped",
        "guard/skip_rate",
        "spike/score",
        "spike/grad_norm_score",
        "update/zscore",
        "tick",
        "guard/applied",
        "guard/rollbacks",
    }
    looks = [{name for name in line if name.startswith("monitors/")} for line in lines]
    assert kept | {"step", "time", "tokens_per_s", "memory/peak_gb"} == set(lines[0]) - looks[0]
    assert looks[0] >= {"monitors/attn_logit_max", "monitors/update_ratio/blocks.0", "monitors/log_z_mean"}
    steps = {line["step"] for line, look in zip(lines, looks, strict=True) if look}
    assert steps == {1, 6}, "the first and the last; monitors.every is 100"


def test_an_error_in_the_closing_lines_is_one_line(capsys):
    def closing():
        raise RuntimeError("no\nway")

    say_closing_lines(SimpleNamespace(tracker=NoTracker(), closing=closing))
    assert capsys.readouterr().err == (
        "stabletrain: the run is finished and saved, but its closing lines could not be made (RuntimeError: no way)\n"
    )


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    chosen = [*QUICK, "report=true"]
    assert command(*chosen, cwd=tmp_path).returncode == 0
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    again = command(*chosen, "data.block_size=8", cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds run" in again.stderr
    assert "resume=auto" in again.stderr
    assert {file: file.read_bytes() for file in before} == before, "the options in .hydra/ too"


def endless(cwd, *overrides):
    """A run in the background, whose output goes to the files `out` and `err`."""
    words = [str(ROOT / "train.py"), *TINY_GPT, "steps=100000", "log_every=1", *overrides]
    return forkserver.start(words, cwd, {**os.environ, "OMP_NUM_THREADS": "1"}, cwd / "out", cwd / "err")


def logged_after(cwd, step):
    """Waits until a run has logged a later step than this one."""
    deadline = time.monotonic() + 240
    while not any(line["step"] > step for file in cwd.glob("outputs/*/*/metrics.jsonl") for line in read_jsonl(file)):
        assert time.monotonic() < deadline, (cwd / "err").read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_says_how_to_continue_and_the_same_command_continues(tmp_path, number):
    process = endless(tmp_path)
    logged_after(tmp_path, 3)
    os.kill(process.pid, number)
    assert process.wait(240) == 75
    errors = (tmp_path / "err").read_text()
    assert f"{number.name}: stopped after step" in errors
    assert "continue  python" in errors
    assert "resume=auto" in errors
    (folder,) = tmp_path.glob("outputs/*/*")
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "preempted"
    stopped = read_jsonl(folder / "metrics.jsonl")[-1]["step"]
    assert (folder / "checkpoints" / f"step-{stopped:08}").is_dir()

    again = endless(tmp_path, "resume=auto")
    logged_after(tmp_path, stopped)
    os.kill(again.pid, number)
    assert again.wait(240) == 75
    steps = [line["step"] for line in read_jsonl(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), "nothing is missing and nothing is twice"
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1, "it continued in the folder of the run"


@pytest.mark.slow
def test_resume_names_a_run_folder_and_takes_its_overrides_along(tmp_path):
    assert command(*QUICK, cwd=tmp_path).returncode == 0
    more = command("resume=run", "steps=9", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "lr" in line] == [1, 2, 4, 6, 8, 9]
    fork = command("resume=run/checkpoints/step-00000009", "steps=12", "hydra.run.dir=fork", cwd=tmp_path)
    assert fork.returncode == 0, fork.stderr
    forked = [line["step"] for line in read_jsonl(tmp_path / "fork" / "metrics.jsonl") if "lr" in line]
    assert forked == [10, 12]
    ids = {json.loads((tmp_path / name / "run.json").read_text())["id"] for name in ("run", "fork")}
    assert len(ids) == 2


@pytest.mark.beside
@pytest.mark.slow
def test_in_a_sweep_every_run_has_its_own_folder_wandb_run_and_exit_status(tmp_path):
    chosen = [o for o in QUICK if not o.startswith(("hydra.run", "wandb"))]
    done = command(*chosen, "-m", "optimizer.lr=1e-3,-1,3e-3", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 2
    assert "optimizer.lr=-1 is not a finite number above 0" in done.stderr
    records = [json.loads((tmp_path / "sweep" / str(i) / "run.json").read_text()) for i in range(3)]
    assert [record["status"] for record in records] == ["finished", "failed", "finished"]
    assert "optimizer.lr=-1" in records[1]["reason"]
    runs = [read(tmp_path / "sweep" / str(i)) for i in (0, 2)]
    assert [run["id"] for run in runs] == [records[0]["id"], records[2]["id"]]
    assert [run["exit_code"] for run in runs] == [0, 0]
    assert "sweep    3 runs, 2 finished" in done.stdout
    assert [line.split()[2] for line in done.stdout.splitlines()[1:4]] == ["finished", "failed", "finished"]
    assert [line.split()[0] for line in done.stdout.splitlines()[4:]] == ["sweep", "best", "failed", "then", "next"]
    assert [run["config"]["optimizer"]["lr"] for run in runs] == [1e-3, 3e-3]
    assert [run["config"]["groups"]["guard"] for run in runs] == ["rollback", "rollback"]


@pytest.mark.slow
def test_a_refused_resume_does_the_run_no_harm(tmp_path):
    assert command(*QUICK, cwd=tmp_path).returncode == 0
    before = {
        f: f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file() and f.suffix in (".json", ".yaml")
    }
    assert command("resume=run", "optimizer.lr=-1", cwd=tmp_path).returncode == 2
    assert command("resume=run", "steps=9", "model.n_layer=3", cwd=tmp_path).returncode == 2
    assert before == {f: f.read_bytes() for f in before}
    more = command("resume=run/checkpoints", "steps=9", cwd=tmp_path)
    assert more.returncode == 0, more.stderr


@pytest.mark.slow
def test_without_checkpoints_a_signal_does_not_claim_that_anything_was_saved(tmp_path):
    process = endless(tmp_path, "checkpoint=off")
    logged_after(tmp_path, 3)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(240) == 130
    errors = (tmp_path / "err").read_text()
    assert "checkpoint=off: nothing is saved" in errors
    assert "continue" not in errors


def test_options_may_stand_anywhere_and_a_missing_folder_is_named(tmp_path):
    done = command("steps=5", "--cfg", "job", "zloss=olmo", cwd=tmp_path)
    assert "coefficient: 1.0e-05" in done.stdout
    missing = command("steps=5", "--config-dir", "nowhere", cwd=tmp_path)
    assert missing.returncode == 2
    assert missing.stderr.startswith("stabletrain: --config-dir nowhere does not exist")


def test_a_halt_has_its_own_code_and_says_why(tmp_path):
    chosen = [*QUICK, "optimizer.lr=1e30", "clipping=none", "warmup=none", "guard=skip", "precision=fp32"]
    chosen += ["guard.max_consecutive=2"]
    done = command(*chosen, cwd=tmp_path)
    assert done.returncode == 3, (done.stdout, done.stderr)
    assert "guard.max_consecutive=2" in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "halted"


@pytest.mark.slow
def test_a_closed_output_pipe_does_not_end_the_run(tmp_path):
    """Nor is it an error at the interpreter's shutdown, which writes what is left in the buffer."""
    process = piped(tmp_path, "", *QUICK)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=120), errors) == (0, b"")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_without_a_buffer_a_closed_output_pipe_does_not_end_the_run_either(tmp_path):
    pipe, errors = tmp_path / "out", tmp_path / "err"
    os.mkfifo(pipe)
    reader = os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # without a writer, it would wait for one
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = forkserver.start([str(ROOT / "train.py"), *QUICK], tmp_path, environment, pipe, errors)
    os.set_blocking(reader.fileno(), True)
    assert reader.readline().startswith("stabletrain")
    reader.close()
    assert (process.wait(120), errors.read_text()) == (0, "")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_sampling_from_a_finished_run(tmp_path):
    assert command(*QUICK, cwd=tmp_path).returncode == 0
    write = ["-m", "stabletrain.cli.commands", "sample", "run", "--prompt", "import ", "--tokens", "20"]
    first, second = (python(*write, cwd=tmp_path) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("import ")
    assert first.stdout == second.stdout
    missing = python(*write[:3], "nowhere", cwd=tmp_path)
    assert missing.returncode == 2
    assert missing.stderr.startswith("stabletrain: nowhere holds no usable checkpoint")


@pytest.mark.slow
def test_raised_steps_continue_the_run_and_changes_are_recorded(tmp_path):
    quick = [*TINY_GPT, "eval_every=10", "checkpoint.every=5"]
    assert command(*quick, "steps=10", cwd=tmp_path).returncode == 0
    longer = command(*quick, "steps=20", "resume=auto", cwd=tmp_path)
    assert "resumed after step 10" in longer.stdout
    assert "changed  steps 10 -> 20; the learning-rate schedule now ends at the new last step" in longer.stdout
    [folder] = (tmp_path / "outputs").glob("*/*")
    record = json.loads((folder / "run.json").read_text())
    assert (record["final"]["steps"], record["changes"]) == (20, [{"step": 10, "keys": {"steps": [10, 20]}}])
    assert [event["keys"] for event in read_jsonl(folder / "events.jsonl") if event["event"] == "changed"] == [
        {"steps": [10, 20]}
    ]
    fewer = command(*quick, "steps=5", "resume=auto", cwd=tmp_path)
    assert fewer.returncode == 2
    assert "has finished its 20 steps, so a resume with another steps would train nothing" in fewer.stderr


@pytest.mark.slow
def test_a_run_is_not_continued_with_other_data(tmp_path):
    quick = [*TINY_GPT, "steps=4", "hydra.run.dir=run"]
    assert command(*quick, cwd=tmp_path).returncode == 0
    (tmp_path / "own.txt").write_text("another text\n" * 500)
    before = (tmp_path / "run" / "run.json").read_text()
    for resume in ("run", "run/checkpoints/step-00000004"):
        other = command("data=text", "data.path=own.txt", "steps=8", f"resume={resume}", cwd=tmp_path)
        assert other.returncode == 2
        assert "has data=stdlib, which a resume cannot change" in other.stderr
        assert "takes its weights into a new run" in other.stderr
        assert f"init_from={tmp_path / 'run'}" in other.stderr
    assert (tmp_path / "run" / "run.json").read_text() == before


def test_an_error_in_the_users_code_prints_its_lines_and_the_file_has_all(tmp_path):
    scope = {}
    exec(compile("def forward():\n    return 1 / 0\n", "/home/user/mine.py", "exec"), scope)

    def train():
        scope["forward"]()

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    file = tmp_path / "traceback.txt"
    told = traceback_text(caught.value, file)
    assert told.startswith(f"Traceback (your code; all of it in {file}):\n")
    assert file.read_text().startswith("Traceback (most recent call last):\n")
    assert file.read_text().endswith("ZeroDivisionError: division by zero\n")
    assert traceback_text(caught.value, tmp_path / "missing" / "file").startswith("Traceback (most recent call last)")
    own = ValueError("of the program")
    assert traceback_text(own, tmp_path / "other.txt") == "ValueError: of the program\n"
    assert not (tmp_path / "other.txt").exists()


# ---- the same by `stabletrain train`


SCRIPTS = {
    f"python {ROOT / 'train.py'}": "python -m stabletrain train",  # in a command to copy
    "python train.py": "stabletrain train",  # in a message
    "--nproc_per_node=8 train.py": "--nproc_per_node=8 -m stabletrain train",
}
"""What the script calls itself, and what the command calls itself when `python -m` has started it."""


def masked(text):
    """Leaves out what depends on the time."""
    return re.sub(r"\d{4}-\d\d-\d\d/[\d-]{8}|\d+:\d\d left|\d+ s\b|[\d.,]+k? tok/s", "<time>", text)


def renamed(text):
    """What `train.py` prints, with the names of the command."""
    for script, name in SCRIPTS.items():
        text = text.replace(script, name)
    return text


HALTED = ["guard=skip", "guard.max_consecutive=1", "faults=input", "faults.at=[2]", "forensics=off"]
SAME = {
    "help": (0, ["--help"]),
    "configuration": (0, ["--cfg", "job", "optimizer=muon"]),
    "a typing error": (2, ["zzz=3"]),
    "no option": (2, ["--zzz"]),
    "several values": (2, ["seed=1,2"]),
    "a run": (0, [*QUICK, "report=true"]),
    "a halted run": (3, [*QUICK, *HALTED]),
    "a sweep": (0, [*QUICK[:-1], "-m", "seed=0,1", "hydra.sweep.dir=sweep"]),
}


@pytest.mark.beside(when=lambda case: case in ("a halted run", "a sweep"))
@pytest.mark.slow(unless=lambda case: case in ("help", "a halted run"))
@pytest.mark.parametrize("case", SAME)
def test_the_installed_command_does_what_the_script_does(tmp_path, case):
    code, typed = SAME[case]
    both = []
    for name, run in (("script", command), ("installed", installed)):
        (tmp_path / name).mkdir()
        both.append(run(*typed, cwd=tmp_path / name))
    for stream in ("stdout", "stderr"):
        script, other = (masked(getattr(done, stream)) for done in both)
        assert renamed(script) == other
    assert [done.returncode for done in both] == [code, code]


def test_a_configuration_folder_is_relative_to_the_working_folder(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("steps: 3\n")
    for option in (["--config-path", "own"], ["--config-path=own"], ["-cp", "own"]):
        done = installed(*option, "--config-name", "mine", "--cfg", "job", cwd=tmp_path)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "steps: 3", "")


@pytest.mark.slow
def test_the_installed_command_continues_the_scripts_run(tmp_path):
    for run, steps in ((command, 3), (installed, 6)):
        done = run(*QUICK[:-1], f"steps={steps}", "resume=auto", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    [folder] = tmp_path.glob("outputs/*/*")
    record = json.loads((folder / "run.json").read_text())
    assert record["final"]["steps"] == 6
    assert " -m stabletrain.cli.commands train " in record["command"]


def test_the_installed_command_refuses_without_loading_torch(tmp_path, no_torch):
    words = [sys.executable, "-m", "stabletrain", "train", "stepz=3"]
    path = f"{no_torch}{os.pathsep}{ROOT}"
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "stabletrain: stepz: there is no such key; did you mean steps?\n")
