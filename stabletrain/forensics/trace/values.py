"""Tensors in numbers: how large their values are, whether they are finite, and which memory they lie in."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Values(NamedTuple):
    """The size of one tensor; `absmax` is NaN where it holds a NaN, and None where it holds whole numbers."""

    shape: tuple[int, ...]
    dtype: str
    absmax: float | None

    @property
    def finite(self) -> bool:
        """Whether it holds neither NaN nor Inf."""
        return self.absmax is None or math.isfinite(self.absmax)

    def as_dict(self) -> dict[str, Any]:
        """Shape, dtype, absmax and whether all is finite."""
        return {"shape": list(self.shape), "dtype": self.dtype, "absmax": self.absmax, "finite": self.finite}

    @property
    def nan(self) -> bool:
        """Whether it holds a NaN."""
        return self.absmax is not None and math.isnan(self.absmax)


def copy(value: Any) -> Any:
    """A copy of a tensor, or of a list of them."""
    if isinstance(value, Tensor):
        return value.clone()
    return [copy(each) for each in value] if isinstance(value, list | tuple) else value


def leaves(value: Any) -> Iterator[Any]:
    """What is in nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def is_float(tensor: Tensor) -> bool:
    """Whether it can hold NaN and Inf."""
    return tensor.is_floating_point() or tensor.is_complex()


def dense(tensor: Tensor) -> Tensor:
    """The tensor that holds the values: its own, or a sparse one's."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


def storage(tensor: Tensor) -> torch.UntypedStorage:
    """The memory that the values are in."""
    return dense(tensor).untyped_storage()


def whole(tensor: Tensor) -> bool:
    """Whether the tensor is all there is in its memory."""
    values = dense(tensor)
    return values.numel() * values.element_size() >= values.untyped_storage().nbytes()


def measure(tensor: Tensor) -> Values:
    """Its size: one pass over the values, and one number read from the device."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if not is_float(tensor):
        return Values(shape, dtype, None)
    values = dense(tensor)
    if values.numel() == 0:
        return Values(shape, dtype, 0.0)
    if values.is_complex():
        values = values.abs()
    elif values.dtype.itemsize == 1:  # fp8, which nothing compares
        values = values.float()
    least, most = torch.stack(torch.aminmax(values)).tolist()  # a NaN makes both NaN
    return Values(shape, dtype, max(abs(least), abs(most)))


def unmeasured(outputs: list[Tensor]) -> tuple[Values, ...]:
    """Shapes and dtypes of memory whose contents mean nothing."""
    return tuple(Values(tuple(t.shape), str(t.dtype).removeprefix("torch."), None) for t in outputs)
