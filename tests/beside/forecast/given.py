"""A model of the forecast that no fit changes, one that always alarms, and series of looks."""

from dataclasses import replace

from stabletrain.beside.forecast.model import Model
from stabletrain.beside.forecast.signals import SIGNALS

HEALTHY = {signal.name: 1e6 if signal.falls else 1e-6 for signal in SIGNALS} | {"attention_logits": 100.0}

MODEL = Model(-4.0, (4.0, 0.5, 0.25, 4.0, 0.5, 0.5), HEALTHY, 0.5, 0.8, 1.25, "")

LOUD = replace(MODEL, bias=50.0)
"""Its probability is always 1: it speaks at the first look with any level above 0."""

LOGITS = "monitors/attn_logit_max/blocks.0"


def looks(value, steps, rate=lambda step: 1e-3):
    """Returns `(step, metrics)` of looks at `steps`; `value` and `rate` are functions of the step."""
    return [(step, {"lr": rate(step), LOGITS: value(step)}) for step in steps]


def doubling(step, every=100, start=10.0):
    """A value that doubles every `every` steps."""
    return start * 2 ** (step / every)
