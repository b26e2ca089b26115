"""The laws on a GPU: 3 (a skipped step changes nothing), 4 (resume is exact), 5 (replay is exact), and no step waits.

Each test body also runs on the CPU: here in one small case or, for laws 3 and 5, in the files it is imported from. On a
GPU only `determinism=strict` promises bitwise reproducibility, so tests that compare two runs use it. Nothing is
compiled, because the tests' shape checks cannot be traced (tests/trainer/test_compile_warmup.py has compiled runs).
"""

import contextlib
import math

import pytest
import torch

from stabletrain.step import commit, compute
from stabletrain.trainer.build import build
from tests.devices import CARD, skip_unless_it_has
from tests.forensics import given as replays
from tests.laws import test_resume, test_skipped
from tests.runs import TINY_GPT, TINY_RESNET, composed
from tests.test_no_waiting import Questions

EVERYWHERE = pytest.mark.parametrize("device", ["cpu", CARD])
ON_A_CARD = pytest.mark.parametrize("device", [CARD])
PRECISIONS = ["fp32", "tf32", "bf16", "fp16", "fp8"]
MODELS = {"gpt": TINY_GPT, "resnet": [*TINY_RESNET, "model.depth=8"]}


@ON_A_CARD
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", test_skipped.MODELS)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("what", test_skipped.SPOILT)
def test_a_skipped_step_changes_nothing(tmp_path, device, precision, model, value, what):
    skip_unless_it_has(device, precision, model)
    chosen = [*test_skipped.MODELS[model], f"device={device}", f"precision={precision}", "compile=false"]
    test_skipped.assert_nothing_changes(tmp_path, what, value, *chosen)


@ON_A_CARD
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_skipped_step_of_an_optimizer_that_asks_the_host_changes_nothing(tmp_path, device, precision, what):
    skip_unless_it_has(device, precision)
    chosen = [*test_skipped.MODELS["gpt"], f"device={device}", f"precision={precision}", "compile=false"]
    chosen += ["optimizer.fused=false"]
    test_skipped.assert_nothing_changes(tmp_path, what, math.nan, *chosen)


@ON_A_CARD
@pytest.mark.parametrize("precision", [*PRECISIONS, "bf16_params"])
@pytest.mark.parametrize("model", replays.MODELS)
def test_a_recorded_step_replays_bit_for_bit(tmp_path, device, precision, model):
    skip_unless_it_has(device, precision, model)
    chosen = [*replays.MODELS[model], f"device={device}", "determinism=strict", "compile=false"]
    replays.assert_recorded_steps_replay(tmp_path, *chosen, *replays.precision_of(precision))


@pytest.mark.slow(unless=lambda device: device != "cpu")
@EVERYWHERE
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_resume_is_exact(tmp_path, device, precision, model):
    if device == "cpu" and (precision, model) != ("fp32", "gpt"):
        pytest.skip("test_resume.py has it")
    skip_unless_it_has(device, precision, model)
    chosen = [*MODELS[model], f"device={device}", f"precision={precision}", "determinism=strict"]
    chosen += ["compile=false", "steps=6", "eval_every=4", "checkpoint.every=3", "log_every=1"]
    test_resume.trained(tmp_path / "whole", *chosen)
    test_resume.trained(tmp_path / "cut", *chosen, crash_at=5)
    test_resume.trained(tmp_path / "cut", *chosen, "resume=auto")
    assert test_resume.newest(tmp_path / "cut") == test_resume.newest(tmp_path / "whole")
    assert test_resume.metrics(tmp_path / "cut") == test_resume.metrics(tmp_path / "whole")


@contextlib.contextmanager
def asking_nothing(device):
    """Context in which any wait of the host for the device raises RuntimeError."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with Questions() as questions:
        yield
    if questions.asked:
        raise RuntimeError(f"the host waits for {questions.asked}")


def steady(folder, device, *overrides):
    """Returns a run past its first steps, and the next batch, still on the host."""
    with composed(*overrides, f"device={device}", "checkpoint=off", "zloss=palm", "compile=false") as cfg:
        job = build(cfg, folder)
    batches = [job.data.batches.get(step) for step in range(4)]
    job.data.batches.close()
    for batch in batches[:3]:
        step(job, batch)
    return job, batches[3]


def step(job, batch):
    """Takes one step as the loop does, up to reading its measurements."""
    return commit(job.state, compute(job.state, batch.to(job.device).split(2), job.tools), job.tools)


@EVERYWHERE
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("guard", ["off", "rollback"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_steady_step_waits_for_nothing(tmp_path, device, precision, model, guard):
    if device == "cpu" and (precision, guard) != ("fp32", "rollback"):
        pytest.skip("test_no_waiting.py has it")
    skip_unless_it_has(device, precision, model)
    job, batch = steady(tmp_path, device, *MODELS[model], f"precision={precision}", f"guard={guard}")
    with asking_nothing(device):
        in_flight = step(job, batch)
    assert job.tools.guard.judge(in_flight.wait()).value in ("apply", "skip")


@EVERYWHERE
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_that_waits_is_noticed(tmp_path, device):
    job, batch = steady(tmp_path, device, *TINY_GPT, "precision=fp32")
    clipping = job.tools.clipping
    curious = lambda model, norms, gate: (norms.total.item(), clipping(model, norms, gate))[1]  # noqa: E731
    object.__setattr__(job.tools, "clipping", curious)
    with pytest.raises(RuntimeError), asking_nothing(device):
        step(job, batch)


@ON_A_CARD
def test_a_loss_in_chunks_never_holds_all_logits(tmp_path, device):
    wide = [*TINY_GPT, "model.vocab_size=50257", "data.block_size=128", "batch_size=32", "precision=fp32"]
    logits, peaks = 4 * 32 * 128 * 50257, {}  # bytes; each step has two micro-batches
    for chunk in ("none", "256"):
        job, batch = steady(tmp_path / chunk, device, *wide, f"loss_chunk={chunk}")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(job, batch)
        peaks[chunk] = torch.cuda.max_memory_allocated() - before
        del job
    assert peaks["none"] > logits / 2
    assert peaks["256"] < peaks["none"] / 3
