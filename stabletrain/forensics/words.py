"""Words: what is known of an incident, as sentences for a person."""

from collections.abc import Mapping
from typing import Any

from stabletrain.forensics.evidence import Evidence


def sentence(e: Evidence) -> str:
    """Where it began, and how."""
    o = e.origin
    if o is None:
        return f"loss {e.reading.loss:.4g}, gradient norm {e.reading.grad_norm:.4g}"
    return f"{o.op} in {o.module or 'the model'} ({o.direction}, {o.dtype}): {o.reason}"


def place(e: Evidence) -> str:
    """The line of the code, or else the module."""
    o = e.origin
    return "the code" if o is None else o.source or o.module or "the model"


def beside(e: Evidence) -> list[str]:
    """What is known of the operation beyond `sentence`."""
    o = e.origin
    lines = []
    if o is not None and o.should_have_been is not None:
        lines.append(f"computed in fp64 the largest value of {o.op} is {o.should_have_been:.6g}")
    if e.guilty and e.guilty.samples and not e.guilty.others_too:
        lines.append(f"samples that make it fail: {e.guilty.samples[:8]}")
    return lines


def origin_lines(e: Evidence) -> list[str]:
    """What is known of the operation, for a verdict that says nothing of it."""
    return [] if e.origin is None else [f"{sentence(e)}, at {e.origin.source}", *beside(e)]


def chain_lines(e: Evidence) -> list[str]:
    """Magnitudes through the model."""
    chain = e.origin.chain if e.origin else ()
    return [f"{link.module} ({link.direction}, {link.dtype}): up to {link.absmax:.4g}" for link in chain]


def named(sample: Mapping[str, Any]) -> str:
    """A sample by its source, id or place."""
    if "source" in sample:
        return f"{sample['source']}"
    if "id" in sample:
        return f"sample {sample['id']}"
    return "the batch" if sample["index"] is None else f"sample {sample['index']} of the batch"
