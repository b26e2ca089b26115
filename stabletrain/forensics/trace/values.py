"""Measures tensors: magnitude, finiteness and storage."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabletrain.checkpoint.tree import map_tensors


class Values(NamedTuple):
    """Shape, dtype and magnitude of a tensor. `absmax` is NaN if it holds a NaN, and None if it holds integers."""

    shape: tuple[int, ...]
    dtype: str
    absmax: float | None

    @property
    def finite(self) -> bool:
        """Whether the tensor holds neither NaN nor Inf."""
        return self.absmax is None or math.isfinite(self.absmax)

    def as_dict(self) -> dict[str, Any]:
        """The values as a mapping."""
        return {"shape": list(self.shape), "dtype": self.dtype, "absmax": self.absmax, "finite": self.finite}

    @property
    def nan(self) -> bool:
        """Whether the tensor holds a NaN."""
        return self.absmax is not None and math.isnan(self.absmax)


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts."""
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
    """Whether a tensor can hold NaN and Inf."""
    return tensor.is_floating_point() or tensor.is_complex()


def unscaled(value: Any) -> Any:
    """Converts torchao's scaled fp8 tensors and shards, also in lists, tuples and dicts, to ordinary tensors."""

    def ordinary(tensor: Tensor) -> Tensor:
        tensor = local(tensor)
        return tensor.to_original_precision() if is_scaled_fp8(tensor) else tensor  # ty: ignore[missing-attribute]

    return map_tensors(ordinary, value)


def is_scaled_fp8(tensor: Tensor) -> bool:
    """Whether a tensor is torchao's pair of fp8 values, `_data`, and their scale, `_scale`."""
    return hasattr(tensor, "to_original_precision")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that is sharded across ranks (`DTensor`); reading it does not communicate."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor  # ty: ignore[invalid-explicit-return]


def dense(tensor: Tensor) -> Tensor:
    """The dense tensor that holds the values; for a sparse tensor, its values; for a scaled fp8 tensor, these."""
    tensor = local(tensor)
    if is_scaled_fp8(tensor):
        return tensor._data  # ty: ignore[missing-attribute]
    if tensor.layout == torch.strided:
        return tensor
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


def storage(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of the values."""
    return dense(tensor).untyped_storage()


def whole(tensor: Tensor) -> bool:
    """Whether the tensor covers its whole storage."""
    values = dense(tensor)
    return values.numel() * values.element_size() >= values.untyped_storage().nbytes()


def measure(tensor: Tensor) -> Values:
    """Measures a tensor in one pass, with one host read."""
    shape, dtype = tuple(tensor.shape), str(dense(tensor).dtype).removeprefix("torch.")
    if not is_float(tensor):
        return Values(shape, dtype, None)
    values = dense(unscaled(tensor))
    if values.numel() == 0:
        return Values(shape, dtype, 0.0)
    if values.is_complex():
        values = values.abs()
    elif values.dtype.itemsize == 1:  # fp8 has no comparison kernels
        values = values.float()
    least, most = torch.stack(torch.aminmax(values)).tolist()  # a NaN makes both NaN
    return Values(shape, dtype, max(abs(least), abs(most)))


def unmeasured(outputs: list[Tensor]) -> tuple[Values, ...]:
    """Shapes and dtypes only, for memory that is not initialised."""
    return tuple(Values(tuple(t.shape), str(t.dtype).removeprefix("torch."), None) for t in outputs)
