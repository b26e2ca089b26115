"""Faults of memory: weights, moments or buffers change between two updates, though no code changed them."""

from dataclasses import dataclass

import torch

from tests.reliability.finite.fault import Fault
from tests.reliability.finite.subject import Bits, Subject


@dataclass(frozen=True)
class Flip(Fault):
    """Flips bits of some elements, counted as in fp32: 0 to 22 mantissa, 23 to 30 exponent, 31 sign."""

    where: str
    flipped: tuple[int, ...]
    elements: int = 1

    def state(self, subject: Subject, n: int) -> None:
        tensors = subject.tensors(self.where)
        tensor = tensors[subject.draw(len(tensors), 5)]
        for place in [*subject.places(tensor, self.elements)]:
            for bit in self.flipped:
                Bits(tensor).flip_(place, bit)


@dataclass(frozen=True)
class Stuck(Fault):
    """Exponent bits 23 to 29 of one element are always 1, whatever is written: its magnitude is in [1, 2)."""

    where: str

    def state(self, subject: Subject, n: int) -> None:
        tensor = subject.tensors(self.where)[0]
        place = subject.kept.setdefault("place", next(subject.places(tensor, 1)))
        for bit in range(23, 30):
            Bits(tensor).set_(place, bit)


@dataclass(frozen=True)
class Frozen(Fault):
    """Writes to some rows of a tensor do not arrive: they keep the values of the fault's first step."""

    where: str
    rows: int

    def state(self, subject: Subject, n: int) -> None:
        tensor = subject.tensors(self.where)[0]
        rows = slice(0, min(self.rows, len(tensor)))
        if n == 0:
            subject.kept["rows"] = tensor[rows].clone()
        tensor[rows] = subject.kept["rows"]


@dataclass(frozen=True)
class Scaled(Fault):
    """Multiplies tensors by a factor in each step."""

    where: str
    factor: float

    def state(self, subject: Subject, n: int) -> None:
        for tensor in subject.tensors(self.where):
            tensor.mul_(self.factor)


@dataclass(frozen=True)
class Permuted(Fault):
    """Permutes rows (`dim` 0) or columns (1) of one matrix."""

    dim: int

    def state(self, subject: Subject, n: int) -> None:
        tensor = subject.matrix().data
        if tensor.shape[self.dim] == 1:  # nothing to permute, as in the first convolution of gray images
            tensor = max((each.data for each in subject.matrices()), key=lambda each: each.shape[self.dim])
        order = torch.randperm(tensor.shape[self.dim], generator=subject.random(1))
        tensor.copy_(tensor.index_select(self.dim, order))


@dataclass(frozen=True)
class Exchanged(Fault):
    """Exchanges the last two matrices that have one shape."""

    def state(self, subject: Subject, n: int) -> None:
        seen: dict[torch.Size, torch.Tensor] = {}
        for parameter in reversed(subject.matrices()):
            if (other := seen.get(parameter.shape)) is not None:
                mine = parameter.data.clone()
                parameter.data.copy_(other)
                other.copy_(mine)
                return
            seen[parameter.shape] = parameter.data


@dataclass(frozen=True)
class Stale(Fault):
    """Puts an older copy back."""

    where: str
    age: int = 50

    def ahead(self) -> int:
        return self.age

    def remember(self, subject: Subject) -> None:
        subject.kept["older"] = [tensor.clone() for tensor in subject.tensors(self.where)]

    def state(self, subject: Subject, n: int) -> None:
        for tensor, older in zip(subject.tensors(self.where), subject.kept["older"], strict=True):
            tensor.copy_(older)


@dataclass(frozen=True)
class Overwritten(Fault):
    """Writes elements of another matrix over those of one matrix, as a wrong address does."""

    elements: int

    def state(self, subject: Subject, n: int) -> None:
        target = subject.matrix()
        others = [each for each in subject.matrices() if each is not target]
        source = others[subject.draw(len(others), 3)].data.reshape(-1)
        flat = target.data.flatten().clone()
        count = min(self.elements, len(flat), len(source))
        begin = subject.draw(len(flat) - count + 1, 4)
        flat[begin : begin + count] = source[:count].to(flat.dtype)
        target.data.copy_(flat.view(target.shape))  # of any strides


@dataclass(frozen=True)
class Noisy(Fault):
    """Adds noise to one matrix, with this share of its standard deviation."""

    share: float

    def state(self, subject: Subject, n: int) -> None:
        tensor = subject.matrix().data
        noise = torch.randn(tensor.shape, generator=subject.random(100 + n))
        tensor.add_((noise * tensor.float().std() * self.share).to(tensor.dtype))
