"""The guard in the Trainer of transformers, under its own precision, clipping, accumulation and scheduler."""

import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from tests.guard.given import batches, bits, network, same

# Where datasets is installed, transformers imports it, and with it pyarrow.
pytest.importorskip("transformers.trainer", reason="pyarrow needs NumPy 2, and does not say so", exc_type=ImportError)

from transformers import Trainer, TrainerCallback, TrainingArguments

from stabletrain.beside.adapters.transformers import GuardCallback

STEPS = 6
SIZE = 8
MARK = 0.125
"""First value of a sample whose logits are large."""


class Model(nn.Module):
    """A model that leaves the loss to the Trainer."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, labels=None):
        return {"logits": self.net(x)}


class Own(Trainer):
    """A Trainer as users write it: a loss of its own, logging, a list of losses.

    Attributes:
        losses: of all micro-batches.
        fp16: whether the loss runs under fp16's autocast, which accelerate does not offer on the CPU.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses, self.fp16 = [], False

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        x, y = inputs["x"], inputs["labels"]
        with torch.autocast("cpu", torch.float16, enabled=self.fp16):
            logits = model(x)["logits"].float()
        if (x[:, 0] == MARK).any():
            saturated = torch.softmax(logits * torch.where(x[:, :1] == MARK, 1e5, 1.0), dim=1)
            loss = -torch.log(saturated)[torch.arange(len(y)), y].mean()  # the unsafe operation
        else:
            loss = F.cross_entropy(logits, y)
        self.losses.append(loss.detach())
        self.log({"own": float(loss.detach())})
        return loss


class Seen(TrainerCallback):
    """Copies what a withheld step must not change, after each step."""

    def __init__(self):
        self.states = []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.states.append(bits(model.net, getattr(optimizer, "optimizer", optimizer)))


def data(fault=None, mark=None, count=STEPS, parts=1):
    """Samples; sample 3 of the micro-batch `fault` holds NaN, sample 5 of the micro-batch `mark` has large logits."""
    found = batches(count * parts, SIZE)
    x, y = torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])
    if fault is not None:
        x[fault * SIZE + 3, 1] = float("nan")
    if mark is not None:
        x[mark * SIZE + 5, 0], y[mark * SIZE + 5] = MARK, 1
    return [{"x": sample, "labels": label} for sample, label in zip(x, y, strict=True)]


class InOrder(Own):
    """Reads the samples in order."""

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer_of(folder, samples, kind=InOrder, fp16=None, model=None, **options):
    """Builds a Trainer, and what is seen of it."""
    chosen = {"num_train_epochs": 1, "max_grad_norm": 0.5, "save_strategy": "no"} | options
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=SIZE, learning_rate=1e-2, lr_scheduler_type="linear", report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1, seed=2, **chosen,
    )  # fmt: skip
    seen = Seen()
    trainer = kind(model or Model(), arguments, train_dataset=samples, callbacks=[seen])
    if fp16:
        trainer.fp16, trainer.accelerator.scaler = True, GradScaler("cpu", init_scale=fp16)
        trainer.accelerator.native_amp = True
        trainer.accelerator.state._mixed_precision = "fp16"  # else accelerate does not unscale before it clips
    return trainer, seen


def likely_(model):
    """Makes one class likely, which is not that of the marked sample."""
    model.net[-1].bias.data[0] = 9.0


def guarded(trainer, folder, **options):
    callback = GuardCallback(trainer, folder, **options)
    trainer.add_callback(callback)
    return callback


@pytest.fixture(autouse=True)
def _fresh_state():
    """accelerate keeps its state for the whole process."""
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)


PRECISIONS = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": 1024.0}}
HARD = {"gradient_accumulation_steps": 2}


@pytest.mark.slow(unless=lambda name: name == "bf16")
@pytest.mark.parametrize("name", PRECISIONS)
def test_where_nothing_is_wrong_every_loss_and_weight_is_that_of_the_plain_run(tmp_path, name):
    plain, expected = trainer_of(tmp_path, data(parts=2), **HARD, **PRECISIONS[name])
    plain.train()
    trainer, seen = trainer_of(tmp_path, data(parts=2), **HARD, **PRECISIONS[name])
    callback = guarded(trainer, tmp_path / "incidents")
    trainer.train()
    assert torch.equal(torch.stack(plain.losses), torch.stack(trainer.losses))
    assert all(same(a, b) for a, b in zip(expected.states, seen.states, strict=True))
    timeless = [
        [{k: v for k, v in row.items() if "train_" not in k} for row in t.state.log_history] for t in (plain, trainer)
    ]
    assert timeless[0] == timeless[1]
    assert trainer.lr_scheduler.last_epoch == plain.lr_scheduler.last_epoch == STEPS
    assert callback.guard.skipped == 0
    assert callback.guard.last.grad_norm > 0.5, "the norm from before clipping"
    assert callback.guard.last.loss == pytest.approx(float(sum(trainer.losses[-2:]) / 2)), "of the whole step"


@pytest.mark.slow(unless=lambda name, options: name == "fp16" or not options)
@pytest.mark.parametrize(("name", "options"), [("fp32", {}), ("fp32", HARD), ("bf16", HARD), ("fp16", HARD)])
def test_a_nan_in_one_micro_batch_is_withheld_and_named_and_training_goes_on(tmp_path, name, options):
    parts = options.get("gradient_accumulation_steps", 1)
    fault = 3 * parts - 1  # the last micro-batch of the third step
    trainer, seen = trainer_of(tmp_path, data(fault, parts=parts), **options, **PRECISIONS[name])
    callback = guarded(trainer, tmp_path / "incidents")
    trainer.train()
    assert same(seen.states[1], seen.states[2]), "weights, moments and BatchNorm's statistics"
    assert not same(seen.states[2], seen.states[3])
    guard = callback.guard
    assert guard.skips == {"nonfinite": 1, "spike": 0, "overflow": 0, "state": 0, "recheck": 0, "update": 0}
    assert guard.incidents[0].cause == "poison_input"
    assert f"sample {3 + SIZE * (parts - 1)} of the batch" in guard.incidents[0].verdict
    assert "'x' of the batch" in guard.incidents[0].verdict
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    assert trainer.state.global_step == STEPS, "the Trainer's own count goes on"
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())


@pytest.mark.slow(unless=lambda name: name == "fp16")
@pytest.mark.parametrize("name", PRECISIONS)
def test_an_unsafe_operation_of_the_user_is_named_with_its_line(tmp_path, name):
    trainer, seen = trainer_of(tmp_path, data(mark=7, parts=2), **HARD, **PRECISIONS[name])
    likely_(trainer.model)
    callback = guarded(trainer, tmp_path / "incidents")
    trainer.train()
    assert same(seen.states[2], seen.states[3])
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    found = callback.guard.incidents[0]
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "the unsafe operation" in text)
    report = (found.path / "report.md").read_text()
    assert found.cause == "unsafe_op"
    assert "aten.log" in found.verdict
    assert f"test_transformers.py:{line}" in "".join(found.lines)
    assert '"micro_batch": 1, "row": 5' in report
    assert "bitwise equal to the step" in report, "also where the Trainer clips"
    assert "the step is the Trainer's" in report


def test_explaining_a_step_neither_logs_nor_counts_nor_draws(tmp_path):
    runs = []
    for budget in (1, 0):
        trainer, seen = trainer_of(tmp_path, data(mark=2))
        likely_(trainer.model)
        callback = guarded(trainer, tmp_path / f"{budget}", max_incidents=budget)
        trainer.train()
        assert len(callback.guard.incidents) == budget
        assert len(trainer.losses) == STEPS
        assert len([row for row in trainer.state.log_history if "own" in row]) == STEPS
        runs.append(seen.states)
    assert all(same(a, b) for a, b in zip(*runs, strict=True))


def test_an_overflow_only_lowers_the_loss_scale_and_the_scheduler_waits(tmp_path):
    trainer, _ = trainer_of(tmp_path, data(), fp16=2.0**60)
    callback = guarded(trainer, tmp_path / "incidents")
    trainer.train()
    assert callback.guard.skips["overflow"] == STEPS
    assert not callback.guard.incidents
    assert trainer.accelerator.scaler.get_scale() == 2.0**54
    assert trainer.lr_scheduler.last_epoch == 0


def test_trouble_that_does_not_end_halts_the_training(tmp_path):
    samples = data()
    for sample in samples[2 * SIZE :]:
        sample["x"] = sample["x"] * float("nan")
    trainer, _ = trainer_of(tmp_path, samples)
    guarded(trainer, tmp_path / "incidents", policy=SkipGuard(max_consecutive=3), max_incidents=0)
    with pytest.raises(TrainingHalted, match="3 steps in a row"):
        trainer.train()
    assert len(trainer.losses) == 5


def test_a_rollback_restores_an_older_state_and_goes_on(tmp_path):
    samples = data(count=10)
    for sample in samples[4 * SIZE : 7 * SIZE]:
        sample["x"] = sample["x"] * float("nan")
    trainer, seen = trainer_of(tmp_path, samples)
    policy = RollbackGuard(patience=3, snapshot_every=1, healthy_after=1)
    callback = guarded(trainer, tmp_path / "incidents", policy=policy, max_incidents=0)
    trainer.train()
    weights = [{name: value for name, value in state.items() if "group" not in name} for state in seen.states]
    assert callback.guard._loop.policy.rollbacks == 1
    assert any(same(weights[6], earlier) for earlier in weights[:4])
    assert not same(weights[6], weights[7])


def test_a_checkpoint_of_the_trainer_carries_the_guard(tmp_path):
    trainer, _ = trainer_of(tmp_path, data(fault=2), save_strategy="steps", save_steps=3)
    guarded(trainer, tmp_path / "incidents", max_incidents=0)
    trainer.train()
    again, _ = trainer_of(tmp_path, data(fault=4), save_strategy="no")
    callback = guarded(again, tmp_path / "incidents", max_incidents=0)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert callback.guard.skips["nonfinite"] == 2, "one before the checkpoint, one after"
    assert callback.guard.state_dict()["step"] == STEPS
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["stateful_callbacks"]


def test_after_training_and_in_the_next_one_nothing_of_the_old_guard_is_left(tmp_path):
    trainer, _ = trainer_of(tmp_path, data(fault=2))
    callback = guarded(trainer, tmp_path / "incidents", max_incidents=0)
    trainer.train()
    old = callback.guard
    assert "training_step" not in vars(trainer)
    assert not {"backward", "unscale_gradients"} & vars(trainer.accelerator).keys()
    assert not trainer.model._forward_hooks
    trainer.train()
    assert callback.guard is not old
    assert old.skipped == callback.guard.skipped == 1


class Quasi(InOrder):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.LBFGS(self.model.parameters())
        return self.optimizer


class Direct(InOrder):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize(("kind", "match"), [(Quasi, r"LBFGS.*guard\.step"), (Direct, r"accelerator\.backward")])
def test_what_cannot_be_guarded_gets_one_clear_error(tmp_path, kind, match):
    trainer, _ = trainer_of(tmp_path, data(), kind)
    guarded(trainer, tmp_path / "incidents")
    with pytest.raises(ConfigError, match=match):
        trainer.train()


@pytest.mark.parametrize("given", [{"loss": "mse"}, {"slow": "quick"}])
def test_what_a_guard_refuses_the_callback_refuses(tmp_path, given):
    ((name, value),) = given.items()
    trainer, _ = trainer_of(tmp_path / "out", data())
    guarded(trainer, tmp_path, **given)
    with pytest.raises(ConfigError, match=rf"Guard\({name}='{value}'\) is not one of"):
        trainer.train()


@pytest.mark.slow
def test_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "guard_transformers.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "2 steps withheld of 16: " in said
    assert "aten.exp" in said
    assert "guard_transformers.py:" in next((tmp_path / "incidents").glob("*/report.md")).read_text()
