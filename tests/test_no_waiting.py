"""The step never synchronizes with the host: on a GPU that would drain the launch queue.

A dispatch mode sees each synchronization, on every device: `item()`, `bool()`, `float()` and `nonzero()` of a tensor
are operations of their own.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.in_flight import InFlight
from stabletrain.step import commit, compute
from stabletrain.trainer import loop, step_graph
from stabletrain.trainer.build import build
from tests.runs import TINY_GPT, TINY_RESNET, composed

WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "_unique2", "masked_select"}


class Questions(TorchDispatchMode):
    """Records every operation whose result the host needs before it can continue."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in WAITING:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow(
    unless=lambda tiny, guard, precision: (
        (guard == "rollback" and (tiny is TINY_GPT or precision == "bf16")) or (guard, precision) == ("skip", "bf16")
    )
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("guard", ["off", "skip", "rollback"])
@pytest.mark.parametrize("tiny", [TINY_GPT, [*TINY_RESNET, "model.depth=8"]], ids=["gpt", "resnet"])
def test_a_step_asks_nothing_of_the_host(tmp_path, tiny, guard, precision):
    with composed(*tiny, f"guard={guard}", f"precision={precision}", "checkpoint=off", "zloss=palm") as cfg:
        job = build(cfg, tmp_path)
    batches = [job.data.batches.get(step) for step in range(3)]
    job.data.batches.close()
    for batch in batches:
        with Questions() as questions:
            in_flight = commit(job.state, compute(job.state, batch.split(2), job.tools), job.tools)
        assert questions.asked == []
        job.tools.guard.judge(in_flight.wait())


def test_a_question_would_be_noticed():
    with Questions() as questions:
        bool(torch.ones(()) > 0)
    assert questions.asked == ["_local_scalar_dense"]


def test_a_step_is_read_after_the_next_is_launched(tmp_path, monkeypatch):
    order = []
    for owner, name, method in (
        (step_graph, "compute", compute),
        (loop, "commit", commit),
        (InFlight, "wait", InFlight.wait),
    ):

        def noted(*args, name=name, call=method):
            order.extend([name] if order[-1:] != [name] else [])
            return call(*args)

        monkeypatch.setattr(owner, name, noted)
    chosen = ["steps=4", "checkpoint=off", "monitors=none", "guard=skip", "report=false", "compile=false"]
    with composed(*TINY_GPT, *chosen) as cfg:
        loop.train(build(cfg, tmp_path))
    # The user waits for the line of the first step, and the state after the last step is evaluated.
    first, overlapping, last = ["compute", "commit", "wait"], ["compute", "wait", "commit"], ["wait"]
    assert order == [*first, "compute", "commit", *overlapping, *overlapping, *last]
