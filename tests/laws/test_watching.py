"""Law 2: watching changes nothing. Logging, evaluating and saving at every step or never: bitwise-equal weights."""

import pytest
import torch

from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.tree import flatten
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import TINY_GPT, TINY_RESNET, composed

ALWAYS = [
    *("log_every=1", "eval_every=1", "monitors=full", "monitors.every=1"),
    *("checkpoint.every=1", "checkpoint.asynchronous=true", "wandb=offline", "forecast.action=checkpoint"),
]
NEVER = [
    "log_every=1000",
    "eval_every=1000",
    "checkpoint=off",
    "wandb=disabled",
    "monitors=none",
    "forecast=off",
    "check=off",
]


TINY_GPT_WITH_DROPOUT = [*TINY_GPT, "model.dropout=0.2"]


def trained(folder, *overrides):
    with composed(*overrides) as cfg:
        torch.manual_seed(7)  # determinism=off seeds nothing itself
        job = build(cfg, folder)
        torch.manual_seed(8)
        train(job)
    state = capture(job.state, {name: job.saved.parts[name] for name in ("precision", "guard")})
    slow = state["parts"]["guard"]["slow_spikes"]
    del slow["validation"], slow["risen"]  # the evaluations themselves: they act only with guard.slow=rollback
    return flatten(state)


@pytest.mark.beside
@pytest.mark.slow(unless=lambda determinism: determinism == "seeded")
@pytest.mark.parametrize(
    ("tiny", "determinism"), [(TINY_GPT_WITH_DROPOUT, "seeded"), (TINY_RESNET, "off")], ids=["gpt", "resnet"]
)
def test_watching_everything_or_nothing_gives_the_same_bits(tmp_path, monkeypatch, tiny, determinism):
    from tests.beside.forecast.given import LOUD

    monkeypatch.setattr("stabletrain.beside.forecast.forecast.fitted", lambda: LOUD)
    chosen = [*tiny, f"determinism={determinism}", "precision=bf16", "steps=6"]
    watched, watched_skeleton = trained(tmp_path / "watched", *chosen, *ALWAYS)
    unwatched, skeleton = trained(tmp_path / "unwatched", *chosen, *NEVER)
    assert watched_skeleton == skeleton
    assert watched.keys() == unwatched.keys()
    for name, value in watched.items():
        assert torch.equal(value, unwatched[name]), name
    lines = read_jsonl(tmp_path / "watched" / "metrics.jsonl")
    assert len(lines) == 12, "a line and an evaluation a step"
    assert sum("monitors/hessian_top" in line and "monitors/update_ratio_max" in line for line in lines) == 6
    events = [event["event"] for event in read_jsonl(tmp_path / "watched" / "events.jsonl")]
    assert "forecast" in events
    assert "alarm" not in events
