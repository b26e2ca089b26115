"""What the forecast costs: its own time over a run's.

    OMP_NUM_THREADS=1 python -m tests.reliability.foresight.cost --steps 1000 [overrides]

Times `Forecast.look` and `Forecast.add_loss`, the search along the update, and all of the monitors, in one run with the
default looks. CPU time of the process, so other work on the machine does not count; divided by that of the loop. The
last column is without the first look, at step 1, which a long run does not notice.
"""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from stabletrain.beside.forecast.forecast import Forecast
from stabletrain.config.checks import check
from stabletrain.monitors.monitors import Monitors
from stabletrain.monitors.probe import Gradients
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import composed

PARTS = {
    "forecast": ((Forecast, "look"), (Forecast, "add_loss")),
    "search along the update": ((Gradients, "update_margin"),),
    "all monitors": ((Monitors, "before"), (Monitors, "after")),
}
"""What is timed."""

FIRST = {"search along the update": 1, "all monitors": 2}
"""Calls that belong to the first look."""


@contextlib.contextmanager
def timed(spent: dict[str, list[float]]) -> Iterator[None]:
    """Context that appends the CPU seconds of each call of each part to `spent`."""

    def around(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return method(*args, **named)
            finally:
                spent.setdefault(part, []).append(time.process_time() - began)

        return measured

    with contextlib.ExitStack() as stack:
        for part, methods in PARTS.items():
            for owner, name in methods:
                stack.enter_context(mock.patch.object(owner, name, around(part, getattr(owner, name))))
        yield


def measure(overrides: list[str]) -> tuple[float, dict[str, list[float]]]:
    """Returns the CPU seconds of a run's loop, and of each call of each part in it."""
    spent: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place, composed(*overrides) as cfg, contextlib.redirect_stdout(io.StringIO()):
        check(cfg)
        run = build(cfg, Path(place) / "run")
        with timed(spent):
            began = time.process_time()
            train(run)
            whole = time.process_time() - began
    return whole, spent


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    given, overrides = parser.parse_known_args()
    common = [f"steps={given.steps}", "wandb=disabled", "report=false", "eval_every=100000", "eval_batches=1"]
    whole, spent = measure([*common, *overrides])
    print("| part | ms a step | share of the run | share without the first look |\n|---|---|---|---|")
    for part, calls in spent.items():
        first = sum(calls[: FIRST.get(part, 0)])
        shares = [100 * seconds / whole for seconds in (sum(calls), sum(calls) - first)]
        print(f"| {part} | {1000 * sum(calls) / given.steps:.3f} | {shares[0]:.2f} % | {shares[1]:.2f} % |")
    print(f"| whole run | {1000 * whole / given.steps:.2f} | | |")


if __name__ == "__main__":
    main()
