"""A model and a Trainer as users of transformers write them; importing it takes seconds."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from transformers import Trainer, TrainerCallback, TrainingArguments

from stabletrain.beside.adapters.transformers import GuardCallback
from tests.beside.adapters.given import MARK, SIZE, STEPS
from tests.guard.given import batches, bits, network


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


class Quasi(InOrder):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.LBFGS(self.model.parameters())
        return self.optimizer


class Direct(InOrder):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()
