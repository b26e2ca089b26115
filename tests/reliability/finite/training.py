"""Faults of training: wrong data, wrong labels, wrong settings. Every computation is right."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stabletrain.beside.faults.in_data import count_classes
from stabletrain.records import Batch
from tests.reliability.finite.fault import Fault
from tests.reliability.finite.subject import Subject


@dataclass(frozen=True)
class Labels(Fault):
    """Wrong labels that are valid classes.

    Attributes:
        wrong: `shuffled` within the batch, `constant`, `shifted` by one class, or `random`.
        share: of the labels.
    """

    wrong: str
    share: float = 1.0

    def batch(self, batch: Batch, position: int, data: Any, random: torch.Generator) -> Batch:
        targets, classes = batch.targets, count_classes(data, batch.targets)
        flat = targets.reshape(-1)
        if self.wrong == "shuffled":
            other = flat[torch.randperm(len(flat), generator=random)]
        elif self.wrong == "constant":
            other = torch.full_like(flat, 1)
        elif self.wrong == "shifted":
            other = (flat + 1) % classes
        else:
            other = torch.randint(classes, flat.shape, generator=random)
        hit = torch.rand(flat.shape, generator=random) < self.share
        return replace(batch, targets=torch.where(hit, other, flat).view_as(targets))


@dataclass(frozen=True)
class Inputs(Fault):
    """Wrong inputs with the right labels.

    Attributes:
        wrong: `shifted` (each token id by one; each pixel by one standard deviation), `constant`, or `other` (random
            tokens; images upside down and inverted).
    """

    wrong: str

    def batch(self, batch: Batch, position: int, data: Any, random: torch.Generator) -> Batch:
        inputs = batch.inputs
        if inputs.is_floating_point():
            changed = {
                "shifted": lambda: inputs + 1,
                "constant": lambda: torch.zeros_like(inputs),
                "other": lambda: -inputs.flip(-2),
            }[self.wrong]()
        else:
            classes = count_classes(data, batch.targets)
            changed = {
                "shifted": lambda: (inputs + 1) % classes,
                "constant": lambda: torch.full_like(inputs, 32),
                "other": lambda: torch.randint(classes, inputs.shape, generator=random),
            }[self.wrong]()
        return replace(batch, inputs=changed)


@dataclass(frozen=True)
class Repeated(Fault):
    """One batch again and again."""

    of: int = 7

    def batch(self, batch: Batch, position: int, data: Any, random: torch.Generator) -> Batch:
        return data.batch(self.of, len(batch), "train").transformed()


@dataclass(frozen=True)
class Duplicated(Fault):
    """All rows of a batch are copies of its first ones."""

    rows: int = 1

    def batch(self, batch: Batch, position: int, data: Any, random: torch.Generator) -> Batch:
        rows = torch.arange(len(batch)) % self.rows
        return replace(batch, inputs=batch.inputs[rows], targets=batch.targets[rows])


@dataclass(frozen=True)
class Settings(Fault):
    """Settings of the optimizer, wrong for some updates: put back after each, as the log shows the planned ones.

    Attributes:
        factors: multiply settings of every parameter group.
        values: replace them.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def update(self, subject: Subject, n: int) -> AbstractContextManager:
        return self._around(subject)

    @contextlib.contextmanager
    def _around(self, subject: Subject) -> Iterator[None]:
        groups = subject.state.optimizer.param_groups
        planned = [dict(group) for group in groups]
        for group in groups:
            group.update({key: group[key] * factor for key, factor in self.factors.items() if key in group})
            group.update({key: value for key, value in self.values.items() if key in group})
        yield
        for group, before in zip(groups, planned, strict=True):
            group.update({key: before[key] for key in (*self.factors, *self.values) if key in before})


@dataclass(frozen=True)
class Jump(Fault):
    """The schedule jumps: the peak learning rate is another from here on, and the log shows it."""

    factor: float

    def state(self, subject: Subject, n: int) -> None:
        for group in subject.state.optimizer.param_groups:
            group["peak_lr"] = group.get("peak_lr", group["lr"]) * self.factor


@dataclass(frozen=True)
class Dropout(Fault):
    """Drops outputs of the model's blocks with this probability, in training only."""

    p: float

    def hooks(self, subject: Subject, n: int) -> list[RemovableHandle]:
        layers = [each for each in subject.model.modules() if isinstance(each, nn.Dropout)]

        def drop(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            keep = torch.rand(output.shape, generator=subject.random(n)) >= self.p
            return output * keep.to(output.dtype) / (1 - self.p) if torch.is_grad_enabled() else output

        return [each.register_forward_hook(drop) for each in layers]
