"""The gradients of a step of a user's loop, computed a second time.

`checks/recheck.py` decides when, and judges a difference. Here the closures run again with their batches. A step is
left out if a rerun does not compute the same: closures without a batch, or that changed it; compiled models; a loss
scale; several ranks.
"""

import torch

from stabletrain.guard.checks.comparing import compare
from stabletrain.guard.checks.recheck import NoRecheck, repeats_exactly
from stabletrain.guard.checks.repeats import over_ranks
from stabletrain.guard.rerun import Rerun
from stabletrain.machine.memory import within_memory
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Number


def repeatable(rerun: Rerun) -> bool:
    """Returns whether a rerun computes what the step computed."""
    begun = rerun.begun
    with_batch = all(each.takes_batch for each in begun.micro_batches)
    return rerun.outer is rerun.model and with_batch and not begun.batches_changed and rerun.loss_scale == 1.0


def repeat(recheck: NoRecheck, rerun: Rerun, step: int) -> Number:
    """Computes the gradients of a step again, if it can be repeated; returns the number that judges it, 0-d fp32, or 0.

    Args:
        recheck: receives the comparison.
        step: number of the step, counted from 0; its gradients are those of the parameters, neither scaled nor clipped.

    Returns:
        `OUT_OF_MEMORY` if memory did not suffice.
    """
    recheck.forget()
    device, first = rerun.begun.generators.device, [parameter.grad for parameter in rerun.parameters]
    recheck.exact = repeats_exactly(rerun.model, device)  # the repetition of the update reads it too
    if not repeatable(rerun):
        return 0.0
    again = within_memory(rerun.run)
    pairs = [] if again is None else [*zip(names(rerun), first, again.gradients, strict=True)]
    compared = within_memory(lambda: compare(pairs, device)) if pairs else None
    ratios = torch.zeros(len(first), device=device) if compared is None else compared.ratios
    eps = torch.finfo(getattr(rerun.precision, "dtype", torch.float32)).eps
    return over_ranks(compared, ratios, recheck.judge_of(step, "gradient", eps), SingleProcess())


def names(rerun: Rerun) -> list[str]:
    """Returns the names of the parameters, in order."""
    known = {id(parameter): name for name, parameter in rerun.model.named_parameters()}
    return [known.get(id(parameter), "a weight") for parameter in rerun.parameters]
