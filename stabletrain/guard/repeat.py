"""The gradients of a step of a user's loop, computed a second time; they must have the same bits.

`guard/checks/recheck.py` decides when, and judges a difference. Here the closures run again with their batches. A
step is left out if its bits cannot be expected again: closures without a batch, or that changed it; compiled models;
kernels that add in any order; a loss scale; several ranks.
"""

from stabletrain.guard.checks.comparing import compare
from stabletrain.guard.checks.recheck import NoRecheck, repeats_exactly
from stabletrain.guard.checks.repeats import OUT_OF_MEMORY
from stabletrain.guard.rerun import Rerun
from stabletrain.machine.memory import within_memory
from stabletrain.records import Number


def repeatable(rerun: Rerun) -> bool:
    """Returns whether the closures of a step must give the same bits again."""
    begun = rerun.begun
    changed = any(tensor._version != version for tensor, version in begun.versions)
    with_batch = all(each.takes_batch for each in begun.micro_batches)
    exact = repeats_exactly(rerun.model, begun.generators.device) and rerun.outer is rerun.model
    return exact and with_batch and not changed and rerun.loss_scale == 1.0


def repeat(recheck: NoRecheck, rerun: Rerun, step: int) -> Number:
    """Computes the gradients of a step again, if that is due; returns how far they differ, 0-d fp32, or 0.

    Args:
        recheck: receives the comparison.
        step: number of the step, counted from 0; its gradients are those of the parameters, neither scaled nor clipped.

    Returns:
        `OUT_OF_MEMORY` if memory did not suffice.
    """
    recheck.compared, recheck.found = {}, None
    if not recheck.repeats(step) or not repeatable(rerun):
        return 0.0
    first = [parameter.grad for parameter in rerun.parameters]
    again = within_memory(rerun.run)
    if again is None:
        return OUT_OF_MEMORY
    if not recheck.due(step):  # the rehearsal, which is not judged
        return 0.0
    pairs = [*zip(names(rerun), first, again.gradients, strict=True)]
    recheck.compared["gradient"] = compare(pairs, rerun.begun.generators.device)
    return recheck.compared["gradient"].ratios.amax()


def names(rerun: Rerun) -> list[str]:
    """Returns the names of the parameters, in order."""
    known = {id(parameter): name for name, parameter in rerun.model.named_parameters()}
    return [known.get(id(parameter), "a weight") for parameter in rerun.parameters]
