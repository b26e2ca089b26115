"""The fixes of a diagnosis in words that hold in any training loop: they change code, not an override of `train.py`."""

import math
from dataclasses import replace

from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.causes import unknown
from stabletrain.forensics.diagnosis.evidence import Evidence

IN_CODE = {
    "optimizer.lr=": "lower the learning rate to {}",
    "optimizer.weight_decay=": "lower the weight decay to {}",
    "optimizer.eps=": "eps={} in the optimizer, so that no denominator is 0",
    "optimizer.betas=": "betas={}, so that the second moment follows faster",
    "optimizer=stable_adamw": "use StableAdamW, which shortens updates when the second moment lags",
    "precision.fp32_modules=": "run {} in fp32: torch.autocast(enabled=False), and inputs cast with .float()",
    "precision.bf16_modules=": "leave {} in bf16, without fp8",
    "precision.recipe=": "scale the casts to fp8 {}",
    "precision.init_scale=": "a larger loss scale: {}",
    "precision.growth_interval=": "a loss scale that grows sooner: growth_interval={}",
    "precision=bf16": "use bf16 in place of fp16: torch.autocast(dtype=torch.bfloat16), or Guard(precision='bf16')",
    "precision=": "train in {}, without autocast",
    "qknorm=": "normalise queries and keys before their product (QK-norm)",
    "qkclip=": "bound attention logits (QK-clip)",
    "softcap=": "cap the logits: cap * tanh(logits / cap)",
    "zloss=": "add a z-loss: 1e-4 * logsumexp(logits) ** 2",
    "init.std=": "smaller initial weights: std {}",
    "init=": "smaller initial weights",
    "warmup.steps=": "a longer warmup: {} steps",
    "clipping=": "clip gradients by their norm: clip_grad_norm_(parameters, 1.0), or Guard(max_norm=1.0)",
    "guard=rollback": "keep snapshots to go back to: Guard(rollback=True)",
    "resume=": "go back to the last good checkpoint; Guard(rollback=True) keeps snapshots to go back to by itself",
}
"""What an override of `train.py` means in a loop of the user's own; `{}` is its value."""


def in_code(fix: str) -> str:
    """Returns a fix in words that hold in any training loop."""
    for begins, words in IN_CODE.items():
        if fix.startswith(begins):
            return words.format(fix.partition("=")[2].strip("[]"))
    return fix


def for_any_loop(diagnosis: Diagnosis) -> Diagnosis:
    """Returns a diagnosis whose fixes hold in any training loop."""
    fix = [*dict.fromkeys(in_code(each) for each in diagnosis.fix)]
    if diagnosis.cause == "hardware_fault":
        fix.insert(0, "check that the closure depends on its batch and on PyTorch's generators only")
    return replace(diagnosis, fix=fix, also=[for_any_loop(one) for one in diagnosis.also])


def unknown_beyond_forward(evidence: Evidence) -> Diagnosis:
    """Returns the diagnosis of a step if only its forward pass could run again, and that showed nothing."""
    found = unknown(evidence)
    if evidence.kind != "nonfinite" or not math.isfinite(evidence.reading.buffers):
        return found
    verdict = f"{found.verdict}: not in the forward pass, so in the loop's loss or in the backward pass"
    fix = "look at the loop's loss; with guard.step or guard.record, the operation is named"
    return replace(found, verdict=verdict, fix=[fix])


def unknown_without_rerun(found: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Returns the diagnosis of a step that is unknown because the closure could not be run again."""
    again = evidence.outcomes.get("same")
    if found.cause != "unknown" or again is None or not again.not_run:
        return found
    before = "backward through the graph a second time" in again.not_run
    why = "its forward pass lies before it" if before else again.not_run
    fix = ["run the forward pass inside the closure: then the operation is named"] if before else []
    return replace(found, verdict=f"{found.verdict}; the closure could not be run again: {why}", fix=fix)
