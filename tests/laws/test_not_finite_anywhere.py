"""Law 3 for what is finite in loss and gradients: a buffer alone, or a loss with finite gradients, closes the gate."""

import json
import math

import pytest
import torch
from torch import nn

from stabletrain.errors import TrainingHalted
from stabletrain.trainer import stages
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import TINY_GPT, TINY_RESNET, composed

MODELS = {"gpt": TINY_GPT, "resnet": [*TINY_RESNET, "model.depth=8", "batch_size=4"]}
CHOSEN = ["guard=skip", "steps=4", "warmup=none", "schedule=constant", "checkpoint=off"]


class Keeps(nn.Module):
    """A layer with buffers that are not saved: `at[call]` is added to two of them in that call of the layer."""

    def __init__(self, layer, at, mask=0.0):
        super().__init__()
        self.layer, self.at = layer, at
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("in_place", torch.zeros(3), persistent=False)
        self.register_buffer("replaced", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.full((3,), mask), persistent=False)

    def forward(self, x):
        if not self.training:
            return self.layer(x)
        write = self.at.get(int(self.calls), 1.0)
        self.calls += 1
        self.in_place.mul_(0.9).add_(write)
        self.replaced = self.replaced * 0.9 + write
        return self.layer(x)


def with_buffers(build_model, at, mask):
    """Returns `make_model` that puts the middle layer of the model into `Keeps`."""

    def make(*arguments):
        model = build_model(*arguments)
        places = [(parent, name) for parent in model.modules() for name, child in parent.named_children()
                  if isinstance(child, nn.Linear | nn.Conv2d)]  # fmt: skip
        parent, name = places[len(places) // 2]
        setattr(parent, name, Keeps(getattr(parent, name), at, mask))
        return model

    return make


def keeps_of(model):
    return next(module for module in model.modules() if isinstance(module, Keeps))


def incidents(folder):
    """Returns the incidents' records, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("incidents/*/diagnosis.json"))]


@pytest.mark.slow(unless=lambda value: value == math.inf)
@pytest.mark.parametrize(
    ("model", "precision", "value"),
    [
        ("gpt", "fp32", math.inf),
        ("gpt", "bf16", math.nan),
        ("resnet", "fp32", math.nan),
        ("resnet", "bf16", math.inf),
    ],
)
def test_a_buffer_that_is_spoilt_alone_is_put_back_and_named(tmp_path, monkeypatch, model, precision, value):
    # The layer runs twice in a step. A step that is withheld puts the count of its calls back too, so that every step
    # from the third on is the third for the layer, until the plan ends with this first one.
    at = {4: value}
    monkeypatch.setattr("stabletrain.trainer.stages.make_model", with_buffers(stages.make_model, at, -math.inf))
    chosen = [*MODELS[model], *CHOSEN, f"precision={precision}", "grad_accum_steps=2"]
    with composed(*chosen) as cfg:
        run = build(cfg, tmp_path)
        train(run)
    assert run.tools.guard.skips["nonfinite"] == 2
    keeps = keeps_of(run.state.model)
    assert int(keeps.calls) == 4
    for buffer in (keeps.in_place, keeps.replaced):
        assert torch.equal(buffer, buffer.new_full((3,), float(((0.9 + 1) * 0.9 + 1) * 0.9 + 1)))
    record = incidents(tmp_path)[0]
    assert (record["cause"], record["step"]) == ("unsafe_op", 3)
    assert record["origin"]["source"].startswith(__file__)
    assert "in the buffer" in record["verdict"]


class LogOfNegative:
    """Loss NaN, gradients finite."""

    def __init__(self, **unused):
        pass

    def __call__(self, outputs, batch, n_valid):
        return torch.log(outputs.float().mean() - 1e3)


class Ignored(LogOfNegative):
    """A mean over no target: loss NaN, gradients exactly 0."""

    def __call__(self, outputs, batch, n_valid):
        rows, targets = outputs.flatten(0, -2), batch.targets.flatten()
        return nn.functional.cross_entropy(rows, torch.full_like(targets, -100))


@pytest.mark.slow(unless=lambda precision, loss: (precision, loss) in (("fp32", Ignored), ("fp16", LogOfNegative)))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("loss", "cause", "op"),
    [(LogOfNegative, "unsafe_op", "aten.log"), (Ignored, "bad_label", "aten.nll_loss_forward")],
)
def test_a_loss_that_is_not_finite_is_withheld_although_its_gradients_are(tmp_path, precision, loss, cause, op):
    with composed(
        *TINY_GPT, *CHOSEN, f"precision={precision}", f"objective._target_={__name__}.{loss.__name__}"
    ) as cfg:
        run = build(cfg, tmp_path)
        before = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
        with pytest.raises(TrainingHalted, match="no update was applied"):
            train(run)
    assert run.tools.guard.skips["nonfinite"] == 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.state.model.state_dict().items())
    record = incidents(tmp_path)[0]
    assert (record["cause"], record["origin"]["op"]) == (cause, op)
    assert record["origin"]["source"].startswith(__file__)
