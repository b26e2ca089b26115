"""The guard in the Trainer of transformers, under its own precision, clipping, accumulation and scheduler."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from tests.beside.adapters.given import SIZE, STEPS
from tests.guard.given import same


@pytest.fixture(scope="module")
def hf():
    """Imported with the first test that needs it: most processes run none."""
    # Where datasets is installed, transformers imports it, and with it pyarrow.
    why = "pyarrow needs NumPy 2, and does not say so"
    pytest.importorskip("transformers.trainer", reason=why, exc_type=ImportError)
    from tests.beside.adapters import in_transformers

    return in_transformers


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
def test_where_nothing_is_wrong_every_loss_and_weight_is_that_of_the_plain_run(hf, tmp_path, name):
    plain, expected = hf.trainer_of(tmp_path, hf.data(parts=2), **HARD, **PRECISIONS[name])
    plain.train()
    trainer, seen = hf.trainer_of(tmp_path, hf.data(parts=2), **HARD, **PRECISIONS[name])
    callback = hf.guarded(trainer, tmp_path / "incidents")
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
def test_a_nan_in_one_micro_batch_is_withheld_and_named_and_training_goes_on(hf, tmp_path, name, options):
    parts = options.get("gradient_accumulation_steps", 1)
    fault = 3 * parts - 1  # the last micro-batch of the third step
    trainer, seen = hf.trainer_of(tmp_path, hf.data(fault, parts=parts), **options, **PRECISIONS[name])
    callback = hf.guarded(trainer, tmp_path / "incidents")
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
def test_an_unsafe_operation_of_the_user_is_named_with_its_line(hf, tmp_path, name):
    trainer, seen = hf.trainer_of(tmp_path, hf.data(mark=7, parts=2), **HARD, **PRECISIONS[name])
    hf.likely_(trainer.model)
    callback = hf.guarded(trainer, tmp_path / "incidents")
    trainer.train()
    assert same(seen.states[2], seen.states[3])
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    found = callback.guard.incidents[0]
    lines = Path(hf.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "the unsafe operation" in text)
    report = (found.path / "report.md").read_text()
    assert found.cause == "unsafe_op"
    assert "aten.log" in found.verdict
    assert f"in_transformers.py:{line}" in "".join(found.lines)
    assert '"micro_batch": 1, "row": 5' in report
    assert "bitwise equal to the step" in report, "also where the Trainer clips"
    assert "the step is the Trainer's" in report


def test_explaining_a_step_neither_logs_nor_counts_nor_draws(hf, tmp_path):
    runs = []
    for budget in (1, 0):
        trainer, seen = hf.trainer_of(tmp_path, hf.data(mark=2))
        hf.likely_(trainer.model)
        callback = hf.guarded(trainer, tmp_path / f"{budget}", max_incidents=budget)
        trainer.train()
        assert len(callback.guard.incidents) == budget
        assert len(trainer.losses) == STEPS
        assert len([row for row in trainer.state.log_history if "own" in row]) == STEPS
        runs.append(seen.states)
    assert all(same(a, b) for a, b in zip(*runs, strict=True))


def test_an_overflow_only_lowers_the_loss_scale_and_the_scheduler_waits(hf, tmp_path):
    trainer, _ = hf.trainer_of(tmp_path, hf.data(), fp16=2.0**60)
    callback = hf.guarded(trainer, tmp_path / "incidents")
    trainer.train()
    assert callback.guard.skips["overflow"] == STEPS
    assert not callback.guard.incidents
    assert trainer.accelerator.scaler.get_scale() == 2.0**54
    assert trainer.lr_scheduler.last_epoch == 0


def test_trouble_that_does_not_end_halts_the_training(hf, tmp_path):
    samples = hf.data()
    for sample in samples[2 * SIZE :]:
        sample["x"] = sample["x"] * float("nan")
    trainer, _ = hf.trainer_of(tmp_path, samples)
    hf.guarded(trainer, tmp_path / "incidents", policy=SkipGuard(max_consecutive=3), max_incidents=0)
    with pytest.raises(TrainingHalted, match="3 steps in a row"):
        trainer.train()
    assert len(trainer.losses) == 5


def test_a_rollback_restores_an_older_state_and_goes_on(hf, tmp_path):
    samples = hf.data(count=10)
    for sample in samples[4 * SIZE : 7 * SIZE]:
        sample["x"] = sample["x"] * float("nan")
    trainer, seen = hf.trainer_of(tmp_path, samples)
    policy = RollbackGuard(patience=3, snapshot_every=1, healthy_after=1)
    callback = hf.guarded(trainer, tmp_path / "incidents", policy=policy, max_incidents=0)
    trainer.train()
    weights = [{name: value for name, value in state.items() if "group" not in name} for state in seen.states]
    assert callback.guard._loop.policy.rollbacks == 1
    assert any(same(weights[6], earlier) for earlier in weights[:4])
    assert not same(weights[6], weights[7])


def test_a_checkpoint_of_the_trainer_carries_the_guard(hf, tmp_path):
    trainer, _ = hf.trainer_of(tmp_path, hf.data(fault=2), save_strategy="steps", save_steps=3)
    hf.guarded(trainer, tmp_path / "incidents", max_incidents=0)
    trainer.train()
    again, _ = hf.trainer_of(tmp_path, hf.data(fault=4), save_strategy="no")
    callback = hf.guarded(again, tmp_path / "incidents", max_incidents=0)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert callback.guard.skips["nonfinite"] == 2, "one before the checkpoint, one after"
    assert callback.guard.state_dict()["step"] == STEPS
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["stateful_callbacks"]


def test_after_training_and_in_the_next_one_nothing_of_the_old_guard_is_left(hf, tmp_path):
    trainer, _ = hf.trainer_of(tmp_path, hf.data(fault=2))
    callback = hf.guarded(trainer, tmp_path / "incidents", max_incidents=0)
    trainer.train()
    old = callback.guard
    assert "training_step" not in vars(trainer)
    assert not {"backward", "unscale_gradients"} & vars(trainer.accelerator).keys()
    assert not trainer.model._forward_hooks
    trainer.train()
    assert callback.guard is not old
    assert old.skipped == callback.guard.skipped == 1


@pytest.mark.parametrize(("kind", "match"), [("Quasi", r"LBFGS.*guard\.step"), ("Direct", r"accelerator\.backward")])
def test_what_cannot_be_guarded_gets_one_clear_error(hf, tmp_path, kind, match):
    trainer, _ = hf.trainer_of(tmp_path, hf.data(), getattr(hf, kind))
    hf.guarded(trainer, tmp_path / "incidents")
    with pytest.raises(ConfigError, match=match):
        trainer.train()


@pytest.mark.parametrize("given", [{"loss": "mse"}, {"slow": "quick"}])
def test_what_a_guard_refuses_the_callback_refuses(hf, tmp_path, given):
    ((name, value),) = given.items()
    trainer, _ = hf.trainer_of(tmp_path / "out", hf.data())
    hf.guarded(trainer, tmp_path, **given)
    with pytest.raises(ConfigError, match=rf"Guard\({name}='{value}'\) is not one of"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.usefixtures("hf")
def test_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "guard_transformers.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "2 steps withheld of 16: " in said
    assert "aten.exp" in said
    assert "guard_transformers.py:" in next((tmp_path / "incidents").glob("*/report.md")).read_text()
