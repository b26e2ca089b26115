"""What a change of settings does to a checkpoint's model, measured on one fixed batch before a resumed run goes on.

The model of the checkpoint is built a second time from the settings it was trained with. Both models run the same batch
in evaluation mode, so no buffer, no weight and no random number of the run changes.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stabletrain.checkpoint.tree import Tree
from stabletrain.machine.determinism import rng_restored
from stabletrain.machine.untouched import evaluating
from stabletrain.records import Batch
from stabletrain.stability.objective import Objective
from stabletrain.stability.qkclip import LogitMeter
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.trainer.contract import first_rows, make_model, vocabulary
from stabletrain.trainer.options import ForwardOptions

TARGETS = 4096
"""The fixed batch has about so many targets: enough for a mean, and little memory beside a training step's."""


def fixed_batch(data: Any, size: int, step: int, device: torch.device) -> Batch:
    """Returns the first samples of a step's training batch, the same for every rank, on the device."""
    batch = first_rows(data, step, size, "train")
    each = max(1, batch.targets[:1].numel())
    return replace(batch.rows(slice(0, max(1, TARGETS // each))), counted=None).to(device)


class Subject(NamedTuple):
    """A model with what turns its output into a loss.

    Attributes:
        precision: the number format that it runs in.
        objective: the loss, from the model's whole output.
    """

    model: nn.Module
    precision: Any
    objective: Objective
    sanitizer: Sanitizer


def as_trained(options: ForwardOptions, data: Any, weights: Tree, device: torch.device) -> Subject:
    """Builds the model of a checkpoint again, with its weights, from the options it was trained with.

    Args:
        weights: the checkpoint's `model`.
    """
    with torch.random.fork_rng(devices=[]):  # the weights that the constructor draws are replaced
        model = make_model(options.model, data, options.objective).to(device)
    precision = options.precision.build(device=device)
    precision.wrap_fp32_modules(model)
    # Stores weights in bf16 where the run did; the optimizer is only there for what the precision registers with it.
    precision.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
    model.load_state_dict(weights)
    return Subject(model, precision, options.objective, Sanitizer(vocabulary(model, data)))


@torch.no_grad()
def loss_on(subject: Subject, batch: Batch) -> float:
    """Returns the training loss of a batch in evaluation mode: the mean over its valid targets, in nats."""
    with evaluating(subject.model), rng_restored(subject.model):  # a user's model may draw random numbers even so
        torch.manual_seed(0)
        inputs, _, _ = subject.sanitizer.inputs(batch.inputs)
        with subject.precision.autocast():
            outputs = subject.objective.with_model(subject.model(inputs), subject.model)
        targets, _ = subject.sanitizer.targets(batch.targets, subject.objective.classes(outputs))
        clean = batch.having(inputs, targets)
        n_valid = torch.full((), max(1, clean.count_targets()), device=inputs.device)
        return float(subject.objective(outputs, clean, n_valid).total)


def near_identity(names: list[str], live: nn.Module, before: Subject, batch: Batch) -> dict[str, Tensor]:
    """Returns values for the parameters of parts that the checkpoint's model lacks, near the identity where possible.

    A part's module that has `start_near(inputs)` chooses its own parameters, from the inputs that the module in its
    place gets in the checkpoint's model. Any other part starts as its constructor made it.

    Args:
        names: of those parameters and buffers.
        live: the model with the new parts.
        before: the checkpoint's model.
        batch: from `fixed_batch`.
    """
    state = live.state_dict()
    found = {name: state[name].detach().cpu().clone() for name in names}
    modules, others = dict(live.named_modules()), dict(before.model.named_modules())
    able = {name.rpartition(".")[0] for name in names}
    able = {name for name in able if callable(getattr(modules.get(name), "start_near", None)) and name in others}
    if not able:
        return found
    seen: dict[str, Tensor] = {}

    def note_input(name: str, module: nn.Module, given: tuple) -> None:
        seen[name] = given[0].detach()

    with ExitStack() as hooks:
        for name in able:
            hooks.enter_context(others[name].register_forward_pre_hook(partial(note_input, name)))
        loss_on(before, batch)
    for name, inputs in seen.items():
        start_near: Any = modules[name].start_near
        found |= {f"{name}.{key}": value.cpu() for key, value in start_near(inputs).items()}
    return found


def largest_logits(before: Subject, batch: Batch) -> Mapping[str, float]:
    """Returns the largest attention logit and the largest absolute output logit of a GPT on a batch, by cap."""
    meters, found = [], {}
    for attention in before.model.modules():
        if hasattr(attention, "meter") and hasattr(attention, "n_head"):
            meter = LogitMeter(attention.n_head).to(batch.inputs.device)  # ty: ignore[invalid-argument-type]
            meters.append((attention, attention.meter, meter))
            attention.meter = meter
    try:
        with torch.no_grad(), evaluating(before.model), before.precision.autocast():
            for _, _, meter in meters:
                meter.train()  # it measures in training mode only
            found["final_cap"] = float(before.model(before.sanitizer.inputs(batch.inputs)[0]).abs().max())
    finally:
        for attention, own, _ in meters:
            attention.meter = own
    if meters:
        found["attention_cap"] = max(float(meter.get_buffer("max_logit").max()) for _, _, meter in meters)
    return found
