"""A sweep that a command has started, and its runs as jobs of Hydra: if one fails, the others go on."""

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from stabletrain.beside.sweep import lines, plan
from stabletrain.beside.sweep.member import Member, stopping_all
from stabletrain.cli.failures import RunOfSearchFailed, record_failure, report_error
from stabletrain.cli.finished import loss_of
from stabletrain.cli.train import build_and_train
from stabletrain.config.arguments import Arguments
from stabletrain.config.checks import check
from stabletrain.errors import Interrupted, NotSaved, TrainingHalted
from stabletrain.extension import NoPage, NoSweep, extension
from stabletrain.parallel.failure_report import as_rank_lost
from stabletrain.parallel.ranks import current_ranks, exit_together, run_on_main


@dataclass(frozen=True)
class StartedSweep(NoSweep):
    """A sweep that has started.

    Attributes:
        sweep: as `sweep.json` records it.
    """

    sweep: plan.Sweep

    def opening(self) -> str:
        """Returns the number of runs, the folder, and how many runs are done already."""
        return lines.opening(self.sweep)

    def listening(self) -> AbstractContextManager[Any]:
        """Returns a context in which a signal stops all runs."""
        # The runs of a parallel sweep ignore signals from outside: this process passes them on.
        return nullcontext() if self.sweep.launcher == "basic" else stopping_all(self.sweep.folder)

    def closing(self) -> str:
        """Returns the summary, if any run has started."""
        return lines.closing(self.sweep) if self.sweep.records() else ""

    def exit_code(self) -> int:
        """Returns the exit code of the first run that did not finish."""
        return lines.code(self.sweep)


def start_sweep(typed: Arguments, config_dir: Path) -> tuple[NoSweep, Arguments]:
    """Records the sweep that a command line asks for, if any; see `plan.start_sweep`."""
    sweep, arguments = plan.start_sweep(typed, config_dir)
    return NoSweep() if sweep is None else StartedSweep(sweep), arguments


def run_of_sweep(cfg: DictConfig) -> float:
    """Trains one run of a sweep, or reads its result if it is over; returns the value that a search minimizes.

    This is the validation loss, or infinity if the guard halted the run or its loss is NaN.
    """
    member, ranks, done, loss = Member(), current_ranks(), None, None
    if member.is_cancelled:
        return math.inf
    try:
        check(cfg)
        # A sweep that is started again trains only the runs that have no result yet.
        done = run_on_main(ranks, lambda: member.finished_record(cfg.steps))
        if done is None:
            if ranks.is_main:
                member.write_hydra_record(cfg)
            with member.listening():
                loss = build_and_train(cfg, member.folder, member.progress(cfg.log_every))
    except TrainingHalted:  # a result, not a failure: its loss is infinite
        exit_together(ranks)
    except NotSaved as error:  # it has a loss
        report_error(error, ranks, member.folder)
        loss = error.loss
    except Interrupted as error:
        if ranks.is_main:
            member.print_end({"status": "preempted", "reason": str(error)})
        exit_together(ranks)
        if member.alone:  # Hydra would start the next run; in parallel, the file `.stop` keeps the others from starting
            sys.exit(error.exit_code)
        return math.inf
    except Exception as raised:
        error = as_rank_lost(raised, ranks) or raised
        report_error(error, ranks, member.folder)
        if ranks.is_main:
            record_failure(member.folder, error)
            member.print_end({"status": "failed", "reason": str(error)})
        # A search must not learn from a loss that a mistake has made; the runs of a grid are independent.
        if member.in_search:
            raise RunOfSearchFailed(getattr(error, "exit_code", 1)) from None
        return math.inf
    if ranks.is_main:
        if done is not None:
            (extension().page(member.folder) if cfg.report else NoPage()).write_if_missing()
        member.print_end(done or member.record(), before=done is not None)
    if done is not None:
        return loss_of(done)
    return math.inf if loss is None or math.isnan(loss) else loss
