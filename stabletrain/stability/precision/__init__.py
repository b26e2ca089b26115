"""Precision: in which format the forward and backward pass compute, and what fp16 needs so as to survive it.

Parameters, gradients and optimizer state are fp32 in every mode but bf16_params; only autocast's list of operations
runs lower, and not in the modules that `fp32_modules` names. TF32 is set explicitly in every mode, for matmul and
for convolution, since PyTorch's defaults differ between the two.

| mode | autocast | TF32 | loss scaling | fp32 modules |
|---|---|---|---|---|
| fp32 | - | off | - | - |
| tf32 | - | on | - | - |
| bf16 | bfloat16 | off | - (fp32's range) | as named |
| bf16_params | bfloat16, matrices stored so | off | - | as named |
| fp16 | float16 | off | dynamic | as named |

`autocast.py` is autocast and the modules kept in fp32, `loss_scale.py` fp16's loss scale,
`bf16_weights.py` the parameters kept in bf16, `modes.py` what the config group offers."""

from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.stability.precision.loss_scale import LossScaled
from stabletrain.stability.precision.modes import auto, bf16, bf16_params, fp16, fp32, tf32

__all__ = ["LossScaled", "Unscaled", "auto", "bf16", "bf16_params", "fp16", "fp32", "tf32"]
