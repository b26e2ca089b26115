"""`compile=true`: the trial is a step's own pass; the compiled model trains, and a step is replayed bit for bit.

Compiled runs are in processes of their own, because the shape checks of the tests cannot be traced; and with `CI` set,
as it is where tests run by themselves, because PyTorch refuses more then.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.records import IGNORE_INDEX, Batch, TrainState
from stabletrain.stability import precision
from stabletrain.trainer import parts
from stabletrain.trainer.build import build
from stabletrain.trainer.parts import warm_up_compiled
from tests.devices import CARD, skip_unless_it_has
from tests.runs import TINY_GPT, command, composed, python

pytestmark = pytest.mark.timeout(900)

NO_COMPILER = not (shutil.which("g++") or shutil.which("clang++"))


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """What acts in a step, at a loss scale of 1024; its objective takes whole logits."""
    with composed(*TINY_GPT, "checkpoint=off", "monitors=none", "precision=fp32") as cfg:
        tools = build(cfg, tmp_path_factory.mktemp("run")).tools
    fp16 = precision.fp16(torch.device("cpu"), init_scale=1024.0, growth_interval=2000, min_scale=1.0)
    return replace(tools, objective=tools.objective.plain, precision=fp16)


@pytest.fixture
def tried(monkeypatch):
    """Has the trial of a compiled model end so, and notes the shape and the loss of its pass."""

    def tried(seconds, why):
        found = {}

        def trial(model, shape, forward, backward, any_rank):
            loss = forward()
            backward(loss)
            found.update(shape=tuple(shape), loss=loss.item())
            return seconds, why

        monkeypatch.setattr(parts, "try_compiled", trial)
        return found

    return tried


def warmed_up(tools, batch, must=False):
    """A linear model after its trial, and what came of it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    state = TrainState(model, torch.optim.SGD(model.parameters()))
    return model, warm_up_compiled(state, batch, tools, must=must, any_rank=bool)


BATCH = Batch(torch.arange(12.0).view(4, 3) / 12, torch.tensor([0, 1, IGNORE_INDEX, 3]))


def test_the_trial_is_the_pass_of_a_step(tools, tried):
    found = tried(12.34, "")
    model, (record, said) = warmed_up(tools, BATCH)
    assert (dict(record), said) == ({"compiled": True, "compile_seconds": 12.3}, "compile  on, in 12 s")
    assert found["shape"] == (4, 3)
    gradient = model.weight.grad.clone()
    model.weight.grad = None
    loss = F.cross_entropy(model(BATCH.inputs), BATCH.targets)
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-2), "of the targets that count, in fp16"
    torch.testing.assert_close(gradient, 1024 * model.weight.grad, rtol=2e-2, atol=1.0)


def test_a_model_that_cannot_be_compiled_trains_uncompiled_unless_it_must_be(tools, tried):
    tried(1.0, "no compiler")
    _, (record, said) = warmed_up(tools, BATCH)
    assert dict(record) == {"compiled": False}
    assert said == "compile  off: no compiler; training continues uncompiled (compile=false skips this attempt)"
    with pytest.raises(
        ConfigError, match=r"compile=true: the model cannot be compiled here \(no compiler\): use compile="
    ):
        warmed_up(tools, BATCH, must=True)


def test_on_an_empty_batch_nothing_is_tried(tools, tried):
    found = tried(1.0, "")
    empty = Batch(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert warmed_up(tools, empty)[1][0] == {"compiled": False}
    with pytest.raises(ConfigError, match="the trial batch is empty"):
        warmed_up(tools, empty, must=True)
    assert not found


CHOSEN = [
    *TINY_GPT,
    "model.n_layer=1",  # each layer is compiled again, to the same code
    "steps=7",
    "eval_every=4",
    "checkpoint.every=4",
    "log_every=1",
    "warmup=none",
    "guard=skip",
    "faults=learning_rate",
    "faults.at=[4]",
    "faults.factor=3e3",
    "report=false",
]
"""A run in which one update is far too large: the steps after it are spikes with finite losses."""

RUNS = {"compiled": ["compile=true"], "chunks": ["compile=true", "loss_chunk=5"], "plain": ["compile=false"]}
WHERE = {"cpu": ["device=cpu"], "cuda": ["device=cuda", "determinism=strict"]}
"""On a GPU only `strict` promises bitwise equal results."""


@pytest.fixture(scope="module", params=["cpu", CARD])
def place(request, tmp_path_factory):
    """The folder that holds the runs."""
    place = tmp_path_factory.mktemp("runs")
    for name, chosen in RUNS.items():
        typed = [*CHOSEN, *WHERE[request.param], *chosen, f"hydra.run.dir={name}"]
        done = command(*typed, cwd=place, timeout=800, CI="true")
        assert done.returncode == 0, done.stderr
        assert ("compile  on, in " in done.stdout) == (name != "plain")
    return place


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler")
def test_a_compiled_run_trains_and_its_checkpoint_has_the_plain_names(place):
    losses, names = [], []
    for run in RUNS:
        lines = [json.loads(line) for line in (place / run / "metrics.jsonl").read_text().splitlines()]
        losses.append(next(line["val/loss"] for line in lines if line["step"] == 4 and "val/loss" in line))
        with safe_open(place / run / "checkpoints" / "step-00000004" / "model.safetensors", "pt") as opened:
            names.append(sorted(opened.keys()))
    assert max(losses) - min(losses) < 0.02
    assert names[0] == names[1] == names[2]
    hardware = json.loads((place / "compiled" / "run.json").read_text())["hardware"]
    assert hardware["compiled"] is True
    assert hardware["compile_seconds"] > 0


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("run", ["compiled", "chunks"])
def test_a_compiled_step_is_replayed_with_the_same_bits_in_the_run(place, run):
    incident = place / run / "incidents" / "step-00000006"
    same = json.loads((incident / "diagnosis.json").read_text())["replays"]["same"]
    assert same["finite"] is True
    assert same["bitwise_equal_to_reading"] is True


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler")
def test_a_compiled_step_is_replayed_with_the_same_bits_from_its_folder(place):
    # Of this run, the model and the chunks of the loss are compiled.
    replay = [
        "-m",
        "stabletrain.cli.commands",
        "replay",
        str(place / "chunks" / "incidents" / "step-00000006"),
        "--json",
    ]
    done = python(*replay, cwd=place, timeout=800)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["same_bits"] is True


@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("device", "recipe"),  # on a CPU both are emulated by the same operations, which take a minute to compile
    [("cpu", "tensorwise"), *(pytest.param("cuda", recipe, marks=CARD.marks) for recipe in ("tensorwise", "rowwise"))],
)
def test_fp8_compiles_and_a_step_is_replayed_with_the_same_bits(tmp_path, recipe, device):
    skip_unless_it_has(device, "fp8")
    chosen = [option for option in CHOSEN if not option.startswith("precision")]
    typed = [*chosen, *WHERE[device], "compile=true", "precision=fp8", f"precision.recipe={recipe}"]
    done = command(*typed, "hydra.run.dir=run", cwd=tmp_path, timeout=800, CI="true")
    assert done.returncode == 0, done.stderr
    assert "compile  on, in " in done.stdout
    assert "6 Linears in fp8, 1 left out (the head)" in done.stdout
    same = json.loads((tmp_path / "run" / "incidents" / "step-00000006" / "diagnosis.json").read_text())["replays"][
        "same"
    ]
    assert same["finite"] is True
    assert same["bitwise_equal_to_reading"] is True
