"""Process-wide settings of PyTorch's kernels: TF32 in fp32 operations, and the dtype of cuBLAS's partial sums.

TF32 keeps fp32's range and rounds the factors of a product to a mantissa of 10 bits. Every mode sets it explicitly,
because PyTorch enables it for convolutions but not for matmul. Every mode sets all settings, because a sweep prepares
several modes in one process.

PyTorch stores TF32 twice, in its newer calls (`fp32_precision`) and in its older ones (`allow_tf32`,
`get_float32_matmul_precision`). The newer calls do not change the older ones' copy. If the two differ, reading an older
one raises RuntimeError (PyTorch 2.11 to 2.15). `torch.export`, `torch.backends.cudnn.flags` and other libraries read
the older ones, so both are set here.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn

ON_CARD: list[Any] = [cuda.matmul, cudnn.conv, cudnn.rnn]  # ty: ignore[missing-attribute]
IN_ONEDNN: list[Any] = [mkldnn.matmul, mkldnn.conv, mkldnn.rnn]  # ty: ignore[missing-attribute]
"""The fp32 operations whose precision PyTorch stores, on CUDA and in oneDNN."""


def set_kernels(tf32: bool) -> None:
    """Sets the arithmetic of every matmul, convolution and RNN of this process.

    fp32 operations use TF32 on CUDA if `tf32`, else IEEE fp32. In oneDNN they always use IEEE fp32, because oneDNN's
    tf32 is not the format of NVIDIA cards.

    cuBLAS adds the partial sums of fp16 and bf16 products in fp32; it may still split a sum into parts (split-K). By
    PyTorch's default it may add them in fp16, which can overflow even if the product does not, or in bf16, which rounds
    each partial sum to 8 bits.
    """
    set_fp32_precision(["tf32" if tf32 else "ieee"] * len(ON_CARD) + ["ieee"] * len(IN_ONEDNN))
    cuda.matmul.allow_fp16_reduced_precision_reduction = False
    cuda.matmul.allow_bf16_reduced_precision_reduction = False


def set_fp32_precision(precisions: Sequence[str]) -> None:
    """Sets the precision of each of `ON_CARD` and `IN_ONEDNN`, in PyTorch's older and newer calls."""
    matmul, convolution, _, matmul_in_onednn, *_ = precisions
    # The older calls first: they also change the newer calls' copy, for several operations at once. `medium` means TF32
    # too, with bf16 in oneDNN's matmul.
    with_tf32 = "medium" if matmul_in_onednn == "bf16" else "high"
    torch.set_float32_matmul_precision(with_tf32 if matmul == "tf32" else "highest")
    cudnn.allow_tf32 = convolution == "tf32"
    for operation, precision in zip([*ON_CARD, *IN_ONEDNN], precisions, strict=True):
        operation.fp32_precision = precision


@contextlib.contextmanager
def ieee_kernels() -> Generator[None, None, None]:
    """A context in which fp32 matmuls, convolutions and RNNs use IEEE fp32, whatever the mode."""
    before = [operation.fp32_precision for operation in [*ON_CARD, *IN_ONEDNN]]
    try:
        set_fp32_precision(["ieee"] * len(before))
        yield
    finally:
        set_fp32_precision(before)
