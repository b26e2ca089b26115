"""`stabletrain check`: a run is built and checked as it would train, and nothing of it is left."""

import json

import pytest
import torch

from stabletrain.beside.preflight.command import check_run
from stabletrain.cli.commands import main
from tests.runs import TINY_GPT, TINY_RESNET
from tests.shapes import differences, shape

GPT = [each for each in TINY_GPT if not each.startswith("wandb")]
SMALLEST = ["model=gpt2", "model.n_layer=1"]  # a compiler takes most of a second for each operation


def of(report, name):
    return [(each.verdict, each.text) for each in report if each.check == name]


@pytest.mark.slow(unless=lambda words: "grad_accum_steps=2" in words)
@pytest.mark.parametrize(
    "words",
    [
        [*GPT, "precision=fp16", "grad_accum_steps=2"],
        [*GPT, "optimizer=muon", "precision=bf16_params", "model.dropout=0.2", "clipping=adagc"],
        [*GPT, "stability=full", "precision=fp32", "loss_chunk=8"],
        [*TINY_RESNET[:-2], "eval_batches=2", "optimizer=sgd"],
    ],
    ids=" ".join,
)
def test_nothing_is_wrong_with_the_reference(words):
    report = check_run(words)
    assert not report.faults, str(report)
    assert not [each for each in report if each.verdict == "note"], str(report)
    assert {each.check for each in report if each.verdict == "passed"} >= {
        "structure",
        "order",
        "resume",
        "accumulation",
    }


@pytest.mark.slow
def test_a_compiled_run_is_checked_and_the_compilers_time_is_told():
    report = check_run([*GPT, *SMALLEST, "precision=fp32", "compile=true"], ["gradient"])
    assert not report.faults, str(report)
    assert 0 < report.compiling < report.seconds
    assert "of which the compiler took" in report.summary


OPTIMIZER = """
import torch

class Divides(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each -= group["lr"] * each.grad / each.grad.norm()
"""


def test_an_optimizer_of_the_users_is_named_with_its_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "dividing.py").write_text(OPTIMIZER)
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    yaml = "_target_: dividing.Divides\n_partial_: true\nlr: 0.01\n"
    (tmp_path / "conf" / "optimizer" / "mine.yaml").write_text(yaml)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = ["--config-dir", str(tmp_path / "conf"), "optimizer=mine", *GPT, "--json", "--only", "optimizer"]
    assert main(["check", *words]) == 1
    seen = capsys.readouterr()
    found = json.loads(seen.out)
    assert seen.err.startswith("stabletrain: check: preflight: 1 fault, ")
    assert not [*differences(found, shape("check"))]
    [fault] = [each for each in found["findings"] if each["verdict"] == "fault"]
    assert found["faults"] == 1
    assert fault["line"].endswith("dividing.py:12")
    assert "Divides" in fault["text"]
    assert fault["fix"]
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != "__pycache__") == ["conf", "dividing.py"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["steps=0"], "steps=0"),
        (["modle=gpt_mini"], "modle: there is no such key; did you mean model?"),
        (["--only", "resum"], "there is no check 'resum'; the checks are structure, order"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_code_2(words, said, capsys):
    assert main(["check", *GPT, *words]) == 2
    seen = capsys.readouterr()
    assert said in seen.err
    assert seen.err.count("\n") == 1
    assert seen.out == ""


def test_under_torchrun_the_first_process_checks_the_batches_of_all_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["check", *GPT]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["check", *GPT, "--only", "data"]) == 0
    assert "of 2 ranks" in capsys.readouterr().out


def test_random_numbers_go_on_as_before():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_run(GPT, ["structure"])
    assert torch.equal(torch.get_rng_state(), before)
