"""Law 1: with every group off, N steps equal a hand-written PyTorch loop, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F

from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import OFF, TINY_GPT, TINY_RESNET, composed

STEPS = 6


def hand_written(model, batches, kind, lr):
    """Trains with a plain PyTorch loop; returns the losses."""
    decayed = [p for name, p in model.named_parameters() if p.ndim >= 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embedding" in name]
    if kind == "adamw":
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    else:
        groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=True)
    losses = []
    for batch in batches:
        logits = model(batch.inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("tiny", "kind", "lr"), [(TINY_GPT, "adamw", 3e-3), (TINY_RESNET, "sgd", 0.1)], ids=["gpt", "resnet"]
)
def test_with_every_group_off_the_weights_are_those_of_a_plain_loop(tmp_path, tiny, kind, lr):
    with composed(*tiny, *OFF, f"optimizer={kind}", f"steps={STEPS}", "log_every=1") as cfg:
        job = build(cfg, tmp_path)
        batches = [job.data.batches.get(step) for step in range(STEPS)]
        plain = copy.deepcopy(job.state.model)
        train(job)
    losses = hand_written(plain, batches, kind, lr)
    ours = job.state.model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(ours[name], value), name
    logged = [line["train/loss"] for line in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in line]
    assert logged == losses
