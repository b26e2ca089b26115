"""All checks, in their order.

A check is a function that gets a `Maker` of fresh loops, and returns what it found: at least one `Finding`.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterable

from stabletrain.beside.preflight import accumulation, data, gradient, headroom, optimizer, order, resume, structure
from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker, nothing_changed
from stabletrain.beside.preflight.report import Report
from stabletrain.errors import ConfigError

Check = Callable[[Maker], list[Finding]]

CHECKS: dict[str, Check] = {
    "structure": structure.check,
    "order": order.check,
    "data": data.check,
    "resume": resume.check,
    "optimizer": optimizer.check,
    "accumulation": accumulation.check,
    "gradient": gradient.check,
    "headroom": headroom.check,
}
"""Every check by its name, in their order."""


def check_loop(
    make: Callable[[], object], only: Iterable[str] = (), tell: Callable[[Finding], object] = lambda finding: None
) -> Report:
    """Runs the checks on fresh loops; nothing else is changed.

    Args:
        make: builds everything anew, as the script does when it starts; see `loop.Loop` for what it returns.
        only: names of checks; empty for all.
        tell: is called with each finding as soon as it is known.

    Raises:
        ConfigError: `make` returned something else, or there is no such check.
    """
    names = [*only]
    for name in names:
        if name not in CHECKS:
            raise ConfigError(f"there is no check {name!r}; the checks are {', '.join(CHECKS)}")
    found: list[Finding] = []
    began, compiled = time.perf_counter(), compiler_seconds()
    with nothing_changed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of some of what is checked
        maker = Maker(make)
        for name in names or CHECKS:
            try:
                of_check = CHECKS[name](maker)
            except ConfigError:
                raise
            except Exception as error:  # of the user's code, which works in training, or of the check
                of_check = [Finding(name, "not checked", f"it failed with {type(error).__name__}: {error}")]
            for each in of_check:
                tell(each)
            found += of_check
    return Report(found, time.perf_counter() - began, max(0.0, compiler_seconds() - compiled))


def compiler_seconds() -> float:
    """Returns how long this process has compiled models so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else sum(dynamo.compilation_time_metrics.get("_compile.compile_inner", ()))
