"""The guard in Lightning's own loop, under its own precision, clipping, accumulation and schedulers."""

import runpy
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from stabletrain.beside.adapters.lightning import GuardCallback
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard.guard import Guard
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from tests.guard.given import batches, bits, network, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's use of a newer PyTorch
    pytest.mark.filterwarnings("ignore:.*srun:"),  # Slurm is installed where these tests run
    pytest.mark.filterwarnings("ignore:.*does not have many workers:"),
    pytest.mark.filterwarnings("ignore:The number of training batches:"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:"),
    pytest.mark.filterwarnings("ignore:.*LightningModule.*logger:"),
]

STEPS = 6
SIZE = 8
MARK = 0.125
"""First value of a sample whose logits are large."""


class Module(pl.LightningModule):
    """A module as users write it: logging, a metric, a list of outputs, a scheduler that is stepped with the optimizer.

    Attributes:
        losses: of all micro-batches.
        unsafe: the micro-batch at which the loss is computed in an unsafe way; -1 for none.
    """

    def __init__(self, unsafe=-1):
        super().__init__()
        self.net = network()
        self.mean = torchmetrics.MeanMetric()
        self.losses, self.calls, self.unsafe = [], 0, unsafe

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.calls += 1
        loss = F.cross_entropy(logits, y)
        if batch_idx == self.unsafe:
            saturated = torch.softmax(logits.float() * torch.where(x[:, :1] == MARK, 1e5, 1.0), dim=1)
            loss = -torch.log(saturated)[torch.arange(len(y)), y].mean()  # the unsafe operation
        self.losses.append(loss.detach())
        self.mean.update(batch_idx)
        self.log("loss", loss)
        self.log_dict({"also": loss})
        self.print("step", batch_idx)
        return {"loss": loss, "more": 1}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Seen(pl.Callback):
    """Copies what a withheld step must not change: at the end of each step, and what each step begins with."""

    def __init__(self):
        self.states, self.logged = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.states.append(bits(pl_module.net, trainer.optimizers[0]))
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def data(fault=None, count=STEPS, parts=1):
    """Batches of Lightning's loader; `fault` is the micro-batch whose sample 3 holds NaN."""
    found = batches(count * parts, SIZE)
    x, y = torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])
    if fault is not None:
        x[fault * SIZE + 3, 1] = float("nan")
    return DataLoader(TensorDataset(x, y), SIZE)


def marked(module, loader, number):
    """The loader, with sample 5 of one micro-batch marked, while another class than its own is likely."""
    module.net[-1].bias.data[0] = 9.0
    loader.dataset.tensors[0][number * SIZE + 5, 0] = MARK
    loader.dataset.tensors[1][number * SIZE + 5] = 1
    return loader


def train(module, loader, *callbacks, seed=2, **options):
    """Trains for one epoch; returns the Trainer and what was seen."""
    seen = Seen()
    chosen = {"logger": False, "enable_checkpointing": False, "max_epochs": 1} | options
    trainer = pl.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        callbacks=[*callbacks, seen], **chosen,
    )  # fmt: skip
    torch.manual_seed(seed)
    trainer.fit(module, loader)
    return trainer, seen


def scheduler(trainer):
    return trainer.lr_scheduler_configs[0].scheduler


def fp16(init_scale=1024.0):
    """Lightning's fp16 on the CPU, which its own choice of precision does not offer."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=init_scale))]}


HARD = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
PRECISIONS = {"fp32": dict, "bf16": lambda: {"precision": "bf16-mixed"}, "fp16": fp16}


@pytest.mark.slow(unless=lambda name: name == "bf16")
@pytest.mark.parametrize("name", PRECISIONS)
def test_where_nothing_is_wrong_every_loss_and_weight_is_that_of_the_plain_run(tmp_path, name):
    plain, guarded, callback = Module(), Module(), GuardCallback(tmp_path)
    trainer, expected = train(plain, data(parts=2), **HARD, **PRECISIONS[name]())
    other, seen = train(guarded, data(parts=2), callback, **HARD, **PRECISIONS[name]())
    assert torch.equal(torch.stack(plain.losses), torch.stack(guarded.losses))
    assert all(same(a, b) for a, b in zip(expected.states, seen.states, strict=True))
    assert expected.logged == seen.logged
    assert scheduler(trainer).last_epoch == scheduler(other).last_epoch == STEPS
    assert callback.guard.skipped == 0
    assert callback.guard.last.grad_norm > 0.5, "the norm from before clipping"
    assert callback.guard.last.loss == pytest.approx(float(sum(guarded.losses[-2:]) / 2)), "of the whole step"


@pytest.mark.slow(unless=lambda name, options: name == "fp16" or not options)
@pytest.mark.parametrize(("name", "options"), [("fp32", {}), ("fp32", HARD), ("bf16", HARD), ("fp16", HARD)])
def test_a_nan_in_one_micro_batch_is_withheld_and_named_and_training_goes_on(tmp_path, name, options):
    parts = options.get("accumulate_grad_batches", 1)
    module, callback = Module(), GuardCallback(tmp_path)
    fault = 3 * parts - 1  # the last micro-batch of the third step
    trainer, seen = train(module, data(fault, parts=parts), callback, **options, **PRECISIONS[name]())
    before, after = seen.states[2 * parts - 1], seen.states[3 * parts - 1]
    assert same(before, after), "weights, moments and BatchNorm's statistics"
    assert not same(after, seen.states[-1])
    guard = callback.guard
    assert guard.skips == {"nonfinite": 1, "spike": 0, "overflow": 0, "state": 0, "recheck": 0, "update": 0}
    assert guard.incidents[0].cause == "poison_input"
    assert f"sample {3 + SIZE * (parts - 1)} of the batch" in guard.incidents[0].verdict
    assert parts == 1 or '"micro_batch": 1, "row": 3' in (guard.incidents[0].path / "report.md").read_text()
    assert scheduler(trainer).last_epoch == STEPS - 1
    assert trainer.global_step == STEPS, "Lightning's own count goes on"
    assert all(torch.isfinite(value).all() for value in module.net.state_dict().values())


@pytest.mark.slow(unless=lambda name: name == "fp16")
@pytest.mark.parametrize("name", PRECISIONS)
def test_an_unsafe_operation_of_the_user_is_named_with_its_line(tmp_path, name):
    module, callback = Module(unsafe=7), GuardCallback(tmp_path)
    trainer, seen = train(module, marked(module, data(parts=2), 7), callback, **HARD, **PRECISIONS[name]())
    assert same(seen.states[5], seen.states[7])
    assert scheduler(trainer).last_epoch == STEPS - 1
    found = callback.guard.incidents[0]
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "the unsafe operation" in text)
    report = (found.path / "report.md").read_text()
    assert found.cause == "unsafe_op"
    assert "aten.log" in found.verdict
    assert f"test_lightning.py:{line}" in report
    assert '"micro_batch": 1, "row": 5' in report
    assert "bitwise equal to the step" in report, "also where Lightning clips"
    assert f"test_lightning.py:{line}" in "".join(found.lines)
    assert "the step is Lightning's" in report


def test_explaining_a_step_neither_logs_nor_counts_nor_touches_metrics(tmp_path):
    module, other, callback = Module(unsafe=2), Module(unsafe=2), GuardCallback(tmp_path / "a", max_incidents=1)
    _, seen = train(module, marked(module, data(), 2), callback)
    _, unexplained = train(other, marked(other, data(), 2), GuardCallback(tmp_path / "b", max_incidents=0))
    assert callback.guard.incidents[0].cause == "unsafe_op"
    assert module.calls == len(module.losses) == STEPS
    assert float(module.mean.compute()) == float(other.mean.compute())
    assert all(same(a, b) for a, b in zip(seen.states, unexplained.states, strict=True)), "generators too"


def test_logged_values_reach_the_logger_once(tmp_path):
    class Direct(Module):
        def training_step(self, batch, batch_idx):
            self.logger.log_metrics({"direct": batch_idx}, step=100 + len(self.losses))
            return super().training_step(batch, batch_idx)

    callback = GuardCallback(tmp_path / "incidents")
    module = Direct(unsafe=2)
    train(module, marked(module, data(), 2), callback, logger=CSVLogger(tmp_path, "logs"))
    rows = next((tmp_path / "logs").rglob("metrics.csv")).read_text().splitlines()[1:]
    assert callback.guard.incidents[0].cause == "unsafe_op"
    assert len([row for row in rows if int(row.split(",")[rows_column(tmp_path, "step")]) >= 100]) == STEPS


def rows_column(folder, name):
    return next((folder / "logs").rglob("metrics.csv")).read_text().splitlines()[0].split(",").index(name)


def test_an_overflow_only_lowers_lightnings_loss_scale_and_its_scheduler_waits(tmp_path):
    callback = GuardCallback(tmp_path)
    plugin = fp16(2.0**60)
    trainer, _ = train(Module(), data(), callback, **plugin)
    assert callback.guard.skips["overflow"] == STEPS
    assert not callback.guard.incidents
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**54
    assert scheduler(trainer).last_epoch == 0


def test_trouble_that_does_not_end_halts_the_training(tmp_path):
    loader = data()
    loader.dataset.tensors[0][2 * SIZE :] = float("nan")
    callback = GuardCallback(tmp_path, policy=SkipGuard(max_consecutive=3), max_incidents=0)
    module = Module()
    with pytest.raises(TrainingHalted, match="3 steps in a row"):
        train(module, loader, callback)
    assert len(module.losses) == 5
    assert "lr_scheduler_step" not in vars(module)
    assert not module._forward_hooks


def test_a_rollback_restores_an_older_state_and_goes_on(tmp_path):
    loader = data(count=10)
    loader.dataset.tensors[0][4 * SIZE : 7 * SIZE] = float("nan")
    policy = RollbackGuard(patience=3, snapshot_every=1, healthy_after=1)
    callback = GuardCallback(tmp_path, policy=policy, max_incidents=0)
    trainer, seen = train(Module(), loader, callback)
    assert callback.guard._loop.policy.rollbacks == 1
    weights = [{name: value for name, value in state.items() if "group" not in name} for state in seen.states]
    assert any(same(weights[6], earlier) for earlier in weights[:4]), "the schedule's learning rate goes on"
    assert not same(weights[6], weights[7])
    assert trainer.global_step == 10


def test_a_checkpoint_of_lightning_carries_the_guard(tmp_path):
    file = tmp_path / "last.ckpt"
    first = GuardCallback(tmp_path, max_incidents=0)
    trainer, _ = train(Module(), data(fault=2), first)
    trainer.save_checkpoint(file)
    second = GuardCallback(tmp_path, max_incidents=0)
    module = Module()
    again = pl.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False, max_epochs=2,
        enable_checkpointing=False, callbacks=[second], log_every_n_steps=1,
    )  # fmt: skip
    again.fit(module, data(fault=1), ckpt_path=file)
    assert second.guard.skips["nonfinite"] == 2
    assert second.guard.state_dict()["step"] == 2 * STEPS


def test_after_training_and_in_the_next_one_nothing_of_the_old_guard_is_left(tmp_path):
    module, callback = Module(), GuardCallback(tmp_path, max_incidents=0)
    trainer, _ = train(module, data(fault=2), callback)
    old = callback.guard
    assert not module._forward_hooks
    assert "training_step" not in vars(trainer.strategy)
    train(module, data(fault=1), callback)
    assert callback.guard is not old
    assert old.skipped == callback.guard.skipped == 1


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Quasi(Module):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Iterating(Module):
    def training_step(self, dataloader_iter):
        return super().training_step(*next(dataloader_iter)[:2])


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Manual, r"automatic_optimization=False: use guard\.step"),
        (Quasi, r"LBFGS.*guard\.step"),
        (Iterating, "take a batch"),
    ],
)
def test_what_cannot_be_guarded_gets_one_clear_error(tmp_path, kind, match):
    warnings.simplefilter("ignore")  # Lightning's, of that kind of loop
    with pytest.raises(ConfigError, match=match):
        train(kind(), data(), GuardCallback(tmp_path))


class Tensors(pl.LightningModule):
    """A module that takes no number of the batch, skips one, and has no scheduler."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch):
        (x,) = batch
        return None if x[0, 0] > 100 else self.net(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("given", [{"loss": "mse"}, {"slow": "quick"}])
def test_what_a_guard_refuses_the_callback_refuses(tmp_path, given):
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=rf"Guard\({name}='{value}'\) is not one of"):
        train(Module(), data(), GuardCallback(tmp_path, **given))


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_a_batch_of_one_element_and_a_batch_that_the_module_skips(tmp_path):
    x = torch.cat([x for x, _ in batches(4, SIZE)])
    x[SIZE, 0] = 1000
    x[2 * SIZE + 5] = float("nan")
    callback = GuardCallback(tmp_path)
    train(Tensors(), DataLoader(TensorDataset(x), SIZE), callback)
    assert callback.guard.skipped == 1
    assert "sample 5 of the batch" in callback.guard.incidents[0].verdict


def test_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "guard_lightning.py"), run_name="__main__")
    assert "4 steps withheld of 32" in capsys.readouterr().out


def test_a_loaded_state_is_given_back_until_the_next_training_begins_with_it(tmp_path):
    model = network()
    callback = GuardCallback()
    callback.guard = Guard.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path
    )  # of the last one
    state = {**callback.guard.state_dict(), "step": 7}
    callback.load_state_dict(state)
    assert callback.state_dict() == state
    assert GuardCallback().state_dict() == {}
