"""`loss_chunk`: a run that computes its logits in chunks is the same run, guarded and replayed as any other."""

import json

import pytest
import torch

from stabletrain.errors import TrainingHalted
from stabletrain.stability.objective.chunked_loss import ChunkedLoss
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.forensics.given import one_step, replay, repro_of
from tests.runs import TINY_GPT, composed

FEW = ["steps=6", "eval_every=3", "log_every=1", "checkpoint=off", "report=false", "warmup.steps=2"]

SCALES = {"fp16": ["precision.init_scale=256"]}
"""A low initial scale: whole logits sum more terms in fp16 than a chunk, so they would overflow earlier."""


def trained(folder, *overrides):
    """A run that is over."""
    with composed(*TINY_GPT, *FEW, *overrides) as cfg:
        job = build(cfg, folder)
        train(job)
    return job


@pytest.mark.slow(unless=lambda precision, more: precision == "bf16" and more)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("more", [[], ["zloss=palm", "softcap=gemma2", "grad_accum_steps=2", "model.tied_head=true"]])
def test_the_run_equals_that_with_whole_logits_up_to_rounding(tmp_path, precision, more):
    chosen = [f"precision={precision}", *more, *SCALES.get(precision, [])]
    whole = trained(tmp_path / "whole", "loss_chunk=none", *chosen)
    chunks = trained(tmp_path / "chunks", "loss_chunk=5", *chosen)
    lines = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "chunks")]
    seen = [[line["train/loss"] for line in each if "train/loss" in line] for each in lines]
    near = 1e-5 if precision == "fp32" else 3e-3
    torch.testing.assert_close(torch.tensor(seen[1]), torch.tensor(seen[0]), rtol=near, atol=0)
    assert chunks.history.updates == whole.history.updates
    assert seen[0] != seen[1], "sums of chunks round otherwise: the chunks were not there"


def test_chunks_larger_than_the_batch_change_no_bit(tmp_path):
    whole = trained(tmp_path / "whole", "loss_chunk=none").state.model.state_dict()
    auto = trained(tmp_path / "auto", "loss_chunk=auto").state.model.state_dict()
    assert all(torch.equal(whole[name], auto[name]) for name in whole)


@pytest.mark.slow
def test_a_bad_step_is_skipped_named_and_replayed(tmp_path):
    with pytest.raises(TrainingHalted):
        trained(
            tmp_path,
            "loss_chunk=5",
            "optimizer.lr=1e25",
            "optimizer.weight_decay=0",
            "warmup.steps=1",
            "precision=fp32",
        )
    found = sorted((tmp_path / "incidents").iterdir())[0]
    diagnosis = json.loads((found / "diagnosis.json").read_text())
    assert diagnosis["kind"] == "nonfinite"
    assert diagnosis["origin"]["module"], "the operation is named, though its step ran in chunks"
    assert diagnosis["replays"]["same"]["bitwise_equal_to_reading"] is True


@pytest.mark.slow(unless=lambda precision: precision == "fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_finite_step_is_replayed_to_the_bit_in_chunks(tmp_path, monkeypatch, precision):
    still = ["optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    with composed(*TINY_GPT, *FEW, *still, "loss_chunk=5", f"precision={precision}") as cfg:
        job = build(cfg, tmp_path)
    batch = job.data.batches.get(0)
    job.data.batches.close()
    computed, reading = one_step(job, batch)
    repro = repro_of(job, batch, computed, reading)
    taken, chunks = [], ChunkedLoss.chunks
    monkeypatch.setattr(ChunkedLoss, "chunks", lambda self, *given: taken.append(1) or chunks(self, *given))
    outcome = replay(repro, "same")
    assert outcome.bitwise_equal_to_reading is True
    assert taken, "the replay, too, ran in chunks"
