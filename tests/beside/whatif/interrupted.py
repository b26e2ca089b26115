"""`train.py` with an interruption at a chosen moment of a what-if that heals the run.

    python -m tests.beside.whatif.interrupted <signal> <moment> <rank> <arguments of train.py>

`<moment>` is `<name>:<n>`: the signal arrives just before the n-th call of the function that `MOMENTS` names. `<rank>`
is the rank that gets it; `all` for each of them. With the variable `FEW_ARMS`, fewer arms are judged; see `judge_few`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hydra.core.hydra_config import HydraConfig

from stabletrain.beside.whatif import driver, healing
from stabletrain.beside.whatif.arm_run import ReachedStep
from stabletrain.beside.whatif.budget import BudgetedWhatIf
from stabletrain.beside.whatif.plan import Plan, WhatIfOptions, plan
from stabletrain.cli.train import train_command
from stabletrain.parallel.ranks import current_ranks, exit_process
from stabletrain.trainer import loop
from stabletrain.trainer.saved_states import SavedStates

MOMENTS: dict[str, tuple[Any, Callable[..., Any], Callable[..., bool]]] = {
    "halt": (SavedStates, SavedStates.save_last_healthy, lambda *given: True),  # the event is written
    "arm": (ReachedStep, ReachedStep.__call__, lambda reached, run: True),  # after a step of an arm
    "stop": (ReachedStep, ReachedStep.__call__, lambda reached, run: run.state.step == reached.stop),  # its last one
    "second": (ReachedStep, ReachedStep.__call__, lambda reached, run: reached.stop == run.plan.steps),
    "validation": (loop, loop.validate, lambda run: "/whatif/" in HydraConfig.get().runtime.output_dir),
    "cost": (BudgetedWhatIf, BudgetedWhatIf._cost, lambda *given: True),  # an arm is over
    "ranking": (driver, driver.ranked, lambda *given: True),
    "going_on": (driver, driver.recorded_finalists, lambda *given: True),
    "winner": (healing, healing.winner_of, lambda *given: True),  # all arms are over
    "install": (healing, healing.install, lambda *given: True),  # `healing.json` is written
    "heal": (healing.Healer, healing.Healer._announce, lambda *given: True),  # the checkpoint is written
    "drop": (healing, healing.drop_states, lambda *given: True),  # the event is written
}
"""By name: a class or module, its function before whose call the signal arrives, and the calls that count."""


def judge_few(asked: WhatIfOptions) -> Plan:
    """Plans a what-if of the arms that the budget of these runs allows, and one more, in the order of all arms.

    To judge one of the twenty takes a fifth of a second, and those that the budget does not reach change nothing.
    """
    return plan(replace(asked, arms=("lr_usual", "skip", "lr_half_brief")))


def interrupt(number: int, name: str, count: int) -> None:
    """Sends this process a signal just before the `count`-th call of a moment."""
    place, call, counts = MOMENTS[name]
    calls = [0]

    def calling(*given: Any, **named: Any) -> Any:
        if counts(*given):
            calls[0] += 1
            if calls[0] == count:
                print(f"interrupted before {name} {count}, {signal.Signals(number).name}", flush=True)
                os.kill(os.getpid(), number)
                time.sleep(0)  # a handler runs now
        return call(*given, **named)

    setattr(place, call.__name__, calling)


if __name__ == "__main__":
    signal_name, moment, rank = sys.argv[1:4]
    del sys.argv[1:4]
    if os.environ.get("FEW_ARMS"):
        healing.plan = judge_few
    if rank in ("all", str(current_ranks().rank)):
        interrupt(signal.Signals[signal_name], moment.split(":")[0], int(moment.split(":")[1]))
    exit_process(train_command(sys.argv[1:]))
