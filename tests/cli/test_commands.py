"""The `stabletrain` commands: their output, and a one-line error with an exit code if one fails."""

import errno
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from stabletrain.cli import commands
from stabletrain.cli.commands import main
from stabletrain.errors import ConfigError, StabletrainError, TrainingHalted
from stabletrain.extension import COMMANDS, extension
from tests.beside.comparison.written import six_runs, write
from tests.checkpoint.given import rewrite_manifest
from tests.runs import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
INCIDENT = FIXTURES / "incident" / "incidents" / "step-00000002"


def output_of(capsys, *typed):
    """Runs a command that must succeed; returns what it prints."""
    assert main([*map(str, typed)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def trained(monkeypatch):
    """Returns the folder of a run of a small GPT on text; changes to the folder its data path is relative to."""
    monkeypatch.chdir(FIXTURES)
    return FIXTURES / "one_process"


def test_help_lists_exactly_the_documented_commands(capsys):
    pages = [commands, *([importlib.import_module("stabletrain.beside.commands")] if extension().commands() else [])]
    documented = re.findall(r"^stabletrain (\S+)", "".join(page.__doc__ for page in pages), re.MULTILINE)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert re.findall(r"^    (\S+)", capsys.readouterr().out, re.MULTILINE) == documented


@pytest.mark.beside(when=lambda typed: typed[:1] and typed[0] in COMMANDS)
@pytest.mark.parametrize("typed", [[], ["nothing"], ["sample"], ["compare", "x", "--rows", "many"]], ids=" ".join)
def test_an_invalid_command_line_exits_with_code_2(typed):
    with pytest.raises(SystemExit) as ended:
        main(typed)
    assert ended.value.code == 2


@pytest.mark.beside(when=lambda typed: typed == "compar")
@pytest.mark.parametrize(
    ("typed", "hint"), [("compar", "; did you mean compare?"), ("smaple", "; did you mean sample?"), ("jump", ";")]
)
def test_a_mistyped_command_is_answered_with_the_nearest(capsys, typed, hint):
    with pytest.raises(SystemExit) as ended:
        main([typed, "x"])
    assert ended.value.code == 2
    assert f"{typed}: there is no such command{hint} commands: train, prepare, sample, " in capsys.readouterr().err


EMPTY = [
    *(["sample", ""], ["compare", ""], ["compare", "x", "--csv", ""], ["compare", "x", "--html", ""]),
    *(["losses", "x", ""], ["diagnose", ""], ["forecast", ""], ["replay", ""], ["replay", "x", "--config-dir", ""]),
    *(["export", "", "--to", "hf"], ["export", "x", "--to", "hf", "--out", ""], ["whatif", ""], ["sync", ""]),
    *(["prepare", "", "x"], ["prepare", "x", ""]),
]


@pytest.mark.beside(when=lambda typed: typed[:1] and typed[0] in COMMANDS)
@pytest.mark.parametrize("typed", EMPTY, ids=" ".join)
def test_an_empty_path_is_not_the_working_folder(tmp_path, monkeypatch, capsys, typed):
    monkeypatch.chdir(tmp_path)
    for name in ("run.json", "x.txt", ".hydra/x", "wandb/offline-run-1/x.wandb"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("words")
    before = {*tmp_path.rglob("*")}
    with suppress(SystemExit):
        assert main(typed) == 2
    assert "empty, perhaps from a variable that is not set" in capsys.readouterr().err
    assert {*tmp_path.rglob("*")} == before


def test_without_a_command_all_are_named(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "error: a command is missing; commands: train, prepare, sample, " in capsys.readouterr().err


def test_the_version_is_that_of_the_project(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    written = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert capsys.readouterr().out == f"stabletrain {written}\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("no run"), 2, "stabletrain: no run\n"),
        (TrainingHalted("training halted"), 3, "stabletrain: training halted\n"),
        (StabletrainError("killed"), 1, "stabletrain: killed\n"),
        (OSError(errno.ENOSPC, "No space left"), 1, "stabletrain: [Errno 28] No space left\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_prints_one_line_and_sets_the_exit_code(monkeypatch, capsys, error, code, said):
    def failing(*typed):
        raise error

    monkeypatch.setattr("stabletrain.cli.replay.replay_incident", failing)
    assert main(["replay", "run"]) == code
    assert capsys.readouterr().err == said


def test_an_unexpected_exception_is_raised(monkeypatch):
    monkeypatch.setattr("stabletrain.cli.replay.replay_incident", lambda *typed: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["replay", "run"])


def test_a_closed_pipe_is_not_an_error(tmp_path):
    for step in range(300):
        folder = tmp_path / "incidents" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "diagnosis.json").write_text(json.dumps({"step": step, "verdict": 500 * "x"}))
    words = [sys.executable, "-m", "stabletrain.cli.commands", "diagnose", str(tmp_path), "--json"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, b"")


def test_text_begins_with_the_prompt_and_a_seed_reproduces_it(trained, capsys):
    typed = ["sample", trained, "--prompt", "the", "--tokens", "20", "--temperature", "2", "--seed"]
    first, again, other = (output_of(capsys, *typed, seed) for seed in (1, 1, 2))
    assert first.startswith("the")
    assert len(first) > len("the")
    assert first == again != other


def test_at_temperature_0_the_seed_has_no_effect(trained, capsys):
    typed = ["sample", trained, "--prompt", "the", "--tokens", "20"]
    likeliest = output_of(capsys, *typed, "--temperature", "0")
    assert output_of(capsys, *typed, "--temperature", "0", "--seed", "1") == likeliest
    assert output_of(capsys, *typed, "--top-k", "1", "--seed", "1") == likeliest, "top-k of 1 leaves no choice"


def test_without_a_prompt_the_default_of_the_data_is_used(trained, capsys):
    assert output_of(capsys, "sample", trained, "--tokens", "0") == "\n\n"


def test_the_best_option_samples_from_the_best_checkpoint(trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    first, last = sorted((run / "checkpoints").iterdir())
    rewrite_manifest(first, val_loss=1.0)
    typed = ["--prompt", "the", "--tokens", "20", "--temperature", "0"]
    of_best, of_last = (output_of(capsys, "sample", place, *typed) for place in (first, last))
    assert of_best != of_last
    assert output_of(capsys, "sample", run, *typed) == of_last
    assert output_of(capsys, "sample", run, "--best", *typed) == of_best


class Positions(torch.nn.Module):
    """Reads at most 64 tokens, which is the data's block size, but has no attribute that says so."""

    def __init__(self, longest=64):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(longest, 4), torch.nn.Linear(4, 256)
        self.lengths = []

    def load_state_dict(self, state):
        """Keeps its own weights."""

    def forward(self, tokens):
        self.lengths.append(tokens.shape[1])
        return self.out(self.table(torch.arange(tokens.shape[1])))[None]


def test_a_model_without_a_block_size_reads_as_many_tokens_as_the_data_has(trained, capsys, monkeypatch):
    model = Positions(OmegaConf.load(trained / ".hydra" / "config.yaml").data.block_size)
    monkeypatch.setattr("stabletrain.trainer.contract.make_model", lambda choice, data, objective: model)
    output_of(capsys, "sample", trained, "--prompt", "a", "--tokens", "100")
    assert (min(model.lengths), max(model.lengths), len(model.lengths)) == (1, model.table.num_embeddings, 100)


def test_a_model_that_cannot_generate_text_shows_its_own_lines(trained, capsys, monkeypatch):
    monkeypatch.setattr("stabletrain.trainer.contract.make_model", lambda choice, data, objective: Positions(2))
    assert main(["sample", str(trained), "--prompt", "abc"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"stabletrain: {trained}: the model cannot generate text\nTraceback")
    assert "in forward\n" in said
    assert said.endswith("IndexError: index out of range in self\n")
    assert "site-packages" not in said


def test_a_checkpoint_without_its_run_is_refused(trained, tmp_path, capsys):
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    assert main(["sample", str(tmp_path)]) == 2
    assert "the run's configuration" in capsys.readouterr().err


def test_sampling_from_a_model_not_trained_on_text_is_refused(trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    file = run / ".hydra" / "config.yaml"
    data = "data:\n  _target_: types.SimpleNamespace\n"
    file.write_text(re.sub(r"^data:\n(?: .*\n)+", data, file.read_text(), flags=re.MULTILINE))
    assert main(["sample", str(run), "--trust"]) == 2
    said = "its model was trained on types.SimpleNamespace, which is not text\n"
    assert said in capsys.readouterr().err


@pytest.mark.beside
def test_compare_applies_its_options(tmp_path, capsys):
    sweep = six_runs(tmp_path / "sweep")
    csv, html = tmp_path / "a.csv", tmp_path / "a.html"
    typed = ["--each", "--sort", "seed", "--rows", "1", "--wide", "--csv", csv, "--html", html]
    out = output_of(capsys, "compare", sweep, *typed)
    assert "5 more rows" in out
    assert [row.split(",")[1] for row in csv.read_text().splitlines()[1:3]] == ["0", "1"]
    assert html.exists()
    assert not (sweep / "report.html").exists()


@pytest.mark.beside
def test_losses_are_plotted_into_the_last_file_of_the_arguments(tmp_path):
    sweep = six_runs(tmp_path / "sweep")
    assert main(["losses", str(sweep / "0"), str(sweep / "1"), str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_incidents_are_printed_as_text_or_json(capsys):
    assert output_of(capsys, "diagnose", FIXTURES / "incident").startswith("step 2: ")
    (found,) = json.loads(output_of(capsys, "diagnose", FIXTURES / "incident", "--json"))
    stored = json.loads((INCIDENT / "diagnosis.json").read_text())
    assert found == {**stored, "folder": str(INCIDENT)}


def test_a_run_without_incidents_says_so(capsys):
    run = FIXTURES / "one_process"
    assert output_of(capsys, "diagnose", run) == f"no incidents in {run}\n"
    assert json.loads(output_of(capsys, "diagnose", run, "--json")) == []


def look(step):
    """A line of `metrics.jsonl` of a run whose attention logits double every 100 steps and reach 1e4 near step 997."""
    logits = 10 * 2 ** (step / 100)
    return {"step": step, "train/loss": 5 - step / 500, "lr": 0.3, "monitors/attn_logit_max/blocks.0": logits}


@pytest.mark.beside
def test_the_forecast_of_a_live_run_is_printed_as_text_or_json(tmp_path, capsys):
    lines = [look(step) for step in range(25, 800, 25)]
    run = write(tmp_path / "run", ["optimizer.lr=0.3", "forecast.horizon=400"], lines=lines, status="running")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 800, "train/lo')
    before = {path: path.read_bytes() for path in run.rglob("*")}
    out = output_of(capsys, "forecast", run)
    assert re.search(r"^attention_logits +blocks.0 +1\.81e\+03 +10000 +997 \(\d+-[\d,]+\)$", out, re.MULTILINE)
    assert re.search(r"^loss .* -$", out, re.MULTILINE)
    assert "step 775, look 31:" in out
    found = json.loads(output_of(capsys, "forecast", run, "--json"))
    assert (found["step"], found["looks"], found["horizon"]) == (775, 31, 400)
    assert {each["signal"]: each["at"] for each in found["signals"]} == {"attention_logits": 996.6, "loss": None}
    assert {path: path.read_bytes() for path in run.rglob("*")} == before


@pytest.mark.beside
@pytest.mark.parametrize(
    ("lines", "record", "message"),
    [
        ([], {}, "run has no metrics yet; fix: wait for the first step, or name another run"),
        (
            [{"step": 1, "train/loss": 5.0}],
            {},
            "run: none of 1 lines of metrics.jsonl is a look of the monitors; fix: ",
        ),
        (
            [{"step": 1}],
            {"choices": {"monitors": "none"}},
            "run was trained with monitors=none, so nothing was measured",
        ),
        (None, {}, "is not a folder; fix: name a folder that train.py made, such as outputs/<date>/<time>"),
    ],
)
def test_a_run_that_nothing_can_be_foretold_of_is_refused_in_one_line(tmp_path, capsys, lines, record, message):
    if lines is not None:
        write(tmp_path / "run", lines=lines, **record)
    assert main(["forecast", str(tmp_path / "run")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert message in said


@pytest.mark.parametrize("json_", [False, True])
def test_replay_passes_its_arguments_on_and_prints_text_or_json(monkeypatch, capsys, json_):
    asked = []

    class Found:
        def as_json(self):
            return {"same_bits": True}

        def __str__(self):
            return "the same bits"

    monkeypatch.setattr("stabletrain.cli.replay.replay_incident", lambda *given: asked.append(given) or Found())
    typed = ["replay", "run/incidents/x", "precision=bf16", "zloss=palm", "--config-dir", "mine"]
    out = output_of(capsys, *typed, *["--json"] * json_)
    assert asked == [(Path("run/incidents/x"), ["precision=bf16", "zloss=palm"], Path("mine"))]
    assert (json.loads(out) if json_ else out) == ({"same_bits": True} if json_ else "the same bits\n")


def test_a_link_to_itself_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert main(["replay", str(INCIDENT), "precision=bf16", "--config-dir", "loop"]) == 2
    said = capsys.readouterr().err
    assert "loop" in said
    assert said.count("\n") == 1


@pytest.mark.beside(when=lambda command: command in COMMANDS)
@pytest.mark.parametrize("command", ["sample", "compare", "diagnose", "forecast", "replay", "whatif"])
def test_a_name_that_is_no_utf_8_is_refused_in_one_line(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"bad\xff")
    Path(name).mkdir()
    with pytest.raises(SystemExit) as ended:
        main([command, name])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("the name is no UTF-8, so libraries cannot open it: rename it\n")


@pytest.mark.beside
def test_so_is_one_below_the_folder_that_was_typed(tmp_path, capsys):
    (tmp_path / os.fsdecode(b"bad\xff")).mkdir()
    (tmp_path / os.fsdecode(b"bad\xff") / "run.json").write_text("{}")
    assert main(["compare", str(tmp_path)]) == 2
    assert "bad\\udcff: its name is no UTF-8" in capsys.readouterr().err
