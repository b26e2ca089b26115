"""Clipping: bounds gradients before the optimizer uses them.

| kind | what is bounded | by |
|---|---|---|
| none | - | - |
| norm | the whole gradient | a number |
| value | each value | a number |
| per_module | each module's gradient | a number |
| agc | each output unit's gradient | a fraction of the unit's weight norm |
| zclip | the whole gradient | the mean and spread of its recent norms |
| adagc | each tensor's gradient | its own recent norms |
| update_norm | the whole update | the mean and spread of its recent norms |

A kind is called with the model, whose `.grad` it rewrites in place, with the norms measured before clipping, and with
the gate, which says whether this step's update will be applied. Clipping runs after unscaling, so a bound means the
same in every precision. It never synchronizes with the host, and it runs outside the compiled model.

A non-finite norm is ignored: the gradient it belongs to stays unchanged, so a NaN does not spread to other tensors.
(`value` uses no norms; it clamps each element.) Running statistics and warm-ups ignore skipped steps, and norms that
are 0 or not finite.

`fixed.py` holds the kinds with a fixed bound, `adaptive.py` the kinds whose bound follows weights or earlier norms,
`update_norm.py` the one that clips updates in place of gradients.
"""

from stabletrain.stability.clipping.adaptive import AGC, AdaGC, ZClip
from stabletrain.stability.clipping.fixed import NoClip, NormClip, PerModuleClip, ValueClip
from stabletrain.stability.clipping.update_norm import UpdateNormClip

__all__ = ["AGC", "AdaGC", "NoClip", "NormClip", "PerModuleClip", "UpdateNormClip", "ValueClip", "ZClip"]
