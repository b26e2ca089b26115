"""Weights that FSDP2 gathers in half precision, for models that compute under autocast.

    shard in fp32 -> cast -> all-gather in bf16 -> whole weight in bf16, which is freed after the block's forward pass

Autocast casts each weight of a matrix product. The copy is kept for the backward pass, whatever FSDP2 frees: without
this, a bf16 copy of the whole model would exist between forward and backward. Here the gathered weight is half
precision already, looks like fp32, and autocast's cast of it returns that memory, which FSDP2 frees and fills again.
So the operations, their order and their precision are those of autocast in one process, and gradients are cast to fp32
before they are reduced. Half as many bytes are sent.

FSDP2's `MixedPrecisionPolicy` would cast every tensor of a block, also those that autocast leaves in fp32: the gains of
norms, embeddings, standardised kernels. Source: FSDP2's extensions for tensors, `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, in `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stabletrain.parallel.shards import shards_of

ATEN = torch.ops.aten
SAME_WEIGHT = {ATEN.detach.default, ATEN.alias.default, ATEN.as_strided.default}
"""Operations that FSDP2 applies to a whole weight to make a parameter of it."""


class Gathered(Tensor):
    """A whole weight in half precision that looks like one in `dtype`; a cast to half precision copies nothing.

    Any other operation gets a copy in `dtype`.
    """

    narrow_weight: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # ty: ignore[incompatible-method-override]

    @staticmethod
    def __new__(cls, inner: Tensor, dtype: torch.dtype) -> "Gathered":
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=dtype, device=inner.device
        )

    def __init__(self, inner: Tensor, dtype: torch.dtype) -> None:
        self.narrow_weight = inner

    @classmethod
    def __torch_dispatch__(  # ty: ignore[incompatible-method-override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Runs an operation; see the class."""
        kwargs = kwargs or {}
        own = args[0] if args else None
        if isinstance(own, Gathered):
            if func in SAME_WEIGHT:
                return Gathered(func(own.narrow_weight, *args[1:], **kwargs), own.dtype)
            wanted = {name: value for name, value in kwargs.items() if name != "non_blocking"}
            if func is ATEN._to_copy.default and wanted == {"dtype": own.narrow_weight.dtype}:
                return own.narrow_weight.detach()  # another tensor with the same memory, for its own graph
        wide = tree_map_only(Gathered, lambda each: each.narrow_weight.to(each.dtype), (args, kwargs))
        return func(*wide[0], **wide[1])

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """Says to the compiler what this consists of."""
        return ["narrow_weight"], self.dtype

    @staticmethod
    def __tensor_unflatten__(parts: Mapping[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "Gathered":
        """Makes it of that again."""
        return Gathered(parts["narrow_weight"], dtype)


def gather_in(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Makes FSDP2 gather a sharded parameter in half precision. Call it before the first forward pass.

    Args:
        parameter: of an FSDP2 module, sharded by rows; fp32.
        dtype: of the whole weight.
    """
    shard = parameter._local_tensor  # ty: ignore[missing-attribute]
    rows = len(parameter)
    padded = -(-rows // shards_of(parameter))

    def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor, ...], None]:
        narrow = shard.to(dtype)
        if len(narrow) < padded:  # the last ranks may have fewer rows, or none
            missing = narrow.new_zeros(padded - len(narrow), *narrow.shape[1:])
            narrow = torch.cat([narrow, missing])
        return (narrow,), None

    def after(outputs: Sequence[Tensor], _: None, wide: torch.dtype, *, out: Tensor | None = None) -> Any:
        # The gathered memory is the weight, also when it is filled again: then there is nothing to do.
        return None if out is not None else (Gathered(outputs[0][:rows], wide), ())

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
    shard.gathered_dtype = dtype


def gathered_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Returns in which dtype FSDP2 gathers a sharded parameter."""
    shard = parameter._local_tensor  # ty: ignore[missing-attribute]
    return getattr(shard, "gathered_dtype", shard.dtype)
