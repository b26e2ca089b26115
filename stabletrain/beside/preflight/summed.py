"""Gradients that a loop adds up itself, in buffers of its own, and never zeroes.

A step whose loss is multiplied by 0 adds nothing. An optimizer that gets the gradients of the step before all the same,
unchanged, gets the sum of all steps. Averages, as of momentum, become smaller in such a step, and noise differs from
step to step. To what is reused for a few steps, or comes late, the next step adds nothing.
"""

from torch import Tensor

from stabletrain.beside.preflight.accumulation import shrunk
from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Loop, Maker
from stabletrain.beside.preflight.recording import RecordedStep, record_step

SMALL = 2.0**-10
"""What the loss is multiplied with, so that no clipping sees a large gradient, under which averages would be as long as
sums. A power of 2 rounds nothing."""

EXACT = 1e-5
"""Relative difference of two gradients that are one: some rounding in fp32, and less than any average takes away."""

LINEAR = 0.05
"""The same under two sizes of the loss, in fp16 and bf16 too."""


def summed(make: Maker) -> list[Finding]:
    """Takes a step of a small loss, one of none, and one of a smaller loss."""
    loop = make()
    try:
        steps = [sized(loop, number, size) for number, size in enumerate((SMALL, 0.0))]
        indices = [index for index in range(len(loop.optimizers)) if kept(steps, index)]
        if not indices:
            return []
        more = sized(loop, 2, SMALL / 64)
        twice = sized(make(), 0, 2 * SMALL)
    except Exception:  # the data end, or the loop stops itself at a gradient of 0
        return []
    found = []
    for index in indices:
        first = steps[0].given[index]
        double = {name: 2 * each for name, each in first.items()}
        clipped = apart(twice.given.get(index, {}), double) > LINEAR
        added = EXACT < apart(more.given.get(index, {}), first) < 0.5  # not the small one in place of the first
        if clipped or not added:
            continue
        text = f"optimizers.{index} gets the sum of the gradients of all steps: after a step, it gets the same again "
        text += (
            f"in one whose loss is multiplied by 0 (norm {size_of(first) / SMALL:.3g} under the whole loss), and the "
        )
        text += "next step adds to it: what the loop adds gradients up in is never zeroed"
        line = next(event.line for event in more.calls("optimizer") if event.index == index)
        fix = "zero the buffers that gradients are added up in (such as main_grad) in each step, as zero_grad() does "
        fix += "with .grad"
        found.append(Finding("order", "fault", text, (f"optimizers.{index}", "zero_grad"), line, fix))
    return found


def sized(loop: Loop, number: int, size: float) -> RecordedStep:
    """Takes a step whose loss is multiplied with a number."""
    with shrunk(size):
        return record_step(loop, number)


def kept(steps: list[RecordedStep], index: int) -> bool:
    """Whether an optimizer gets the same gradients in two steps, each after a backward pass."""
    for step in steps:
        kinds = [event.kind for event in step.events if event.kind == "backward" or event.index == index]
        kinds = [kind for kind in kinds if kind in ("backward", "optimizer")]
        if kinds[:1] != ["backward"] or "optimizer" not in kinds:
            return False
    first, second = (step.given[index] for step in steps)
    return size_of(first) > 0 and apart(second, first) <= EXACT


def apart(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """Returns the norm of the difference of two gradients, relative to the second; infinity if they are of others."""
    if one.keys() != two.keys():
        return float("inf")
    difference = size_of({name: dense(one[name]) - dense(two[name]) for name in two})
    return difference / max(size_of(two), 1e-300)


def size_of(gradients: dict[str, Tensor]) -> float:
    """Returns the norm of gradients, which may be sparse."""
    return float(sum(float(dense(each).square().sum()) for each in gradients.values())) ** 0.5


def dense(gradient: Tensor) -> Tensor:
    """Returns a gradient in fp64."""
    return (gradient.to_dense() if gradient.is_sparse else gradient).double()
