"""Every mode but fp16: forward and backward in one format, the loss differentiated as it is.

TF32 keeps fp32's range and rounds the factors of a product to 10 bits. It is set both ways here, because PyTorch leaves
it off for matmul and on for convolution, and because a sweep prepares several modes in one process.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.records import GradNorms, LossTerms
from stabletrain.stability.precision.islands import check_patterns, make_islands


def set_kernels(tf32: bool) -> None:
    """Sets the format of every fp32 matmul, convolution and RNN of the process, on CUDA and in oneDNN.

    fp16's partial sums stay fp32 in every mode: added up in fp16, which PyTorch permits cuBLAS, they overflow where
    the product itself would not.
    """
    from torch.backends import cuda, cudnn, mkldnn

    on_card: list[Any] = [cuda.matmul, cudnn.conv, cudnn.rnn]  # ty: ignore[missing-attribute]
    for operation in on_card:
        operation.fp32_precision = "tf32" if tf32 else "ieee"
    in_onednn: list[Any] = [mkldnn.matmul, mkldnn.conv, mkldnn.rnn]  # ty: ignore[missing-attribute]
    for operation in in_onednn:
        operation.fp32_precision = "ieee"  # what oneDNN calls tf32 is not the cards' format
    cuda.matmul.allow_fp16_reduced_precision_reduction = False


@dataclass
class Unscaled:
    """Every mode but fp16.

    Attributes:
        name: the mode.
        device: where the model lives.
        dtype: what autocast computes in; float32 means no autocast.
        tf32: whether fp32 matmuls and convolutions may round to TF32.
        why: one line for people, where the mode was chosen for them or is slow here.
        fp32_modules: patterns of module names that compute in fp32; see `islands.py`.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    tf32: bool = False
    why: str = ""
    fp32_modules: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_patterns(self.fp32_modules)
        if self.fp32_modules and self.dtype == torch.float32:
            idle = "precision.fp32_modules does nothing: every module is fp32"
            self.why = f"{self.why}; {idle}" if self.why else idle

    def prepare(self) -> None:
        """Sets the process's switches; call before the first step."""
        set_kernels(self.tf32)

    def islands(self, model: nn.Module) -> list[str]:
        """Makes the modules that `fp32_modules` names islands of fp32, in place; returns their names.

        Call it once the model is on its device, and before it is compiled.

        Raises:
            ConfigError: a pattern names no module, or one that is never called.
        """
        if self.dtype == torch.float32:
            return []
        return make_islands(model, self.fp32_modules, self.device.type)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Nothing: parameters are fp32, and the optimizer works on them as they are.

        Call it once `islands` is done and the optimizer made, before anything is restored or compiled.
        """
        del model, optimizer

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context of forward pass and nothing else."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def scale(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The loss itself."""
        return loss

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Gradients stay as they are."""
        del gradients

    def loss_scale(self) -> Float[Tensor, ""]:
        """1."""
        return torch.ones((), device=self.device)

    def overflow(self, terms: LossTerms, norms: GradNorms) -> Bool[Tensor, ""]:
        """Never: these formats have fp32's range, so a non-finite gradient is no routine."""
        del terms
        return torch.zeros_like(norms.total, dtype=torch.bool)

    def update(self, overflow: Bool[Tensor, ""], applied: Bool[Tensor, ""]) -> None:
        """Nothing to calibrate."""
        del overflow, applied

    def state_dict(self) -> dict:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Nothing."""
        del state
