"""Precision: the dtype in which the forward and backward pass compute, and fp16's loss scaling.

Parameters, gradients and optimizer state are fp32 in every mode except bf16_params. Only the operations on autocast's
list run in a lower precision, and not in the modules named by `fp32_modules`. Every mode sets TF32 explicitly for
matmul and for convolution, because PyTorch's defaults differ between the two.

| mode | autocast | TF32 | loss scaling | fp32 modules |
|---|---|---|---|---|
| fp32 | - | off | - | - |
| tf32 | - | on | - | - |
| bf16 | bfloat16 | off | - (fp32's range) | as named |
| bf16_params | bfloat16, matrices also stored in it | off | - | as named |
| fp16 | float16 | off | dynamic | as named |
| fp8 | bfloat16, linear layers in float8 | off | - (a scale for each tensor or row) | as named |

`base.py` holds what every mode offers, `autocast.py` autocast and the modules kept in fp32, `kernels.py` PyTorch's
process-wide settings, `loss_scale.py` fp16's loss scale, `bf16_weights.py` the parameters stored in bf16,
`fp8_linear.py` the linear layers in fp8, `modes.py` the other options of the config group, and `loop.py` the precision
of a loop of the user's own.
"""

from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.stability.precision.fp8_linear import Fp8Linears, fp8
from stabletrain.stability.precision.loss_scale import LossScaled
from stabletrain.stability.precision.modes import auto, bf16, bf16_params, fp16, fp32, tf32

__all__ = ["Fp8Linears", "LossScaled", "Unscaled", "auto", "bf16", "bf16_params", "fp8", "fp16", "fp32", "tf32"]
