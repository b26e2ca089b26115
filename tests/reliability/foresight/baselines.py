"""What the forecast has to beat, on the same looks: a number for each look, higher for more trouble.

| baseline | number |
|---|---|
| loss | mean loss since the last look over its average so far |
| CUSUM | one-sided cumulative sum of the loss, in standard deviations of the last 200 steps, with a slack of 0.5 |
| gradient norm | largest norm since the last look, in standard deviations above the mean of the 100 steps before |
| activations | largest activation RMS, in median absolute deviations above the run's median so far |
| attention logit | the largest |
| RMS(g / sqrt(v)) | the largest of a tensor |
| learning rate | a logistic model of the configuration: learning rate now, steps left, kind of model, knobs |
| random | a random number |
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tests.reliability.foresight.cases import all_cases
from tests.reliability.foresight.fit import logistic
from tests.reliability.foresight.looks import Watched
from tests.reliability.foresight.score import EARLIEST, Scores

CASES = {case.name: case for case in all_cases()}


def spans(each: Watched) -> list[tuple[int, int]]:
    """Returns the indices of the steps from one look to the next."""
    steps = each.run.recording["steps"]
    ends = [int(np.searchsorted(steps, step, "right")) for step in each.steps]
    return [*zip([0, *ends], ends, strict=False)]


def finite(values: np.ndarray) -> np.ndarray:
    """Replaces numbers that are not finite by a very large one."""
    return np.where(np.isfinite(values), values, 1e12).astype(float)


def loss(each: Watched) -> list[float]:
    """Returns the loss over its average so far."""
    values = finite(each.run.recording["stepwise"][:, 0])
    return [values[a:b].mean() / max(values[: max(a, 1)].mean(), 1e-9) if b > a else 0.0 for a, b in spans(each)]


def cusum(each: Watched) -> list[float]:
    """Returns the cumulative sum of the loss."""
    values = finite(each.run.recording["stepwise"][:, 0])
    begin = [values[:number] for number in range(min(200, len(values)))]
    whole = sliding_window_view(values, 200)[:-1] if len(values) > 200 else np.empty((0, 200))  # before each later step
    means = [*(before.mean() if len(before) else 0.0 for before in begin), *whole.mean(axis=1)]
    deviations = [*(before.std() if len(before) else 0.0 for before in begin), *whole.std(axis=1)]
    total, sums = 0.0, []
    for number, value in enumerate(values):
        if number >= 20:
            total = max(0.0, total + (value - means[number]) / max(deviations[number], 1e-9) - 0.5)
        sums.append(total)
    return [max(sums[a:b], default=0.0) for a, b in spans(each)]


def grad_norm(each: Watched) -> list[float]:
    """Returns the largest gradient norm in standard deviations."""
    values, found = finite(each.run.recording["stepwise"][:, 1]), []
    for a, b in spans(each):
        before = values[max(0, a - 100) : a]
        quiet = len(before) < 20 or b <= a
        found.append(0.0 if quiet else (values[a:b].max() - before.mean()) / max(before.std(), 1e-9))
    return found


def activations(each: Watched) -> list[float]:
    """Returns the largest activation RMS in median absolute deviations."""
    values, found = metric(each, "monitors/activation_rms_max"), []
    for number, value in enumerate(values):
        before = np.array(values[max(0, number - 40) : number])
        if len(before) < 4:
            found.append(0.0)
            continue
        deviation = np.median(np.abs(before - np.median(before)))
        found.append((value - np.median(before)) / max(float(deviation), 1e-9))
    return found


def metric(each: Watched, name: str) -> list[float]:
    """Returns a metric at each look; 0 where it was not measured."""
    names = each.run.recording["names"]
    if name not in names:
        return [0.0] * len(each.steps)
    values = each.run.recording["signals"][:, names.index(name)]
    looks = np.searchsorted(each.run.recording["looks"], each.steps)
    return [0.0 if math.isnan(value) else float(value) for value in finite_or_nan(values[looks])]


def finite_or_nan(values: np.ndarray) -> np.ndarray:
    """Replaces infinity by a very large number."""
    return np.where(np.isinf(values), 1e12, values)


def attention_logit(each: Watched) -> list[float]:
    """Returns the largest attention logit."""
    return metric(each, "monitors/attn_logit_max")


def g_over_sqrt_v(each: Watched) -> list[float]:
    """Returns the largest RMS(g / sqrt(v)) of a tensor."""
    return metric(each, "monitors/g_over_sqrt_v_max")


def chance(each: Watched) -> list[float]:
    """Returns random numbers, the same for a run every time."""
    seed = [*each.run.name.encode()]
    return [*np.random.default_rng(seed).random(len(each.steps))]


SIMPLE: dict[str, Callable[[Watched], list[float]]] = {
    "loss": loss,
    "CUSUM": cusum,
    "gradient norm": grad_norm,
    "activations": activations,
    "attention logit": attention_logit,
    "RMS(g / sqrt(v))": g_over_sqrt_v,
    "random": chance,
}


def simple_scores(runs: Sequence[Watched], name: str) -> Scores:
    """Returns a baseline's numbers of all runs."""
    return {each.run.name: np.array(SIMPLE[name](each)) for each in runs}


def configuration(each: Watched) -> np.ndarray:
    """Returns what the configuration says at each look, `[look, 9]`."""
    case = CASES[each.run.name]
    settings = dict(override.partition("=")[::2] for override in case.overrides)
    resnet = "experiment" in settings
    muon = settings.get("optimizer") == "muon"
    rates = np.log10(np.maximum(metric(each, "lr"), 1e-6))
    peak = math.log10(case.rate)
    fixed = [
        float(resnet),
        float(muon),
        float("qknorm" in settings and settings["qknorm"] != "none"),
        float(settings.get("zloss", "none") != "none"),
        float(settings.get("precision") == "fp16"),
        float(settings.get("optimizer.betas") == "[0.9,0.999]"),
        100 * float(settings.get("schedule.growth", settings.get("+schedule.growth", 0))),
    ]
    kind = 0.0 if resnet else 1.0
    return np.array([[kind * rate, (1 - kind) * rate, kind * peak, *fixed] for rate in rates])


def configuration_scores(fitted: Sequence[Watched], runs: Sequence[Watched]) -> Scores:
    """Returns the probability by a logistic model of the configuration; knobs may count either way."""
    values, labels, weights = [], [], []
    for each in fitted:
        broke = math.inf if each.run.broke is None else each.run.broke
        rows = [
            (row, each.run.worse or broke - step <= EARLIEST)
            for step, row in zip(each.steps, configuration(each), strict=True)
            if step < broke
        ]
        for row, label in rows:
            values.append(np.concatenate([row, -row]))  # a weight for each sign, because weights are not negative
            labels.append(float(label))
            weights.append(1 / len(rows))
    bias, *found = logistic(np.array(values), np.array(labels), np.array(weights))
    both = np.array(found)
    slope = both[: len(both) // 2] - both[len(both) // 2 :]
    return {each.run.name: bias + configuration(each) @ slope for each in runs}
