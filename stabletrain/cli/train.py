"""The entry point of `train.py` and `stabletrain train`.

Resolves `resume`, runs one job or a sweep, reports errors, and returns the exit code.

| code | meaning |
|---|---|
| 0 | finished |
| 1 | failed: an error of the program or the machine, with its traceback; or finished, but the last state is not saved |
| 2 | refused: the configuration cannot work |
| 3 | halted by the guard |
| 4 | refused on this machine: the card, or its build of PyTorch, cannot do what the run needs |
| 75 | interrupted by a signal, state saved; `resume=auto` continues |
| 130 | interrupted twice, or without checkpoints: stopped, state not saved |

In a sweep, a failed run does not stop the others, and a run that is over is not started again. The exit code of a sweep
is that of its first run that did not finish.
"""

import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from stabletrain.cli import hydra_patches
from stabletrain.cli.failures import RunOfSearchFailed, record_failure, refuse, report_error
from stabletrain.cli.finished import finished_run, result
from stabletrain.config.arguments import (
    Arguments,
    check_folders,
    job_overrides,
    parse_arguments,
    resolve_resume,
    with_overrides,
)
from stabletrain.config.checks import check, check_resolves
from stabletrain.config.error_texts import explain, unknown_option
from stabletrain.config.resuming import check_resume, settings
from stabletrain.errors import Interrupted, NotSaved, StabletrainError, TrainingHalted
from stabletrain.extension import NoPage, NoSweep, extension
from stabletrain.importing import uncollected
from stabletrain.machine.signals import NoStopRequest
from stabletrain.parallel.failure_report import as_rank_lost, publish_end, publish_location
from stabletrain.parallel.ranks import (
    Ranks,
    current_ranks,
    exit_together,
    join_process_group,
    leave_process_group,
    run_on_main,
)
from stabletrain.printable import say, warn
from stabletrain.program import conf_folder
from stabletrain.stored import trusted
from stabletrain.tracking.progress import Progress

if TYPE_CHECKING:
    from stabletrain.trainer.run import Output, TrainingRun

HELP_OPTIONS = frozenset(["--help", "-h"])


def train_command(words: list[str]) -> int:
    """Runs `stabletrain train`, which is `python train.py` with the package's own `conf/`; returns the exit code.

    Args:
        words: the words after `stabletrain train`.
    """
    conf = conf_folder()
    sys.argv = [sys.argv[0], *hydra_patches.absolute_config_path(words)]
    main = hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(run_job)
    return launch(main, conf)


def launch(main: Callable[[], Any], config_dir: Path) -> int:
    """Runs `main`, Hydra's decorated entry point, with `sys.argv`; returns the process's exit code.

    `config_dir` is the project's `conf/`.
    """
    hydra_patches.raise_errors()  # they are explained below
    hydra_patches.share_config_store()
    with trusted.accepting(trusted.OPTION in sys.argv[1:]):
        return run_command_line(main, config_dir)


def run_command_line(main: Callable[[], Any], config_dir: Path) -> int:
    """The same, with Hydra set up."""
    typed, ranks = parse_arguments([word for word in sys.argv[1:] if word != trusted.OPTION]), current_ranks()
    sweep = NoSweep()
    if (message := unknown_option(sys.argv[1:], config_dir)) is not None:
        return refuse(message, ranks)
    try:
        # Before Hydra starts, `resume` becomes a folder, and a sweep a record of its runs: Hydra must write into that
        # folder, and it reads the folder from the command line.
        sweep, arguments = resolve_arguments(typed, ranks, config_dir)
        sys.argv[1:] = [*chain(*arguments)]
        if ranks.is_main and (opening := sweep.opening()):
            say(opening, flush=True)
        with (
            sweep.listening(),
            hydra_patches.help_of_command() if HELP_OPTIONS & set(arguments.options) else nullcontext(),
        ):
            main()
    except StabletrainError as error:
        return refuse(str(error), ranks)
    except RunOfSearchFailed as failure:
        return failure.exit_code
    except SystemExit as stop:  # raised by a run that did not finish, and by Hydra's own commands such as --help
        if not isinstance(stop.code, int):
            raise
        return stop.code
    except BrokenPipeError:  # the reader of Hydra's help or configuration has closed the pipe
        return 0
    except KeyboardInterrupt:
        say("\nstabletrain: stopped immediately; the last checkpoint is kept", file=sys.stderr)
        return 130
    except Exception as error:
        message = explain(error, config_dir, typed)
        if message is None:  # not a mistake on the command line
            say(traceback.format_exc(), file=sys.stderr, end="")
            return 1
        return refuse(message, ranks)
    finally:
        if ranks.is_main and (closing := sweep.closing()):
            say(closing, flush=True)
    if ranks.launched:
        leave_process_group()
    return sweep.exit_code()


def resolve_arguments(typed: Arguments, ranks: Ranks, config_dir: Path) -> tuple[NoSweep, Arguments]:
    """Resolves `resume` to a folder, the same on all ranks; returns the sweep and the arguments."""
    check_folders(typed)
    if not ranks.launched:
        return extension().start_sweep(resolve_resume(typed), config_dir)
    join_process_group(ranks)
    publish_location(ranks)
    if ranks.restarts:  # torchrun restarted all ranks because one failed: continue the run
        typed = arguments_after_restart(typed)
    sweep, found = run_on_main(ranks, lambda: extension().start_sweep(resolve_resume(typed), config_dir))
    # only the main process writes `.hydra/`
    return sweep, found if ranks.is_main else with_overrides(found, "hydra.output_subdir=null")


def arguments_after_restart(typed: Arguments) -> Arguments:
    """Returns the arguments with which torchrun's second start continues the run of the first."""
    resume = typed.value("resume")
    if resume in (None, "none", "auto"):
        return with_overrides(typed, "resume=auto")
    if (Path(resume) / "manifest.json").exists():  # its run folder has recorded the merged arguments
        return with_overrides(resolve_resume(typed), "resume=auto")
    return typed  # a run folder, which is continued in place


def run_job(cfg: DictConfig) -> float | None:
    """Trains one run from a composed configuration; returns the last validation loss, in nats.

    Raises:
        SystemExit: the run did not finish, or its sweep was interrupted; carries the exit code.
        RunOfSearchFailed: a run of a search failed.
    """
    job, ranks = HydraConfig.get(), current_ranks()
    if job.mode == RunMode.MULTIRUN:
        # A run of a sweep returns also if it fails: Hydra would not start the others after an exception.
        return extension().run_of_sweep(cfg)
    folder = Path(job.runtime.output_dir)
    try:
        # Check the configuration, build the run, train it.
        return run_one(cfg, folder, tell=say)
    except Exception as raised:
        # If a rank ends, all others raise an error in the collective in which they wait. The user needs to know which
        # rank ended first.
        error = as_rank_lost(raised, ranks) or raised
        report_error(error, ranks, folder)
        # A run that could not even be built has no record yet; sweeps and Slurm read the exit code there.
        if ranks.is_main:
            record_failure(folder, error)
        # torchrun ends the other ranks once one has ended. These errors are raised by all ranks, perhaps in the middle
        # of writing the last checkpoint, so none may end early.
        if isinstance(error, Interrupted | TrainingHalted):
            exit_together(ranks)
        publish_end(ranks)
        sys.exit(getattr(error, "exit_code", 1))


def run_one(
    cfg: DictConfig, folder: Path, *, tell: Callable[[str], None], signals: NoStopRequest | None = None
) -> float | None:
    """Trains one run, unless `resume=auto` has found it finished; returns the last validation loss, in nats.

    Args:
        cfg: composed, and not checked yet.
        folder: the run folder.
        tell: prints a line, if there is nothing to train.
        signals: what asks the run to stop; None for the signals of the process.

    Raises:
        StabletrainError: the configuration cannot work, or the run did not finish.
        Exception: an error of the program or of the user's code.
    """
    ranks, resumed = current_ranks(), None
    # The two keys read below must exist, and their interpolations must resolve.
    check_resolves(cfg)
    # `resume=auto` of a finished run is no mistake: a script may type it again after every kill. Only the main process
    # reads the record, because the ranks must not disagree if it changes meanwhile.
    if cfg.resume == "auto":
        resumed = run_on_main(ranks, lambda: finished_run(folder, job_overrides(), cfg.steps, ("finished",)))
    if resumed and not resumed.get("reason"):  # a reason says what is missing, such as a final state that was not saved
        if ranks.is_main:
            written = (extension().page(folder) if cfg.report else NoPage()).write_if_missing()
            added = "its missing report.html is written" if written else "nothing to do"
            tell(f"{folder} is finished already, {result(resumed)}: {added}; raise steps to continue")
        return resumed["final"].get("val/loss")
    # Check the resume first: if it may not change the model, say that, not which error the new model would cause.
    choices = HydraConfig.get().runtime.choices
    run_on_main(ranks, lambda: check_resume(cfg.resume, settings(cfg, choices), folder))
    check(cfg)
    extension().check(cfg, choices)
    return build_and_train(cfg, folder, signals=signals)


def build_and_train(
    cfg: DictConfig, folder: Path, shown: Any = None, signals: NoStopRequest | None = None
) -> float | None:
    """Builds a run, trains it, and heals it with `guard.escalate=whatif`; returns the last validation loss, in nats.

    Args:
        cfg: checked by `check`.
        folder: the run folder.
        shown: shows the progress; None for the terminal.
        signals: what asks the run to stop; None for the signals of the process.

    Raises:
        NotSaved: it has finished, and its last state could not be written.
    """
    # They import torch, which the checks do without. Only with the first import is there nothing else in memory.
    with uncollected(for_good="torch" not in sys.modules):
        from stabletrain.trainer.build import build
        from stabletrain.trainer.loop import train

    def once(cfg: DictConfig, ready: "Callable[[TrainingRun], None]") -> float | None:
        """Trains the run with these settings, after `ready` has taken it; a healing calls this again with others."""
        # From options to a run that is ready for its first step; a resumed one has its state again.
        run = build(cfg, folder, shown)
        ready(run)
        # The steps. If the guard gives up, the user is told what to try next.
        try:
            loss = train(run, signals).val.get("val/loss")
        except TrainingHalted as halt:
            halt.advice = run.output.halted()
            raise
        # All steps are done: the result, and an error if the last state is not on disk.
        say_closing_lines(run.output)
        if missing := run.saved.checkpoints.unsaved():
            raise NotSaved(f"{missing}; fix: make room, and type the command again with resume=auto", loss)
        return loss

    if cfg.guard.get("escalate") != "whatif":
        return once(cfg, lambda run: None)
    note = (shown or Progress(cfg.log_every)).note if current_ranks().is_main else lambda line: None
    return extension().heal(cfg, folder, once, note, live=shown is None, listening=signals is None)


def say_closing_lines(output: "Output") -> None:
    """Writes the page of a finished run, and prints its last lines. An error is one line: the run stays finished."""
    try:
        output.tracker.note(output.closing())
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        warn(f"the run is finished and saved, but its closing lines could not be made ({why})")
