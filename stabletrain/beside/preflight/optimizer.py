"""Whether the optimizer's step stays finite with zero gradients, huge ones, and weights of 0.

Each comes up in training: a layer that no sample reached has zero gradients, a spike huge ones, and many layers begin
at 0. The steps are taken as the first of an optimizer and after a real one, on a loop made for this, and undone. What
makes the first value that is not finite is found by running the step again under a recorder of its operations.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.loop import Loop, Maker
from stabletrain.beside.preflight.recording import parameters_of
from stabletrain.errors import is_own
from stabletrain.forensics.diagnosis.update_causes import LEAST_EPS, floor_denominator, fp32_state
from stabletrain.forensics.probes.update import UpdateFault, update_fault
from stabletrain.forensics.probes.update_reason import READS_ZERO
from stabletrain.guard.checks.copies import put_back_after
from stabletrain.guard.checks.written import needs_closure, note_start, update_is_finite

HUGE = {torch.float16: 16.0}
"""A huge gradient by its dtype; of others it is 1e10.

A sound optimizer survives it. Its square, 1e20, is far from the largest fp32 and bf16 number, 3e38: Adam's second
moment holds it, and a norm the sum of 1e18 of them. The largest fp16 number is 65504, so that even there the square of
16 and the sum of 250 such squares can be held. Gradients above that are not tried: where Adam itself overflows, nothing
can be said of an optimizer.
"""

SMALL = 0.01
"""A gradient of ordinary size, for the step with weights of 0."""

ATTEMPTS = 3
"""How many real steps are tried until the optimizers step: a loss scale that is too large at first skips some."""

LARGE = 1_000_000
"""A model with more elements in its parameters is not tried whole: with some of its parameters the steps are as telling
and cost nothing. An optimizer may treat matrices otherwise than vectors, and each group and dtype otherwise."""

LARGEST = 2**18
"""Elements of the largest parameter that is tried of such a model, if it has smaller ones of its kind."""

STEPS = 2
"""How many special steps are taken one after the other: some optimizers only store the gradient in their first."""


@dataclass(frozen=True)
class Special:
    """A special step.

    Attributes:
        name: in words, as in "a step with zero gradients".
        gradient: size of the gradients of a dtype.
        zero_weights: whether the weights are set to 0 before the step.
        advice: what to do if no operation of the step shows what is wrong.
    """

    name: str
    gradient: Callable[[torch.dtype], float]
    zero_weights: bool
    advice: str

    def prepare(self, optimizer: Optimizer, sparse: set[int]) -> None:
        """Sets weights and gradients.

        Args:
            optimizer: of these weights.
            sparse: numbers, among the optimizer's parameters, of those whose gradients are sparse.
        """
        numbers = torch.Generator().manual_seed(0)
        for number, parameter in enumerate(parameters_of(optimizer)):
            if not parameter.requires_grad:
                continue
            # Signs at random: gradients that are all the same would be a special case of their own.
            signs = torch.randint(2, parameter.shape, generator=numbers) * 2.0 - 1
            gradient = (self.gradient(parameter.dtype) * signs).to(parameter)
            parameter.grad = gradient.to_sparse(1) if number in sparse else gradient
            if self.zero_weights:
                parameter.data.zero_()


ZERO_GRADIENTS = Special("zero gradients", lambda dtype: 0.0, False, "keep every denominator above 0, with eps")
HUGE_GRADIENTS = Special("huge gradients", lambda dtype: HUGE.get(dtype, 1e10), False, "keep its state in fp32")
ZERO_WEIGHTS = Special("weights of 0", lambda dtype: SMALL, True, "keep every norm that it divides by above 0")
BOTH_ZERO = Special("weights and gradients of 0", lambda dtype: 0.0, True, ZERO_WEIGHTS.advice)

SPECIAL = (ZERO_GRADIENTS, HUGE_GRADIENTS, ZERO_WEIGHTS, BOTH_ZERO)


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    found: list[Finding] = []
    used, fresh = make(), make()
    sparse = take_real_step(used)
    for index in range(len(used.optimizers)):
        found += check_optimizer(used, fresh, index, sparse)
    return found


def check_optimizer(used: Loop, fresh: Loop, index: int, sparse: set[Tensor]) -> list[Finding]:
    """Takes special steps of one optimizer.

    Args:
        used: a loop after a real step.
        fresh: one before it.
        index: number of the optimizer.
        sparse: parameters of `used` whose gradients are sparse.
    """
    optimizer = used.optimizers[index]
    name = f"{type(optimizer).__name__} (optimizers.{index})"
    if needs_closure(optimizer):
        return [Finding("optimizer", "not checked", f"{name} needs a closure, which computes new gradients")]
    cases = [(fresh, "the first step"), (used, "a step after a real one")]
    found: list[Finding] = []
    if not update_is_finite(used.model, optimizer):
        text = f"{name}: weights or state are not finite after a real step: only first steps are checked"
        found.append(Finding("optimizer", "not checked", text))
        cases.pop()
    tried = sample_of(optimizer)
    numbers = {place for place, number in enumerate(tried) if parameters_of(optimizer)[number] in sparse}
    some = "" if len(tried) == len(parameters_of(optimizer)) else f" (tried with {len(tried)} of its parameters)"
    narrowed = [(Narrowed(loop, index, tried), when) for loop, when in cases]
    failed: list[Special] = []
    for special in SPECIAL:
        if special is BOTH_ZERO and failed:  # a step with one of the two is not finite already
            continue
        for model, when in narrowed:
            try:
                fault = fault_of(model, model.optimizer, special, numbers)
            except Exception as error:  # the optimizer refuses such a step, or cannot be recorded
                text = f"{name}: {when}, with {special.name}, failed with {type(error).__name__}: {error}"
                found.append(Finding("optimizer", "not checked", text))
                break
            if fault is not None:
                failed.append(special)
                found.append(finding_of(fault, model.optimizer, index, special, when))
                break
    if not found:
        text = (
            f"{name} stays finite with zero gradients, with gradients of {size_of(optimizer):g}, and with weights of "
        )
        found.append(Finding("optimizer", "passed", f"{text}0, in its first step and after a real one{some}"))
    return found


def sample_of(optimizer: Optimizer) -> list[int]:
    """Returns the numbers of the parameters to try, among the optimizer's: all, or some of each kind if it is large."""
    parameters = parameters_of(optimizer)
    if sum(each.numel() for each in parameters) <= LARGE:
        return [*range(len(parameters))]
    groups = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, (group, each) in enumerate(zip(groups, parameters, strict=True)):
        if each.requires_grad:
            kinds.setdefault((group, each.ndim, each.dtype), []).append(number)
    chosen: set[int] = set()
    for numbers in kinds.values():
        by_size = sorted(numbers, key=lambda number: parameters[number].numel())
        chosen |= {by_size[0], *[number for number in by_size if parameters[number].numel() <= LARGEST][-1:]}
    return sorted(chosen)


class Narrowed(nn.Module):
    """A loop's model and one of its optimizers, with some parameters alone.

    Attributes:
        optimizer: the loop's, which has these parameters only from now on.

    Args:
        loop: made for the check.
        index: number of the optimizer.
        numbers: of the parameters, among the optimizer's.
    """

    def __init__(self, loop: Loop, index: int, numbers: list[int]) -> None:
        super().__init__()
        self.optimizer = optimizer = loop.optimizers[index]
        parameters = parameters_of(optimizer)
        self._chosen = {loop.name_of(parameters[number]): parameters[number] for number in numbers}
        if len(numbers) == len(parameters):
            return
        kept = {id(each) for each in self._chosen.values()}
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in kept]
        if isinstance(optimizer.state, dict):
            for each in [*optimizer.state]:
                if isinstance(each, Tensor) and id(each) not in kept:
                    del optimizer.state[each]

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters by their names in the loop; copies in fp32, for example, need not be `nn.Parameter`."""
        yield from cast("dict[str, nn.Parameter]", self._chosen).items()


def fault_of(model: nn.Module, optimizer: Optimizer, special: Special, sparse: set[int]) -> UpdateFault | None:
    """Takes special steps and undoes them; returns what is wrong with the first that is not finite, or None.

    Raises:
        Exception: the optimizer's, or its step cannot be recorded.
    """
    note_start(model, optimizer)  # a mask of -inf is meant
    with put_back_after(model, optimizer):
        good = 0  # steps that stayed finite
        while good < STEPS:
            special.prepare(optimizer, sparse)
            optimizer.step()
            if not update_is_finite(model, optimizer):
                break
            good += 1
    if good == STEPS:
        return None
    with put_back_after(model, optimizer):
        for _ in range(good):
            special.prepare(optimizer, sparse)
            optimizer.step()
        special.prepare(optimizer, sparse)
        return update_fault(model, optimizer, optimizer.step)


def take_real_step(loop: Loop) -> set[Tensor]:
    """Takes a step of the loop in which every optimizer steps; returns parameters whose gradients are sparse."""
    sparse: set[Tensor] = set()
    with stepped(sparse) as seen:
        for number in range(ATTEMPTS):
            batch = loop.batch(number) if loop.next_batch is None else loop.next_batch()
            if loop.step is not None:
                loop.step(batch)
            else:
                loop.loss(batch).backward()
                for optimizer in loop.optimizers:
                    if not needs_closure(optimizer):
                        optimizer.step()
            if seen.issuperset(map(id, loop.optimizers)):
                break
    return sparse


@contextmanager
def stepped(sparse: set[Tensor]) -> Generator[set[int], None, None]:
    """Notes the `id` of each optimizer that steps inside, and adds the parameters with sparse gradients to `sparse`."""
    seen: set[int] = set()

    def before(optimizer: Optimizer, *_: object) -> None:
        seen.add(id(optimizer))
        given = [each for each in parameters_of(optimizer) if each.grad is not None]
        sparse.update(each for each in given if each.grad is not None and each.grad.layout == torch.sparse_coo)

    hook = register_optimizer_step_pre_hook(before)
    try:
        yield seen
    finally:
        hook.remove()


def size_of(optimizer: Optimizer) -> float:
    """Returns the size of the huge gradients that an optimizer is given."""
    sizes = {HUGE_GRADIENTS.gradient(each.dtype) for each in parameters_of(optimizer) if each.requires_grad}
    return min(sizes, default=1e10)


def finding_of(fault: UpdateFault, optimizer: Optimizer, index: int, special: Special, when: str) -> Finding:
    """Says what is wrong with a step."""
    name = type(optimizer).__name__
    sizes = f" ({size_of(optimizer):g})" if special is HUGE_GRADIENTS else ""
    text = f"{when} of {name} (optimizers.{index}), with {special.name}{sizes}, is not finite: {fault.reason}"
    text += f"; not finite after it: {listed([*fault.broken])}, {fault.count} in all"
    origin = fault.origin
    lines = [] if origin is None else [each for each in (origin.source, origin.called_from) if each]
    line = next((each for each in lines if is_own(each.rpartition(":")[0])), "")
    places = (f"optimizers.{index}", name, fault.parameter)
    return Finding("optimizer", "fault", text, places, line, fix_of(fault, special, line))


def fix_of(fault: UpdateFault, special: Special, line: str) -> str:
    """Returns what to change, by the reason that was found."""
    at = line or fault.optimizer
    if fault.why in ("zero_eps", "lost_eps"):
        first = [] if fault.why == "zero_eps" else fp32_state(fault)
        return "; or ".join([*first, f"{fault.optimizer}(eps={LEAST_EPS.get(fault.dtype, 1e-8):g})"])
    if fault.why in READS_ZERO and "log" not in fault.why:
        return floor_denominator(fault, at)
    if fault.why in ("second_moment", "overflow", "exp_overflow"):
        half = fp32_state(fault)
        return half[0] if half else f"{at}: scale or limit the gradient before this operation"
    return f"{at}: {special.advice}"
