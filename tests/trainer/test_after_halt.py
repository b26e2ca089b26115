"""What a halt recommends: changes that a resume can take, in a command that trains on as it is printed."""

import json
import shlex
from pathlib import Path

import pytest

from stabletrain.config.arguments import LAUNCH_VARIABLE, parse_arguments
from stabletrain.trainer.after_halt import after_halt
from tests.runs import TINY_GPT, TINY_RESNET, command

CHOICES = {"optimizer": "adamw", "qknorm": "none", "init": "gpt2", "guard": "skip"}
VALUES = {"optimizer.lr": 0.3, "warmup.steps": 10, "guard.max_consecutive": 5, "precision.fp32_modules": []}


@pytest.fixture
def halted(tmp_path, monkeypatch):
    """Returns the lines after a halt of a run whose newest incident has these fixes."""
    for name in (LAUNCH_VARIABLE, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py"])
    monkeypatch.chdir(tmp_path)

    def halted(*fixes, typed=("seed=3",), checkpoint=Path("checkpoints/step-00000020"), kind="spike", usual_lr=None):
        incidents = [{"event": "incident", "step": 3, "fix": ["clipping=zclip"]}]
        incidents += [{"event": "incident", "step": 30, "fix": list(fixes)}] if fixes else []
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in incidents))
        return after_halt(
            parse_arguments(list(typed)), tmp_path / "run", checkpoint, kind, CHOICES, VALUES, usual_lr
        ).splitlines()

    (tmp_path / "run").mkdir()
    (tmp_path / "run/events.jsonl").symlink_to(tmp_path / "events.jsonl")
    return halted


def test_the_first_fix_that_a_resume_can_take_is_typed_with_the_run(halted):
    lines = halted("correct a/b.py at byte 3", "qknorm=layernorm", "optimizer.lr=0.1")
    assert lines[0] == "continue  python train.py resume=run qknorm=layernorm"
    assert lines[1].strip() == "from step-00000020; docs/reference/resume.md lists what else a resume may change"
    assert len(lines) == 2


def test_sentences_equal_values_and_unknown_keys_are_passed_over(halted):
    fixes = ["resume=<run folder> (the last healthy checkpoint)", "optimizer.lr=0.3", "nothing.like=this", "guard=skip"]
    assert halted(*fixes)[0] == "continue  python train.py resume=run optimizer.lr=0.1"
    assert halted("precision.fp32_modules=[blocks.0.mlp]")[0].endswith("'precision.fp32_modules=[blocks.0.mlp]'")


def test_a_fix_that_only_a_new_run_can_take_has_its_own_command(halted):
    lines = halted(
        "init=small", typed=["seed=3", "init=gpt2", "init.std=9", "faults=label", "hydra.run.dir=x", "resume=none"]
    )
    assert lines[0] == "continue  python train.py resume=run optimizer.lr=0.1"
    assert lines[-1] == "anew      python train.py seed=3 init=small"


def test_without_a_checkpoint_the_run_starts_anew(halted):
    assert halted("optimizer.lr=0.1", checkpoint=None) == ["anew      python train.py seed=3 optimizer.lr=0.1"]


def test_bad_data_needs_patience_not_another_learning_rate(halted):
    assert halted("correct a.txt", kind="bad_data")[0].endswith("resume=run guard.max_consecutive=50")


def test_what_was_typed_beside_a_resume_by_name_is_repeated(halted):
    lines = halted("optimizer.lr=0.1", typed=["resume=run", "qknorm=rmsnorm", "optimizer.lr=0.3"])
    assert lines[0] == "continue  python train.py resume=run qknorm=rmsnorm optimizer.lr=0.1"


# ---- the printed command

COMMON = ["steps=40", "checkpoint.every=5", "log_every=5", "report=false", "hydra.run.dir=run"]
BAD_DATA = [*TINY_GPT, *COMMON, "guard=skip", "guard.max_consecutive=3", "faults=label", "faults.at=[10,11,12]"]
RUNAWAY = [
    "optimizer.lr=30",
    "warmup=none",
    "clipping=none",
    "guard.patience=2",
    "guard.max_rollbacks=0",
    "precision=fp32",
]
HALTS = {
    "bad data": BAD_DATA,
    "a learning rate": [*TINY_GPT, *COMMON, *RUNAWAY],
    "a learning rate of a ResNet": [*TINY_RESNET, "model.depth=8", *COMMON, *RUNAWAY, "optimizer.lr=1e4"],
    "an init": [*TINY_GPT, *COMMON, "init.std=1e12", "guard=skip", "guard.max_consecutive=2", "precision=fp32"],
    "no checkpoints": [*TINY_GPT, *COMMON, "checkpoint=off", *RUNAWAY],
}
HALTS["no checkpoints"].remove("checkpoint.every=5")


@pytest.mark.beside(when=lambda case: case == "bad data")
@pytest.mark.slow(unless=lambda case: case == "bad data")
@pytest.mark.parametrize("case", HALTS)
def test_the_printed_command_trains_on(tmp_path, case):
    done = command(*HALTS[case], cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stderr.splitlines()]
    printed = {words[0]: words[1] for words in lines if words and words[0] in ("continue", "anew")}
    assert printed, done.stderr
    assert set(printed) == {"anew" if case in ("no checkpoints", "an init") else "continue"}
    for kind, line in printed.items():
        python, script, *words = shlex.split(line)
        assert (python, Path(script).name) == ("python", "train.py")
        again = command(*words, *(["hydra.run.dir=anew"] if kind == "anew" else []), cwd=tmp_path)
        assert again.returncode == 0, (line, again.stderr[-600:])
        record = json.loads((tmp_path / ("run" if kind == "continue" else "anew") / "run.json").read_text())
        assert (record["status"], record["final"]["steps"]) == ("finished", 40)
        assert record["final"]["guard/updates"] > 20


@pytest.mark.parametrize(("usual", "proposed"), [(3e-3, "0.003"), (0.03, "0.03"), (0.031, "0.1"), (None, "0.1")])
def test_without_another_fix_a_rate_far_above_the_usual_one_is_lowered_to_it(halted, usual, proposed):
    assert halted("look at the data", usual_lr=usual)[0].endswith(f"resume=run optimizer.lr={proposed}")
