"""A user's own model and data, from a folder outside the project, trained with the ordinary command."""

import json
import textwrap

import pytest

from tests.runs import command

CODE = '''
import torch
from torch import nn
from stabletrain.records import Batch

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, inputs):
        return self.net(inputs)

class Data:
    """Three clouds of points; one poisoned batch, if asked for."""
    def __init__(self, noise, poisoned_step=None):
        self.noise, self.poisoned_step = noise, poisoned_step

    def batch(self, step, size, split):
        generator = torch.Generator().manual_seed(step + (10**6 if split == "val" else 0))
        targets = torch.randint(3, (size,), generator=generator)
        inputs = torch.eye(8)[targets] + self.noise * torch.randn(size, 8, generator=generator)
        if split == "train" and step == self.poisoned_step:
            inputs[0, 0] = float("nan")
        return Batch(inputs, targets)
'''


@pytest.fixture
def plugin(tmp_path):
    """A user's config folder, beside the code that it names."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(CODE))
    for group, text in {
        "model": "_target_: mine.Model\nwidth: 16\n",
        "data": "_target_: mine.Data\nnoise: 0.1\npoisoned_step: null\n",
    }.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(text)
    return tmp_path


def run(plugin, *overrides):
    chosen = ["model=mine", "data=mine", "steps=60", "eval_every=60", "batch_size=16", "wandb=disabled", "device=cpu"]
    where = ["--config-dir", str(plugin / "conf"), "hydra.run.dir=run"]
    done = command(*where, *chosen, "optimizer.lr=0.03", *overrides, cwd=plugin, PYTHONPATH=str(plugin))
    return done, plugin / "run"


def test_a_users_model_and_data_are_trained_evaluated_and_guarded(plugin):
    done, folder = run(plugin, "data.poisoned_step=7")
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "run.json").read_text())
    assert record["final"]["val/accuracy"] > 0.99
    assert record["choices"]["model"] == "mine"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [(e["step"], e["kind"]) for e in events if e["event"] == "skip"] == [(8, "bad_data")]


def test_a_mistake_in_a_users_yaml_is_one_message(plugin):
    done, _ = run(plugin, "model.width=many")
    assert done.returncode == 2
    assert (
        done.stderr.strip() == "stabletrain: model.width=many is not a whole number; fix: model.width=16, the default"
    )


@pytest.mark.slow
def test_a_run_of_plugins_is_resumed_by_its_folder_alone(plugin):
    assert run(plugin)[0].returncode == 0
    more = command("resume=run", "steps=70", cwd=plugin, PYTHONPATH=str(plugin))
    assert more.returncode == 0, more.stderr
    assert json.loads((plugin / "run" / "run.json").read_text())["final"]["steps"] == 70


def test_a_misspelt_key_of_a_users_own_is_found(plugin):
    done, _ = run(plugin, "model.wdith=3")
    assert done.stderr == "stabletrain: model.wdith: there is no such key; did you mean model.width?\n"


@pytest.mark.parametrize(
    ("code", "wrong", "message"),
    [
        (
            "return Batch(inputs, targets)",
            "return inputs, inputs",
            "data: batch() returned a tuple: return stabletrain.records.Batch(inputs, targets)",
        ),
        (
            "return self.net(inputs)",
            "return {'scores': self.net(inputs)}",
            "model: forward() gave a dict for targets of [2]: logits are [batch, classes], ",
        ),
    ],
)
def test_a_broken_contract_is_named(plugin, code, wrong, message):
    file = plugin / "mine.py"
    file.write_text(file.read_text().replace(code, wrong))
    done, folder = run(plugin)
    assert done.returncode == 2
    assert done.stderr.startswith(f"stabletrain: {message}")
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"


def test_qknorm_with_a_model_that_does_not_take_it_is_refused(plugin):
    done, _ = run(plugin, "stability=qknorm")
    assert done.returncode == 2
    assert "stability=qknorm sets qknorm=layernorm, which does nothing with model=mine" in done.stderr
    assert "because its YAML takes no qknorm; fix: " in done.stderr


@pytest.mark.slow
def test_a_shape_error_in_a_users_model_prints_its_own_lines(plugin):
    file = plugin / "mine.py"
    file.write_text(file.read_text().replace("return self.net(inputs)", "return self.net(inputs[:, 1:])"))
    done, folder = run(plugin)
    assert done.returncode == 1
    assert not done.stderr.endswith("\n\n")
    lines = done.stderr.strip().splitlines()
    assert lines[0] == f"Traceback (your code; all of it in {folder / 'traceback.txt'}):"
    assert lines[1].startswith(f'  File "{file}", line ')
    assert lines[-1].startswith("RuntimeError: ")
    assert len(lines) < 8
    assert "torch/nn/modules" in (folder / "traceback.txt").read_text()
