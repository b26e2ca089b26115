"""Clipping: gradients that are too long are shortened before the optimizer sees them.

| kind | what is bounded | by |
|---|---|---|
| none | - | - |
| norm | the whole gradient | a number |
| value | each value | a number |
| per_module | each module's gradient | a number |
| agc | each output unit's gradient | a share of the unit's weights |
| zclip | the whole gradient | its own recent norms: mean and spread |
| adagc | each tensor's gradient | its own recent norms |

A kind is called with the model, whose `.grad` it may rewrite, with the norms measured before, and with the gate:
whether this step's update will be applied. It is called after unscaling, so a bound means the same in every precision,
and after the guard has judged. It asks nothing of the host, and it acts after the backward pass, so a compiled model
stays whole.

A norm that is not finite decides nothing: what it belongs to stays as it is, so a NaN never spreads from one tensor to
the others. (`value` uses no norms: it cuts each element.) Nor does it enter a statistic; neither does the norm of a
step whose gate is closed.

`fixed.py` holds the kinds with a fixed bound, `adaptive.py` those whose bound follows weights or earlier norms.
"""

from stabletrain.stability.clipping.adaptive import AGC, AdaGC, ZClip
from stabletrain.stability.clipping.fixed import NoClip, NormClip, PerModuleClip, ValueClip

__all__ = ["AGC", "AdaGC", "NoClip", "NormClip", "PerModuleClip", "ValueClip", "ZClip"]
