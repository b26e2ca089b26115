"""The signals of a forecast: what each measures, the value at which trouble begins, the fix, and its line.

A signal's height is `log(value)` or `value`, with the sign turned if trouble lies below. Its level says how far it has
come from the values of healthy runs to its threshold:

    level = (height - height of healthy) / (height of threshold - height of healthy)        0: healthy, 1: threshold

The healthy value of each signal is measured: it is a quantile over runs without trouble (`model.json`).

A prediction names the signal's fixes, without those that the run already has or would refuse.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stabletrain.extension import Prediction

TINY = 1e-30
"""Smallest number whose logarithm is taken."""

LEAST = 0.5
"""Smallest distance between a healthy height and a level of 1, if the threshold is nearer than that."""

HIGHEST = 1.5
"""Largest level; values that are not finite have this level."""


@dataclass(frozen=True)
class Signal:
    """One signal.

    Attributes:
        name: its name in events.
        text: what the messages call it, a plural.
        metric: the metric's name; if it ends in `/`, one metric for each place in the model.
        threshold: value at which trouble begins.
        fix: what removes the cause, best first, each one override or several that go together; `{lr}` is replaced by
            a lower peak learning rate.
        source: of the threshold.
        falls: whether trouble lies below the threshold.
        log: whether the height is the logarithm of the value.
        counts: whether the probability depends on it, and so what is said.
    """

    name: str
    text: str
    metric: str
    threshold: float
    fix: tuple[str, ...]
    source: str
    falls: bool = False
    log: bool = True
    counts: bool = True

    def height(self, value: float) -> float:
        """Returns the height of a value, which grows towards trouble; infinity if the value is not finite."""
        if not math.isfinite(value):
            return math.inf
        height = math.log(max(abs(value), TINY)) if self.log else value
        return -height if self.falls else height

    def value(self, height: float) -> float:
        """Returns the value of a height; the inverse of `height`, but for the value's sign."""
        height = -height if self.falls else height
        return math.exp(min(height, 700.0)) if self.log and math.isfinite(height) else height

    def level(self, height: float, healthy: float) -> float:
        """Returns the level of a height, in [0, 1.5]; `healthy` is the value of healthy runs."""
        return level(height, *self.span(healthy))

    def span(self, healthy: float) -> tuple[float, float]:
        """Returns the height whose level is 0, and how far above it level 1 is; `healthy` is as in `level`."""
        low = self.height(healthy)
        return low, max(self.height(self.threshold) - low, LEAST)


def level(height: float, low: float, length: float) -> float:
    """Returns the level of a height, in [0, 1.5]; `low` and `length` are what `Signal.span` returns."""
    return 0.0 if math.isnan(height) else min(HIGHEST, max(0.0, (height - low) / length))


LOSS = "forecast/loss_rise"
"""Name of the loss's rise above its best, which the series compute."""

LOWER_RATE = ("optimizer.lr={lr}",)
QK_NORM = "qknorm=layernorm optimizer.lr={lr}"
"""Both: on the runs of docs/evidence/foresight.md, one alone saves less, from the start and from the alarm on."""

OWN = "chosen here: see docs/evidence/foresight.md"

SIGNALS = (
    Signal(
        "attention_logits",
        "largest attention logits",
        "monitors/attn_logit_max/",
        1e4,
        (QK_NORM, "qkclip=kimi", *LOWER_RATE),
        "arXiv 2309.14322, section 3.1: every run above 1e4 diverged",
    ),
    Signal(
        "attention_bound",
        "bounds of attention logits",
        "monitors/attn_logit_bound/",
        3e4,
        (QK_NORM, "qkclip=kimi", *LOWER_RATE),
        "three times the threshold of the logits themselves",
    ),
    Signal(
        "attention_entropy",
        "smallest attention entropies",
        "monitors/attn_entropy_min/",
        0.01,
        (QK_NORM, *LOWER_RATE),
        "arXiv 2303.06296: entropy collapse; the value is chosen here",
        falls=True,
    ),
    Signal("log_z", "log Z of the output logits", "monitors/log_z_max", 50.0, ("zloss=palm", *LOWER_RATE), OWN),
    Signal(
        "headroom",
        "bits of headroom below fp16's maximum",
        "monitors/headroom/",
        0.0,
        ("precision=bf16", *LOWER_RATE),
        "IEEE 754-2019, binary16: 65504",
        falls=True,
        log=False,
    ),
    Signal(
        "loss_scale",
        "loss scales",
        "precision/loss_scale",
        1.0,
        ("precision=bf16", *LOWER_RATE),
        "at 1 scaling protects nothing any more (arXiv 1710.03740)",
        falls=True,
    ),
    Signal("activations", "activations (RMS)", "monitors/activation_rms/", 1e5, (*LOWER_RATE, "init=gpt2"), OWN),
    Signal("weights", "weights (RMS)", "monitors/weight_rms/", 100.0, LOWER_RATE, OWN),
    Signal("update_ratio", "updates over weights", "monitors/update_ratio/", 1.0, LOWER_RATE, OWN),
    Signal(
        "g_over_sqrt_v",
        "RMS(g / sqrt(v))",
        "monitors/g_over_sqrt_v_max",
        10.0,
        ("optimizer.betas=[0.9,0.95]", "optimizer=stable_adamw", *LOWER_RATE),
        "arXiv 2304.13013, section 3.4: above 2.3 comes a spike; single tensors of small models need more",
    ),
    Signal(
        "norm_variance",
        "smallest variances over eps in normalisation layers",
        "monitors/norm_variance/",
        1.0,
        ("optimizer.weight_decay=0", *LOWER_RATE),
        "at 1 half of the variance is eps",
        falls=True,
    ),
    Signal("grad_norm", "gradient norms", "grad/norm", 100.0, ("clipping=norm", *LOWER_RATE), OWN),
    Signal(
        "update_margin",
        "factors by which the update could be longer",
        "monitors/update_margin",
        1.0,
        LOWER_RATE,
        "arXiv 2601.16979: below 1 the update raises the loss of its own batch",
        falls=True,
        counts=False,  # healthy runs stay near 1 too: docs/evidence/foresight.md
    ),
    Signal(
        "loss",
        "rises of the loss above its best, as a share of what was learnt",
        LOSS,
        0.5,
        LOWER_RATE,
        "the definition of a break in docs/evidence/foresight.md",
        log=False,
    ),
)
"""All signals."""

BY_METRIC = {signal.metric: signal.name for signal in SIGNALS}


def values_of(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Returns the values in a look's metrics by signal and place; the place is "" of a signal that has only one."""
    found: dict[str, dict[str, float]] = {signal.name: {} for signal in SIGNALS}
    for name, value in metrics.items():
        if name in BY_METRIC:
            found[BY_METRIC[name]][""] = value
            continue
        first, _, rest = name.partition("/")
        second, slash, place = rest.partition("/")
        if slash and (signal := BY_METRIC.get(f"{first}/{second}/")):
            found[signal][place] = value
    return found


BY_NAME: dict[str, Signal] = {signal.name: signal for signal in SIGNALS}


def text_of(found: Prediction, signal: Signal, slope: float, healthy: float, far: str) -> str:
    """Returns a prediction as one line, without the step.

    Args:
        found: the prediction.
        signal: its signal.
        slope: change of the signal's height a step.
        healthy: the value up to which runs without trouble go.
        far: why there is no percentage (`distance.py`); empty if there is one.
    """
    what = f"{signal.text}{f' of {found.place}' if found.place else ''}"
    verb = "fall" if signal.falls else "rise"
    if signal.log and slope > 0:
        verb = f"{'halve' if signal.falls else 'double'} every {math.log(2) / slope:,.0f} steps"
    if math.isfinite(found.at):
        when = f"near step {found.at:,.0f} ({found.low:,.0f}-{found.high:,.0f})"
        first = f"{what} {verb} and reach {signal.threshold:g} {when}"
    elif signal.level(signal.height(found.value), healthy) >= 1:
        first = f"{what} are {found.value:.3g}, beyond {signal.threshold:g}"
    else:
        first = f"{what} are {found.value:.3g}, of healthy runs {'at least' if signal.falls else 'at most'} {healthy:g}"
    often = far or f"{min(99, round(100 * found.probability))} of 100 runs like this break or end worse"
    return f"{first}; {often}; fix: {found.fix[0]}" if found.fix else f"{first}; {often}"


EITHER = ("qknorm", "qkclip")
"""Groups of which a run may use one: the other one is refused."""


def fixes(
    signal: Signal, choices: Mapping[str, str], optimizer: Mapping[str, Any], slower: float = 3.0
) -> tuple[str, ...]:
    """Returns fixes, best first; a fix is one override, or several with blanks between them.

    Args:
        signal: what is in trouble.
        choices: the option of each config group; empty if not known.
        optimizer: the keys of the chosen optimizer; empty if not known.
        slower: by how much a fix lowers the learning rate.
    """
    together = ((filled_in(word, choices, optimizer, slower) for word in fix.split()) for fix in signal.fix)
    found = [" ".join(filter(None, words)) for words in together]
    return tuple(dict.fromkeys(filter(None, found)))


def filled_in(fix: str, choices: Mapping[str, str], optimizer: Mapping[str, Any], slower: float) -> str:
    """Returns one override with its value filled in; empty if the run already has it or would refuse it."""
    key, _, value = fix.partition("=")
    group, _, name = key.partition(".")
    if not name:
        return fix if helps(group, value, choices) else ""
    if name not in optimizer or ("{" not in value and optimizer[name] == json.loads(value)):
        return ""
    return fix.format(lr=f"{optimizer['lr'] / slower:.2g}") if "{lr}" in fix else fix


def helps(group: str, option: str, choices: Mapping[str, str]) -> bool:
    """Returns whether an option is neither what the run has nor refused beside its other options."""
    chosen = choices.get(group)
    if group in EITHER:
        return all(choices.get(each, "none") == "none" for each in EITHER)
    if group == "optimizer":
        return chosen in (None, "adamw")
    if group == "init":  # the GPTs' own
        return chosen != option and choices.get("model", "gpt").startswith("gpt")
    return chosen != option
