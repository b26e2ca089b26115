"""The examples with a loss of their own learn on real data, and their faults are found, named and replayed."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

from examples.regression import Diabetes
from examples.simclr import NTXent, TwoViews
from examples.vae import ELBO, Digits, Output
from stabletrain.cli.commands import main
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.records import Batch
from stabletrain.stability.objective import Custom
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import ROOT, command, composed

CONF = [f"hydra.searchpath=[{ROOT / 'examples' / 'conf'}]"]
SMALL = ["device=cpu", "wandb=disabled", "report=false", "precision=fp32", "guard=skip", "monitors=none"]

DATA = {"regression": Diabetes(0), "vae": Digits(0), "simclr": TwoViews(0, shift=1, noise=0.1)}


@contextmanager
def trained(folder: Path, *overrides: str) -> Iterator[Any]:
    """A finished run in `folder`."""
    with composed(*CONF, *SMALL, *overrides) as cfg:
        job = build(cfg, folder)
        train(job)
        yield job


def logged(folder: Path, name: str) -> list[float]:
    """All values of a metric, in order."""
    return [row[name] for row in read_jsonl(folder / "metrics.jsonl") if name in row]


@pytest.mark.parametrize("name", DATA)
def test_a_batch_is_a_pure_function_of_its_arguments(name):
    data = DATA[name]
    first, again, later, held_out = (
        data.batch(*each) for each in ((3, 8, "train"),) * 2 + ((4, 8, "train"), (0, 8, "val"))
    )
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, later.inputs)
    assert not torch.equal(first.inputs, held_out.inputs)
    sizes = [len(data.batch(step, 64, "val")) for step in range(data.batches(64, "val"))]
    assert all(sizes)


def test_the_two_views_of_an_image_differ():
    views = DATA["simclr"].batch(0, 16, "train").inputs
    assert views.shape == (16, 2, 1, 8, 8)
    assert not torch.equal(views[:, 0], views[:, 1])


# ---- losses


def outputs_of_a_vae() -> Output:
    generator = torch.Generator().manual_seed(0)
    return Output(*(torch.randn(6, size, generator=generator) for size in (64, 4, 4)))


def test_the_elbo_is_the_cross_entropy_of_pixels_plus_the_divergence_per_pixel():
    outputs, images = outputs_of_a_vae(), torch.rand(6, 64)
    terms = ELBO(beta=2.0, from_logits=True)(outputs, Batch(images, images), torch.tensor(6 * 64))
    normal = Normal(outputs.mean, (outputs.log_variance / 2).exp())
    divergence = kl_divergence(normal, Normal(0.0, 1.0)).sum() / (6 * 64)
    pixels = F.binary_cross_entropy(outputs.logits.sigmoid(), images)
    torch.testing.assert_close(terms.parts["kl"], divergence)
    torch.testing.assert_close(terms.parts["reconstruction"], pixels)
    torch.testing.assert_close(terms.total, pixels + 2 * divergence)
    unsafe = ELBO(beta=2.0, from_logits=False)(outputs, Batch(images, images), torch.tensor(6 * 64))
    torch.testing.assert_close(unsafe.total, terms.total)


def test_nt_xent_is_the_formula_of_the_paper():
    """Equation 1 of arXiv 2002.05709, term by term in fp64; the order of the two views does not matter."""
    views = torch.randn(5, 2, 7, generator=torch.Generator().manual_seed(0))
    batch, temperature = Batch(views, torch.zeros(5, dtype=torch.long)), 0.5
    unit = F.normalize(views.double(), dim=-1)
    total = 0.0
    for sample in range(5):
        for view in range(2):
            mine = unit[sample, view]
            others = [(i, j) for i in range(5) for j in range(2) if (i, j) != (sample, view)]
            shares = {other: math.exp(float(mine @ unit[other]) / temperature) for other in others}
            total -= math.log(shares[sample, 1 - view] / sum(shares.values())) / 10
    for stable in (True, False):
        loss = NTXent(temperature, stable)
        assert float(loss(views, batch, torch.tensor(5))) == pytest.approx(total, rel=1e-5)
        assert float(loss(views.flip(1), batch, torch.tensor(5))) == pytest.approx(total, rel=1e-5)


def test_the_metrics_of_simclr_count_nearest_views():
    first = torch.eye(4)
    second = first[[0, 1, 3, 2]]  # the second views of samples 2 and 3 are exchanged
    batch = Batch(first, torch.tensor([0, 1, 2, 2]))
    found = NTXent(0.5, True).metrics(torch.stack([first, second], dim=1), batch)
    assert {name: float(value) for name, value in found.items()} == {"same_image": 0.5, "same_digit": 1.0}


# ---- learning


def test_regression_explains_much_of_the_variance(tmp_path):
    with trained(tmp_path, "experiment=regression", "steps=100") as job:
        assert job.history.val["val/r2"] > 0.4
    first = next(iter(read_jsonl(tmp_path / "metrics.jsonl")))
    assert "train/loss" in first
    assert "train/ce" not in first


@pytest.mark.slow
def test_the_vae_learns_and_logs_its_terms(tmp_path):
    with trained(tmp_path, "experiment=vae", "steps=500") as job:
        val = job.history.val
    loss, kl = logged(tmp_path, "train/loss"), logged(tmp_path, "train/kl")
    assert loss[0] > 0.69, "a coin for each pixel"
    assert val["val/loss"] < 0.4
    assert val["val/loss"] == pytest.approx(val["val/reconstruction"] + val["val/kl"])
    assert kl[-1] > 3 * kl[0], "the code is used"
    both = zip(logged(tmp_path, "train/reconstruction"), kl, strict=True)
    assert loss == pytest.approx([sum(terms) for terms in both])


@pytest.mark.slow
def test_simclr_finds_the_other_view_of_an_image(tmp_path):
    val = []
    for steps in (1, 200):
        with trained(tmp_path / str(steps), "experiment=simclr", f"steps={steps}", "eval_every=200") as job:
            val.append(job.history.val)
    first, last = val
    assert first["val/same_image"] < 0.25
    assert last["val/same_image"] > 0.5
    assert last["val/same_digit"] > 0.9 > 0.5 > first["val/same_digit"]
    assert last["val/loss"] < 3.0 < 5.0 < first["val/loss"], "log 199 = 5.3 is a guess"


# ---- faults

REGRESSION_FAULT = ["experiment=regression", "data.unrecorded=1", "steps=12"]
VAE_FAULT = [
    *("experiment=vae", "objective.from_logits=false", "steps=60"),
    *("optimizer.lr=2e-2", "warmup.steps=12", "schedule=constant"),
]
SIMCLR_FAULT = ["experiment=simclr", "objective.stable=false", "objective.temperature=0.01", "steps=2"]


def first_incident(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the first incident and its diagnosis."""
    incident = sorted(folder.glob("incidents/step-*"))[0]
    return incident, json.loads((incident / "diagnosis.json").read_text())


def assert_withheld_and_replayed(job: Any, folder: Path, incident: Path, capsys: Any) -> None:
    """The update of the incident's step was not applied, all weights are finite, and a replay gives the same bits."""
    skips = [event["step"] for event in read_jsonl(folder / "events.jsonl") if event["event"] == "skip"]
    assert int(incident.name.removeprefix("step-")) == skips[0]
    assert all(bool(p.isfinite().all()) for p in job.state.model.parameters())
    capsys.readouterr()
    assert main(["replay", "--json", str(incident)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_bits"] is True
    assert found["now"] == found["then"]


def line_of(source: str) -> tuple[str, str]:
    """The file of `file:line` below the project's root, and the text of the line."""
    file, _, number = source.rpartition(":")
    return str(Path(file).relative_to(ROOT)), Path(file).read_text().splitlines()[int(number) - 1].strip()


def test_an_outcome_that_is_nan_is_named_by_its_patient(tmp_path, capsys):
    with trained(tmp_path, *REGRESSION_FAULT) as job:
        incident, diagnosis = first_incident(tmp_path)
        assert_withheld_and_replayed(job, tmp_path, incident, capsys)
    kinds = {event["kind"] for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "skip"}
    assert kinds == {"bad_data"}, "known before the loss is"
    patient = int(DATA["regression"].patients["train"][0])
    assert diagnosis["cause"] == "bad_label"
    assert {(each["id"], each["source"]) for each in diagnosis["samples"]} == {(patient, f"patient {patient}")}
    assert diagnosis["fix"] == [f"correct patient {patient}"]
    assert "target nan is not a finite number" in diagnosis["verdict"]


def test_the_logarithm_of_a_sigmoid_is_named_by_its_line(tmp_path, capsys):
    with trained(tmp_path, *VAE_FAULT) as job:
        incident, diagnosis = first_incident(tmp_path)
        assert_withheld_and_replayed(job, tmp_path, incident, capsys)
    origin = diagnosis["origin"]
    assert (diagnosis["cause"], origin["op"], origin["direction"]) == ("unsafe_op", "aten.log", "forward")
    file, line = line_of(origin["source"])
    assert file == "examples/vae.py"
    assert "(1 - pixels).log()" in line
    finite = [loss for loss in logged(tmp_path, "train/loss") if math.isfinite(loss)]
    assert finite[-1] < 0.5 < finite[0], "the other steps learn"


def test_an_exponential_that_overflows_is_named_by_its_line(tmp_path, capsys):
    with composed(*CONF, *SMALL, *SIMCLR_FAULT) as cfg:
        job = build(cfg, tmp_path)
        before = [p.detach().clone() for p in job.state.model.parameters()]
        with pytest.raises(TrainingHalted, match="no update was applied"):
            train(job)
    assert all(torch.equal(p, q) for p, q in zip(job.state.model.parameters(), before, strict=True))
    incident, diagnosis = first_incident(tmp_path)
    assert_withheld_and_replayed(job, tmp_path, incident, capsys)
    origin = diagnosis["origin"]
    assert (diagnosis["cause"], origin["op"], origin["direction"]) == ("unsafe_op", "aten.exp", "forward")
    assert line_of(origin["source"]) == ("examples/simclr.py", "shares = torch.exp(similar)")
    assert "as softmax and logsumexp do" in diagnosis["fix"][0]


# ---- micro-batches


@pytest.mark.parametrize("experiment", ["regression", "vae"])
def test_micro_batches_give_the_loss_of_the_whole_batch(tmp_path, experiment):
    chosen = [f"experiment={experiment}", "steps=2", "log_every=1", "eval_batches=1"]
    chosen += ["model.dropout=0"] if experiment == "regression" else []
    losses = []
    for parts in (1, 2):
        with trained(tmp_path / str(parts), *chosen, f"grad_accum_steps={parts}"):
            losses.append(logged(tmp_path / str(parts), "train/loss"))
    # The VAE draws other noise in micro-batches; with the initial weights it makes little difference.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if experiment == "regression" else 0.01)


def test_simclr_with_micro_batches_is_refused(tmp_path):
    with composed(*CONF, *SMALL, "experiment=simclr", "grad_accum_steps=2") as cfg, pytest.raises(ConfigError) as error:
        build(cfg, tmp_path)
    assert str(error.value) == (
        "objective=nt_xent couples the samples of a batch, and grad_accum_steps=2 would split the batch: use "
        "grad_accum_steps=1"
    )


# ---- the command of each example


@pytest.mark.slow
@pytest.mark.parametrize("experiment", DATA)
def test_the_command_of_an_example_works_from_the_root(tmp_path, experiment):
    where = ["--config-dir", str(ROOT / "examples" / "conf"), "hydra.run.dir=run"]
    done = command(*where, f"experiment={experiment}", "device=cpu", "wandb=disabled", "steps=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_losses_of_the_page_give_the_same_whatever_they_are_split_into():
    page = (ROOT / "docs" / "objectives.md").read_text()
    code: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], code)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(8, 1, generator=generator).requires_grad_()
    batch = Batch(torch.zeros(8, 1), torch.randn(8, generator=generator))
    for name, arguments in (("huber", {"delta": 1.0}), ("elastic", {"weight": 0.5})):
        objective = Custom(partial(code[name], **arguments))
        whole = objective(outputs, batch, torch.tensor(8)).total
        parts = [
            objective(outputs[i : i + 4], part, torch.tensor(8)).total
            for i, part in zip((0, 4), batch.split(2), strict=True)
        ]
        torch.testing.assert_close(sum(parts), whole)
