"""The sentences about an incident's evidence that several rules share."""

import math
from collections.abc import Mapping
from typing import Any

from stabletrain.forensics.diagnosis.evidence import Evidence
from stabletrain.forensics.facts import Outcome
from stabletrain.forensics.probes.underflow import Underflow


def loss_and_norm(loss: float, grad_norm: float | None) -> str:
    """Loss and gradient norm in words; the norm may be unknown."""
    return f"loss {loss:.6g}" + ("" if grad_norm is None else f" and gradient norm {grad_norm:.6g}")


def replay_difference(e: Evidence, again: Outcome) -> str:
    """How the unchanged replay differs from the step. On several ranks, each rank's own part is compared."""
    assert again.loss is not None
    replayed, step = loss_and_norm(again.loss, again.grad_norm), loss_and_norm(e.reading.loss, e.reading.grad_norm)
    if e.part is None:
        return f"a replay of the step gives {replayed}; the step itself gave {step}"
    if not e.parts_normal:
        mine = loss_and_norm(e.part.loss, e.part.grad_norm)
        return f"a replay of rank {e.part.rank}'s part of the step gives {replayed}; in the step, it gave {mine}"
    own = "loss" if e.part.grad_norm is None else "loss and gradient norm"
    text = f"the step gave {step}, but every rank's own {own} was normal in the step and in a replay"
    if e.part.shard_norm is not None and not math.isfinite(e.part.shard_norm):
        text += (
            f". Rank {e.part.rank}'s shard of the summed gradient was not finite: the fault lies with this rank, with "
            "another one, or with the network between them"
        )
    return text


def lost_gradients(u: Underflow, kind: str) -> tuple[str, list[str]]:
    """How many gradient elements are 0 in a format, and in fp32; and a line for each of the worst parameters."""
    verdict = (
        f"{u.zeros:.0%} of all gradient elements are exactly 0 in {kind}, {u.in_fp32:.0%} in fp32; worst hit: "
        f"{', '.join(one.name for one in u.worst[:3])}"
    )
    return verdict, [
        f"{one.name}: {one.zeros:.1%} of its gradient elements are 0 in {kind}, {one.in_fp32:.1%} in fp32; "
        f"{kind} loses {one.lost:.1%} of those that are not 0 in fp32"
        for one in u.worst
    ]


def origin_sentence(e: Evidence) -> str:
    """The operation to blame and the reason; loss and gradient norm if there is no such operation."""
    o = e.origin
    if o is None:
        return f"loss {e.reading.loss:.4g}, gradient norm {e.reading.grad_norm:.4g}"
    return f"{o.op} in {o.module or 'the model'} ({o.direction}, {o.dtype}): {o.reason}"


def source_line(e: Evidence) -> str:
    """The source line to change; the module if the line is unknown."""
    o = e.origin
    return "the code" if o is None else o.source or o.module or "the model"


def origin_details(e: Evidence) -> list[str]:
    """Further lines about the operation, for a verdict that is `origin_sentence`."""
    o = e.origin
    lines = []
    if o is not None and o.should_have_been is not None:
        lines.append(f"in fp64, the largest value of {o.op} is {o.should_have_been:.6g}")
    if e.culprits and e.culprits.samples and not e.culprits.others_too:
        lines.append(f"samples of {batch_name(e)} that make the step fail: {e.culprits.samples[:8]}")
    return lines


def origin_lines(e: Evidence) -> list[str]:
    """Lines about the operation, for a verdict that does not mention it."""
    return [] if e.origin is None else [f"{origin_sentence(e)}, at {e.origin.source}", *origin_details(e)]


def chain_lines(e: Evidence) -> list[str]:
    """Magnitudes through the model, a line for each part."""
    chain = e.origin.chain if e.origin else ()
    return [f"{link.module} ({link.direction}, {link.dtype}): up to {link.absmax:.4g}" for link in chain]


def batch_name(e: Evidence) -> str:
    """The batch that was investigated, and that the indices of samples refer to."""
    return "the batch" if e.part is None else f"rank {e.part.rank}'s part of the batch"


def sample_name(sample: Mapping[str, Any], e: Evidence) -> str:
    """Names a sample by its source, id or index."""
    if "source" in sample:
        return f"{sample['source']}"
    if "id" in sample:
        return f"sample {sample['id']}"
    return "the batch" if sample["index"] is None else f"sample {sample['index']} of {batch_name(e)}"
