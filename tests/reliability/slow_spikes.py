"""How often the change-point test of slow spikes alarms on clean series, by its threshold.

    python -m tests.reliability.slow_spikes --values 1000000

Each series is a loss that falls as a power of the step, plus autocorrelated noise (AR(1), 0.3) that is normal,
heavy-tailed (Student's t, 4 degrees of freedom), or skewed (log-normal). The test's sum S begins anew after each alarm.
From the rates at several thresholds follows the table in `monitors/change_point.py`: threshold = a - b log10(rate).
The rate is in false alarms per 100,000 values.
"""

import argparse
import math
from collections.abc import Iterator

import numpy as np

from stabletrain.monitors.change_point import ChangePoint

THRESHOLDS = (5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0)
LENGTH = 20_000
CORRELATION = 0.3


def noise(kind: str, count: int, drawn: np.random.Generator) -> np.ndarray:
    """Returns `count` independent values of about unit deviation."""
    if kind == "normal":
        return drawn.standard_normal(count)
    if kind == "heavy":
        return drawn.standard_t(4, count) / math.sqrt(2)
    return (np.exp(0.5 * drawn.standard_normal(count)) - math.exp(0.125)) / 0.6


def series(kind: str, count: int, drawn: np.random.Generator) -> Iterator[float]:
    """Yields a clean loss: 2 + 3 (1 + step / 50)^-0.5 + 0.1 noise."""
    previous = 0.0
    for step, value in enumerate(noise(kind, count, drawn)):
        previous = CORRELATION * previous + math.sqrt(1 - CORRELATION**2) * float(value)
        yield 2 + 3 * (1 + step / 50) ** -0.5 + 0.1 * previous


def alarms(kind: str, limit: float, values: int) -> int:
    """Returns the number of alarms in `values` values, over series of `LENGTH`."""
    found, drawn = 0, np.random.default_rng(0)
    for _ in range(max(values // LENGTH, 1)):
        test = ChangePoint(limit, down=False)
        for step, value in enumerate(series(kind, min(LENGTH, values), drawn)):
            if test.add(step, value) > 1:
                found += 1
                test.reset()
    return found


def main() -> None:
    """Prints the rates and the line through their logarithms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1_000_000, help="values for each kind of noise and threshold")
    asked = parser.parse_args()
    print("| noise | " + " | ".join(f"S > {limit:g}" for limit in THRESHOLDS) + " |")
    print("|---" * (len(THRESHOLDS) + 1) + "|")
    points = []
    for kind in ("normal", "heavy", "skewed"):
        rates = [1e5 * alarms(kind, limit, asked.values) / asked.values for limit in THRESHOLDS]
        print(f"| {kind} | " + " | ".join(f"{rate:.2f}" for rate in rates) + " |", flush=True)
        points += [(limit, rate) for limit, rate in zip(THRESHOLDS, rates, strict=True) if rate > 0]
    slope, start = np.polyfit([math.log10(rate) for _, rate in points], [limit for limit, _ in points], 1)
    print(f"threshold = {start:.2f} - {-slope:.2f} log10(rate)")


if __name__ == "__main__":
    main()
