"""The guard in Lightning's own loop, under its own precision, clipping, accumulation and schedulers."""

import runpy
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard.guard import Guard
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from tests.beside.adapters.given import SIZE, STEPS
from tests.guard.given import batches, network, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's use of a newer PyTorch
    pytest.mark.filterwarnings("ignore:.*srun:"),  # Slurm is installed where these tests run
    pytest.mark.filterwarnings("ignore:.*does not have many workers:"),
    pytest.mark.filterwarnings("ignore:The number of training batches:"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:"),
    pytest.mark.filterwarnings("ignore:.*LightningModule.*logger:"),
]


@pytest.fixture(scope="module")
def lit():
    """Imported with the first test that needs it: most processes run none."""
    from tests.beside.adapters import in_lightning

    return in_lightning


HARD = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
PRECISIONS = {"fp32": lambda _: {}, "bf16": lambda _: {"precision": "bf16-mixed"}, "fp16": lambda lit: lit.fp16()}


@pytest.mark.slow(unless=lambda name: name == "bf16")
@pytest.mark.parametrize("name", PRECISIONS)
def test_where_nothing_is_wrong_every_loss_and_weight_is_that_of_the_plain_run(lit, tmp_path, name):
    plain, guarded, callback = lit.Module(), lit.Module(), lit.GuardCallback(tmp_path)
    trainer, expected = lit.train(plain, lit.data(parts=2), **HARD, **PRECISIONS[name](lit))
    other, seen = lit.train(guarded, lit.data(parts=2), callback, **HARD, **PRECISIONS[name](lit))
    assert torch.equal(torch.stack(plain.losses), torch.stack(guarded.losses))
    assert all(same(a, b) for a, b in zip(expected.states, seen.states, strict=True))
    assert expected.logged == seen.logged
    assert lit.scheduler(trainer).last_epoch == lit.scheduler(other).last_epoch == STEPS
    assert callback.guard.skipped == 0
    assert callback.guard.last.grad_norm > 0.5, "the norm from before clipping"
    assert callback.guard.last.loss == pytest.approx(float(sum(guarded.losses[-2:]) / 2)), "of the whole step"


@pytest.mark.slow(unless=lambda name, options: name == "fp16" or not options)
@pytest.mark.parametrize(("name", "options"), [("fp32", {}), ("fp32", HARD), ("bf16", HARD), ("fp16", HARD)])
def test_a_nan_in_one_micro_batch_is_withheld_and_named_and_training_goes_on(lit, tmp_path, name, options):
    parts = options.get("accumulate_grad_batches", 1)
    module, callback = lit.Module(), lit.GuardCallback(tmp_path)
    fault = 3 * parts - 1  # the last micro-batch of the third step
    trainer, seen = lit.train(module, lit.data(fault, parts=parts), callback, **options, **PRECISIONS[name](lit))
    before, after = seen.states[2 * parts - 1], seen.states[3 * parts - 1]
    assert same(before, after), "weights, moments and BatchNorm's statistics"
    assert not same(after, seen.states[-1])
    guard = callback.guard
    assert guard.skips == {"nonfinite": 1, "spike": 0, "overflow": 0, "state": 0, "recheck": 0, "update": 0}
    assert guard.incidents[0].cause == "poison_input"
    assert f"sample {3 + SIZE * (parts - 1)} of the batch" in guard.incidents[0].verdict
    assert parts == 1 or '"micro_batch": 1, "row": 3' in (guard.incidents[0].path / "report.md").read_text()
    assert lit.scheduler(trainer).last_epoch == STEPS - 1
    assert trainer.global_step == STEPS, "Lightning's own count goes on"
    assert all(torch.isfinite(value).all() for value in module.net.state_dict().values())


@pytest.mark.slow(unless=lambda name: name == "fp16")
@pytest.mark.parametrize("name", PRECISIONS)
def test_an_unsafe_operation_of_the_user_is_named_with_its_line(lit, tmp_path, name):
    module, callback = lit.Module(unsafe=7), lit.GuardCallback(tmp_path)
    trainer, seen = lit.train(
        module, lit.marked(module, lit.data(parts=2), 7), callback, **HARD, **PRECISIONS[name](lit)
    )
    assert same(seen.states[5], seen.states[7])
    assert lit.scheduler(trainer).last_epoch == STEPS - 1
    found = callback.guard.incidents[0]
    lines = Path(lit.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "the unsafe operation" in text)
    report = (found.path / "report.md").read_text()
    assert found.cause == "unsafe_op"
    assert "aten.log" in found.verdict
    assert f"in_lightning.py:{line}" in report
    assert '"micro_batch": 1, "row": 5' in report
    assert "bitwise equal to the step" in report, "also where Lightning clips"
    assert f"in_lightning.py:{line}" in "".join(found.lines)
    assert "the step is Lightning's" in report


def test_explaining_a_step_neither_logs_nor_counts_nor_touches_metrics(lit, tmp_path):
    module, other, callback = (
        lit.Module(unsafe=2),
        lit.Module(unsafe=2),
        lit.GuardCallback(tmp_path / "a", max_incidents=1),
    )
    _, seen = lit.train(module, lit.marked(module, lit.data(), 2), callback)
    _, unexplained = lit.train(
        other, lit.marked(other, lit.data(), 2), lit.GuardCallback(tmp_path / "b", max_incidents=0)
    )
    assert callback.guard.incidents[0].cause == "unsafe_op"
    assert module.calls == len(module.losses) == STEPS
    assert float(module.mean.compute()) == float(other.mean.compute())
    assert all(same(a, b) for a, b in zip(seen.states, unexplained.states, strict=True)), "generators too"


def test_logged_values_reach_the_logger_once(lit, tmp_path):
    class Direct(lit.Module):
        def training_step(self, batch, batch_idx):
            self.logger.log_metrics({"direct": batch_idx}, step=100 + len(self.losses))
            return super().training_step(batch, batch_idx)

    callback = lit.GuardCallback(tmp_path / "incidents")
    module = Direct(unsafe=2)
    lit.train(module, lit.marked(module, lit.data(), 2), callback, logger=lit.CSVLogger(tmp_path, "logs"))
    rows = next((tmp_path / "logs").rglob("metrics.csv")).read_text().splitlines()[1:]
    assert callback.guard.incidents[0].cause == "unsafe_op"
    assert len([row for row in rows if int(row.split(",")[rows_column(tmp_path, "step")]) >= 100]) == STEPS


def rows_column(folder, name):
    return next((folder / "logs").rglob("metrics.csv")).read_text().splitlines()[0].split(",").index(name)


def test_an_overflow_only_lowers_lightnings_loss_scale_and_its_scheduler_waits(lit, tmp_path):
    callback = lit.GuardCallback(tmp_path)
    plugin = lit.fp16(2.0**60)
    trainer, _ = lit.train(lit.Module(), lit.data(), callback, **plugin)
    assert callback.guard.skips["overflow"] == STEPS
    assert not callback.guard.incidents
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**54
    assert lit.scheduler(trainer).last_epoch == 0


def test_trouble_that_does_not_end_halts_the_training(lit, tmp_path):
    loader = lit.data()
    loader.dataset.tensors[0][2 * SIZE :] = float("nan")
    callback = lit.GuardCallback(tmp_path, policy=SkipGuard(max_consecutive=3), max_incidents=0)
    module = lit.Module()
    with pytest.raises(TrainingHalted, match="3 steps in a row"):
        lit.train(module, loader, callback)
    assert len(module.losses) == 5
    assert "lr_scheduler_step" not in vars(module)
    assert not module._forward_hooks


def test_a_rollback_restores_an_older_state_and_goes_on(lit, tmp_path):
    loader = lit.data(count=10)
    loader.dataset.tensors[0][4 * SIZE : 7 * SIZE] = float("nan")
    policy = RollbackGuard(patience=3, snapshot_every=1, healthy_after=1)
    callback = lit.GuardCallback(tmp_path, policy=policy, max_incidents=0)
    trainer, seen = lit.train(lit.Module(), loader, callback)
    assert callback.guard._loop.policy.rollbacks == 1
    weights = [{name: value for name, value in state.items() if "group" not in name} for state in seen.states]
    assert any(same(weights[6], earlier) for earlier in weights[:4]), "the schedule's learning rate goes on"
    assert not same(weights[6], weights[7])
    assert trainer.global_step == 10


def test_a_checkpoint_of_lightning_carries_the_guard(lit, tmp_path):
    file = tmp_path / "last.ckpt"
    first = lit.GuardCallback(tmp_path, max_incidents=0)
    trainer, _ = lit.train(lit.Module(), lit.data(fault=2), first)
    trainer.save_checkpoint(file)
    second = lit.GuardCallback(tmp_path, max_incidents=0)
    module = lit.Module()
    again = lit.pl.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False, max_epochs=2,
        enable_checkpointing=False, callbacks=[second], log_every_n_steps=1,
    )  # fmt: skip
    again.fit(module, lit.data(fault=1), ckpt_path=file)
    assert second.guard.skips["nonfinite"] == 2
    assert second.guard.state_dict()["step"] == 2 * STEPS


def test_after_training_and_in_the_next_one_nothing_of_the_old_guard_is_left(lit, tmp_path):
    module, callback = lit.Module(), lit.GuardCallback(tmp_path, max_incidents=0)
    trainer, _ = lit.train(module, lit.data(fault=2), callback)
    old = callback.guard
    assert not module._forward_hooks
    assert "training_step" not in vars(trainer.strategy)
    lit.train(module, lit.data(fault=1), callback)
    assert callback.guard is not old
    assert old.skipped == callback.guard.skipped == 1


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("Manual", r"automatic_optimization=False: use guard\.step"),
        ("Quasi", r"LBFGS.*guard\.step"),
        ("Iterating", "take a batch"),
    ],
)
def test_what_cannot_be_guarded_gets_one_clear_error(lit, tmp_path, kind, match):
    warnings.simplefilter("ignore")  # Lightning's, of that kind of loop
    with pytest.raises(ConfigError, match=match):
        lit.train(getattr(lit, kind)(), lit.data(), lit.GuardCallback(tmp_path))


@pytest.mark.parametrize("given", [{"loss": "mse"}, {"slow": "quick"}])
def test_what_a_guard_refuses_the_callback_refuses(lit, tmp_path, given):
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=rf"Guard\({name}='{value}'\) is not one of"):
        lit.train(lit.Module(), lit.data(), lit.GuardCallback(tmp_path, **given))


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_a_batch_of_one_element_and_a_batch_that_the_module_skips(lit, tmp_path):
    x = torch.cat([x for x, _ in batches(4, SIZE)])
    x[SIZE, 0] = 1000
    x[2 * SIZE + 5] = float("nan")
    callback = lit.GuardCallback(tmp_path)
    lit.train(lit.Tensors(), DataLoader(TensorDataset(x), SIZE), callback)
    assert callback.guard.skipped == 1
    assert "sample 5 of the batch" in callback.guard.incidents[0].verdict


def test_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "guard_lightning.py"), run_name="__main__")
    assert "4 steps withheld of 32" in capsys.readouterr().out


def test_a_loaded_state_is_given_back_until_the_next_training_begins_with_it(lit, tmp_path):
    model = network()
    callback = lit.GuardCallback()
    callback.guard = Guard.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path
    )  # of the last one
    state = {**callback.guard.state_dict(), "step": 7}
    callback.load_state_dict(state)
    assert callback.state_dict() == state
    assert lit.GuardCallback().state_dict() == {}
