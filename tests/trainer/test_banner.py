"""The first and last lines of a run: sizes, settings, the result, the guard's work, the next command."""

import math
import shlex
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stabletrain.config.arguments import LAUNCH_VARIABLE, parse_arguments
from stabletrain.config.rules import CHOSEN_PARTS
from stabletrain.errors import ConfigError
from stabletrain.guard.policy import NoGuard, RollbackGuard, SkipGuard
from stabletrain.records import TrainState
from stabletrain.stability.schedule import Constant, LearningRate, LinearWarmup
from stabletrain.trainer.banner import (
    SHOWN,
    busy_note,
    closing,
    guard_summary,
    opening,
    option_text,
    parameter_count,
    relative_path,
    sample_text,
    split_note,
    suggestion,
    update_note,
)
from stabletrain.trainer.history import History
from tests.trainer.given import CPU, FP32
from tests.workloads import build_tools


@pytest.fixture(autouse=True)
def plain_start(monkeypatch):
    """Started by python, not by torchrun or Slurm."""
    for name in (LAUNCH_VARIABLE, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["train.py"])


# ---- first


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (7, "7"),
        (99_999, "99,999"),
        (100_000, "0.1 M"),
        (850_000, "0.85 M"),
        (10_700_000, "11 M"),
        (99_999_999, "100 M"),
        (124_439_808, "124 M"),
        (1_240_000_000, "1.2 B"),
        (175_000_000_000, "175 B"),
    ],
)
def test_a_number_of_parameters_is_shown_with_two_digits(count, text):
    assert parameter_count(count) == text


def test_a_folder_is_shown_relative_to_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert relative_path(str(tmp_path / "outputs" / "a")) == "outputs/a"
    assert relative_path("/somewhere/else") == "/somewhere/else"
    assert relative_path(f"{tmp_path}-2") == f"{tmp_path}-2"


@pytest.mark.parametrize(
    ("group", "option", "values", "text"),
    [
        ("clipping", "norm", {"max_norm": 1.0, "_target_": "x"}, "clipping norm 1"),
        ("optimizer", "adamw", {"eps": 1e-8, "lr": 0.003}, "optimizer adamw lr 0.003"),
        ("guard", "skip", {"sigma": 6.0}, "guard skip"),
        ("warmup", "linear", {"steps": None}, "warmup linear"),
    ],
)
def test_an_option_is_shown_with_the_value_that_matters_most(group, option, values, text):
    assert option_text(group, option, values) == text


def test_the_opening_says_what_is_trained_with_which_settings_and_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    groups = SHOWN
    choices = (
        dict.fromkeys(groups, "none")
        | CHOSEN_PARTS
        | {"model": "mine", "data": "text", "optimizer": "sgd", "warmup": "linear"}
    )
    config = {group: {} for group in groups} | {"precision": {"fp32_modules": ["head"]}, "optimizer": {"lr": 0.1}}
    tools = build_tools(FP32, learning_rate=LearningRate(LinearWarmup(None), Constant(), 2000))
    first = opening(choices, config, nn.Linear(4, 3), object(), tools, "CPU, 2 threads", str(tmp_path / "run"))
    assert first.splitlines() == [
        "stabletrain · mine, 15 parameters · text · CPU, 2 threads",
        "precision fp32 · in fp32 head · optimizer sgd lr 0.1 · warmup linear 100",
        "run run",
    ]
    noted = opening(choices, config, nn.Linear(4, 3), object(), tools, "CPU", str(tmp_path / "run"), ["", "a note"])
    assert noted.splitlines()[2:] == ["a note", "run run"]


def test_data_that_knows_its_split_is_quoted():
    assert split_note(SimpleNamespace(split="the last 0.1 of the file")) == "split: the last 0.1 of the file"
    assert split_note(object()) == split_note(SimpleNamespace(split=lambda parts: parts)) == ""


@pytest.mark.parametrize(
    ("load", "cores", "threads", "batches", "note"),
    [
        (1.9, 2, 2, 113, ""),
        (2.9, 2, 2, 113, ""),
        (6.0, 2, 1, 20, ""),
        (6.0, 2, 1, 113, "faster with eval_batches=20 instead of 113 at each evaluation"),
        (6.0, 2, 2, 20, "faster with OMP_NUM_THREADS=1 instead of 2 threads"),
        (
            *(6.04, 2, 2, 113),
            "faster with OMP_NUM_THREADS=1 instead of 2 threads and eval_batches=20 instead of 113 at each evaluation",
        ),
        (40.0, 64, 64, 500, ""),
    ],
)
def test_only_a_busy_cpu_is_noted_with_what_would_help(load, cores, threads, batches, note):
    told = busy_note(load, cores, threads, batches)
    assert told == (f"busy machine: load 6.0 on 2 cores; {note}" if note else "")


@pytest.mark.parametrize(
    ("guard", "text"),
    [
        (SkipGuard(), "guard skip (its window judges spikes after 64 updates; checksums every 10 updates)"),
        (
            SkipGuard(window=30, checksum_every=1),
            "guard skip (its window judges spikes after 20 updates; checksums every update)",
        ),
        (SkipGuard(sigma=math.inf, checksum_every=0), "guard skip (no spike detection; no checksums)"),
        (NoGuard(), "guard skip"),
    ],
)
def test_the_opening_says_from_when_on_the_window_judges_spikes_and_how_often_the_state_is_checked(guard, text):
    choices = dict.fromkeys(SHOWN, "none") | CHOSEN_PARTS | {"model": "mine", "data": "text", "guard": "skip"}
    config = {group: {} for group in (*SHOWN, "precision")}
    tools = build_tools(FP32, guard=guard, learning_rate=LearningRate(LinearWarmup(None), Constant(), 2000))
    lines = opening(choices, config, nn.Linear(4, 3), object(), tools, "CPU", "run").splitlines()
    assert lines[1] == f"precision fp32 · {text}"


# ---- last


def closed(**changed):
    state = SimpleNamespace(step=1000, executed_steps=1000, skipped=[])
    history = History(1.25, 800, {"val/loss": math.log(4)}, 1000, 1000, 20.0, 50_000)
    given = {
        "state": state,
        "history": history,
        "guard": SkipGuard(),
        "unit": "tok",
        "loss_unit": "nats",
        "per": "byte",
    }
    given |= {"folder": "/run", "sample": None, "again": "python train.py -m"} | changed
    return closing(**given).splitlines()


def test_the_closing_gives_result_guard_pace_folder_and_the_next_command():
    assert closed() == [
        "val loss 1.386 nats/byte (2.00 bits) after 1,000 steps in 20 s, best at step 800",
        "guard    1,000 updates in 1,000 steps, none skipped",
        "pace     2,500 tok/s",
        "run      /run",
        "next     python train.py -m",
    ]


NOT_FINITE = "weights, validation data, or what the model computes from them are not finite"


@pytest.mark.parametrize(
    ("val", "said"),
    [
        ({}, "val loss nan: nothing was evaluated after"),
        ({"val/loss": math.nan}, f"val loss nan: {NOT_FINITE} after"),
        ({"val/loss": math.inf}, f"val loss inf: {NOT_FINITE} after"),
    ],
)
def test_a_loss_that_is_not_finite_is_explained(val, said):
    assert closed(history=History(val=val))[0].startswith(said)


def test_a_loss_without_a_unit_is_shown_with_the_other_metrics_and_no_bits():
    history = History(val={"val/loss": 0.25, "val/r2": 0.5, "val/kl": 1.5})
    first = closed(history=history, loss_unit="")[0]
    assert first.startswith("val loss 0.25, r2 0.5, kl 1.5 after")


def test_a_classifier_shows_its_accuracy_first():
    averaged = closed(history=History(val={"val/loss": 0.5, "averaging/val_loss": 0.25}))
    assert averaged[1] == "average  val loss 0.250, of the averaged weights"
    first = closed(history=History(val={"val/loss": 0.5, "val/accuracy": 0.98765}))[0]
    assert first.startswith("val accuracy 98.77 %, loss 0.500 nats after")


def test_a_sample_is_shown_line_by_line_unless_it_is_blank():
    assert closed(sample="\nHAMLET:\nTo be\n")[3:5] == ["sample   HAMLET:", "         To be"]
    assert closed(sample=" \n ") == closed()


def test_the_first_lines_say_that_updates_are_checked_and_how_one_is_undone():
    model = torch.nn.Linear(512, 512, bias=False)
    proven, own = (kind(model.parameters(), lr=0.1) for kind in (torch.optim.AdamW, torch.optim.Adagrad))
    for guard, how in ((SkipGuard(), "(2 MB) and moments are kept"), (RollbackGuard(), "a replay from a snapshot")):
        assert update_note(guard, TrainState(model, proven)) == ""
        note = update_note(guard, TrainState(model, own))
        assert "Adagrad" in note
        assert how in note
    own.count, own.rank, own.name = 0, (1, 2), "own"  # what it counts outside of its state is in no snapshot
    assert "moments are kept" in update_note(RollbackGuard(), TrainState(model, own))
    own.history = []
    assert "a rollback or a resume does not restore its history" in update_note(RollbackGuard(), TrainState(model, own))
    assert update_note(SkipGuard(check_update=False), TrainState(model, own)) == ""
    assert update_note(NoGuard(), TrainState(model, own)) == ""


def test_the_guards_line_counts_skips_rollbacks_and_what_was_lost():
    guard = SkipGuard()
    guard.skips.update(bad_data=2, spike=5)
    state = SimpleNamespace(step=1000, executed_steps=1040, skipped=[(300, 310), (700, 701)])
    history = History(updates=993, lost_steps=40, lost_seconds=3.6)
    skips = "993 updates in 1,000 steps, 1,040 executed, 2 skipped (bad data), 5 skipped (spike)"
    assert guard_summary(state, history, guard) == skips
    guard.rollbacks = 2
    lost = "2 rollbacks, 40 steps (4 s) lost, batches never read again 300-309 700-700"
    assert guard_summary(state, history, guard) == f"{skips}, {lost}"
    guard.rollbacks = 1
    assert "1 rollback, " in guard_summary(state, history, guard)
    assert "fault" not in guard_summary(state, history, guard)
    guard.machine_faults = 2
    assert ", 2 steps taken again after a fault of the machine, " in guard_summary(state, history, guard)
    guard.machine_faults = 0
    assert "1 rollback, 1 healing (clip), 40 steps (4 s) lost" in guard_summary(state, history, guard, ["clip"])
    guard.rollbacks = 0
    healed = guard_summary(state, history, guard, ["clip", "optimizer.lr=0.1"])
    assert "(spike), 2 healings (clip, then optimizer.lr=0.1), 40 steps (4 s) lost" in healed


# ---- next


def suggested(*typed, has_attention=True, per="token"):
    return shlex.split(suggestion(parse_arguments([*typed]), has_attention, per))


@pytest.mark.parametrize(
    ("has_attention", "per", "sweep"),
    [
        (True, "byte", ["stability=none,zloss_qknorm", "optimizer.lr=1e-3,1e-1"]),
        (False, "image", ["clipping=none,norm", "optimizer.lr=0.03,3"]),
        (False, "sample", ["clipping=none,norm", "optimizer.lr=1e-3,1e-1"]),
    ],
)
def test_the_sweep_to_try_next_fits_what_was_run(has_attention, per, sweep):
    words = suggested("steps=50", has_attention=has_attention, per=per)
    assert words == ["python", "train.py", "-m", "steps=50", *sweep]


def test_the_suggestion_keeps_what_was_typed_but_for_what_the_sweep_decides():
    typed = ["--config-dir", "my conf", "-m", "model=gpt2", "optimizer.lr=3e-4", "zloss=palm", "stability=full"]
    typed += ["resume=auto", "hydra.run.dir=x", "faults=gradient", "faults.at=[1]", "+data.extra=a b"]
    words = suggested(*typed)
    kept = ["--config-dir", "my conf", "model=gpt2", "+data.extra=a b"]
    assert words == ["python", "train.py", "-m", *kept, "stability=none,zloss_qknorm", "optimizer.lr=1e-3,1e-1"]


# ---- sample


class Letters:
    """Text of the letters a to e."""

    prompt = "ab"

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(each + ord("a")) for each in ids)


def test_a_sample_continues_the_prompt_and_touches_neither_model_nor_randomness():
    model = nn.Sequential(nn.Embedding(5, 5), nn.Dropout(0.5)).train()
    drawn = torch.get_rng_state()
    text = sample_text(model, Letters(), CPU)
    assert text is not None
    assert text.startswith("ab")
    assert len(text) == 22
    assert set(text) <= set("abcde")
    assert sample_text(model, Letters(), CPU) == text
    assert model.training
    assert torch.equal(torch.get_rng_state(), drawn)


class Broken(Letters):
    """Text whose tokenizer is lost."""

    def encode(self, text):
        raise ConfigError("no\ntokenizer")


def test_a_sample_whose_tokenizer_is_lost_is_no_error():
    assert sample_text(nn.Linear(2, 2), Broken(), CPU) == "(none: no tokenizer)"


def test_a_sample_that_fails_is_no_error_and_data_that_is_no_text_has_none():
    text = sample_text(nn.Linear(2, 2), Letters(), CPU)
    assert text is not None
    assert text.startswith("(none: ")
    assert sample_text(nn.Linear(2, 2), object(), CPU) is None
