"""Trains with a library on two ranks of DDP, through a loss that is unsafe on rank 1; each writes down what it saw.

torchrun --nproc_per_node=2 -m tests.beside.adapters.worker <lightning or transformers> <place>
"""

import json
import os
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")  # of DDP and the libraries, about a model as small as this one


def with_lightning(place):
    """Returns the guard, the scheduler, the states after each micro-batch, and the number of calls."""
    from tests.beside.adapters import in_lightning as given

    class Module(given.Module):
        def training_step(self, batch, batch_idx):
            self.unsafe = batch_idx if (batch[0][:, 0] == given.MARK).any() else -1
            return super().training_step(batch, batch_idx)

    module, callback = Module(), given.GuardCallback(place / "incidents")
    loader = given.marked(module, given.data(count=16), 9)
    # A loader of its own for each rank: Lightning would deal single samples out.
    rank = int(os.environ["RANK"])
    x, y = (
        tensor.view(8, 2, given.SIZE, *tensor.shape[1:])[:, rank].flatten(0, 1) for tensor in loader.dataset.tensors
    )
    loader = given.DataLoader(given.TensorDataset(x, y), given.SIZE)
    trainer, seen = given.train(module, loader, callback, devices=2, strategy="ddp", use_distributed_sampler=False,
                                gradient_clip_val=0.5, accumulate_grad_batches=2)  # fmt: skip
    return callback.guard, given.scheduler(trainer), seen.states[1::2], module.calls


def with_transformers(place):
    """Returns the same of the Trainer of transformers."""
    from tests.beside.adapters import in_transformers as given

    trainer, seen = given.trainer_of(
        place, given.data(mark=9, count=16), ddp_find_unused_parameters=False, gradient_accumulation_steps=2
    )
    given.likely_(trainer.model)
    callback = given.guarded(trainer, place / "incidents")
    trainer.train()
    return callback.guard, trainer.lr_scheduler, seen.states, len(trainer.losses)


if __name__ == "__main__":
    library, place = sys.argv[1], Path(sys.argv[2])
    guard, scheduler, states, calls = globals()[f"with_{library}"](place)
    found = {
        "skips": guard.skips,
        "lines": [line for incident in guard.incidents for line in incident.lines],
        "last_epoch": scheduler.last_epoch,
        "weights": [float(state["0.0.weight"].double().sum()) for state in states],
        "calls": calls,
    }
    (place / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
