"""The command line around a run: where `resume` continues, what an error says, and with which code the process ends.

| code | meaning |
|---|---|
| 0 | finished |
| 1 | failed: an error of the program or the machine, with its traceback |
| 2 | refused: the configuration cannot work |
| 3 | halted by the guard |
| 75 | interrupted by a signal, saved; `resume=auto` continues |
| 130 | interrupted twice, or without checkpoints to save to: stopped |

In a sweep a failing run does not stop the others, a run that is over is not run again, and the end is the code of the
first run that did not finish.
"""

import json
import math
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from stabletrain.cli.sweep import lines
from stabletrain.cli.sweep.member import Member, stopping_all
from stabletrain.cli.sweep.plan import Sweep, finished_run, start
from stabletrain.config.arguments import Arguments, parse_arguments, resolve_resume, resume_command, with_overrides
from stabletrain.config.checks import check
from stabletrain.config.error_texts import explain
from stabletrain.errors import ConfigError, Interrupted, RankLost, StabletrainError, TrainingHalted
from stabletrain.parallel.failure_report import as_rank_lost, publish_failure, publish_location
from stabletrain.parallel.ranks import (
    Ranks,
    current_ranks,
    exit_together,
    join_process_group,
    leave_process_group,
    run_on_main,
)

ALIKE = 5.0
"""Seconds within which ranks that refuse the same configuration all have said so."""

LEFT = 5.0
"""Seconds within which torchrun has noticed that a rank is gone, and ends the others."""


class RunFailed(Exception):
    """A run of a search failed, and has said why: no loss can be told for it."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)  # what is sent between processes is made anew from this
        self.exit_code = exit_code


def launch(main: Callable[[], Any], config_dir: Path) -> int:
    """Runs `main`, Hydra's decorated entry point, over `sys.argv`; returns the process's exit code.

    Args:
        main: composes the configuration and runs the jobs.
        config_dir: the project's `conf/`.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come here, and are worded here
    setattr(ConfigStore, "__deepcopy__", lambda store, _: store)  # noqa: B010  there is one; --help copies it 160 times
    typed, ranks = parse_arguments(sys.argv[1:]), current_ranks()
    sweep: Sweep | None = None
    try:
        sweep, arguments = resolve_arguments(typed, ranks, config_dir)
        sys.argv[1:] = [*chain(*arguments)]
        if sweep is not None and ranks.is_main:
            print(lines.opening(sweep), flush=True)
        with nullcontext() if sweep is None or sweep.launcher == "basic" else stopping_all(sweep.folder):
            main()
    except StabletrainError as error:
        return refuse(str(error), ranks)
    except RunFailed as failure:
        return failure.exit_code
    except SystemExit as stop:  # of a run that did not finish, and of Hydra's own commands
        if not isinstance(stop.code, int):
            raise
        return stop.code
    except KeyboardInterrupt:
        print("\nstabletrain: stopped at once; the last checkpoint is kept", file=sys.stderr)
        return 130
    except Exception as error:
        message = explain(error, config_dir, typed)
        if message is None:
            traceback.print_exc()
            return 1
        return refuse(message, ranks)
    finally:
        if sweep is not None and ranks.is_main and sweep.records():
            print(lines.closing(sweep), flush=True)
    if ranks.launched:
        leave_process_group()
    return 0 if sweep is None else lines.code(sweep)


def resolve_arguments(typed: Arguments, ranks: Ranks, config_dir: Path) -> tuple[Sweep | None, Arguments]:
    """The command line with `resume` resolved and, for several ranks, with the one folder that rank 0 chose; and its
    sweep, if it is one.

    Ranks that torchrun has started anew, because one of them failed, continue what they had begun.
    """
    if not ranks.launched:
        return start(resolve_resume(typed), config_dir)
    join_process_group(ranks)
    publish_location(ranks)
    if ranks.restarts:
        typed = with_overrides(typed, "resume=auto")
    sweep, found = run_on_main(ranks, lambda: start(with_folder(resolve_resume(typed)), config_dir))
    return sweep, found if ranks.is_main else with_overrides(found, "hydra.output_subdir=null")


def with_folder(arguments: Arguments) -> Arguments:
    """The arguments with the folder that Hydra would choose; it is named by the time, so ranks would choose several."""
    kind, root = ("sweep", "multirun") if arguments.sweeps else ("run", "outputs")
    if arguments.value(f"hydra.{kind}.dir"):
        return arguments
    return with_overrides(arguments, f"hydra.{kind}.dir={time.strftime(f'{root}/%Y-%m-%d/%H-%M-%S')}")


def run_job(cfg: DictConfig) -> float | None:
    """One run, from a composed configuration to its end; returns the last validation loss in nats.

    Raises:
        SystemExit: with the run's exit code, where it did not finish (single runs, and an interrupted sweep).
        RunFailed: the same for a run of a search that failed.
    """
    hydra, ranks = HydraConfig.get(), current_ranks()
    if hydra.mode == RunMode.MULTIRUN:
        return run_of_sweep(cfg, ranks)
    folder, overrides = Path(hydra.runtime.output_dir), list(hydra.overrides.task)
    try:
        check(cfg)
        done = None
        if cfg.resume == "auto":
            done = run_on_main(ranks, lambda: finished_run(folder, overrides, cfg.steps, ("finished",)))
        if done and not done.get("reason"):  # such as that its end could not be saved
            if ranks.is_main:
                print(f"{folder} is finished already, {lines.result(done)}: nothing to do; raise steps to go on")
            return done["final"].get("val/loss")
        return build_and_train(cfg, folder)
    except Exception as raised:
        error = as_rank_lost(raised, ranks) or raised
        report_error(error, ranks, folder)
        if ranks.is_main:
            record_failure(folder, error)
        if isinstance(error, Interrupted | TrainingHalted):
            exit_together(ranks)
        sys.exit(getattr(error, "exit_code", 1))


def run_of_sweep(cfg: DictConfig, ranks: Ranks) -> float:
    """One run of a sweep, or what it came to before; returns what a search is to minimise.

    That is the validation loss, and infinity for a run that the guard halted, or whose loss is NaN.
    """
    member, done, loss = Member(), None, None
    if member.unwanted:
        return math.inf
    try:
        check(cfg)
        done = run_on_main(ranks, lambda: member.over(cfg.steps))
        if done is None:
            if ranks.is_main:
                member.keep(cfg)
            with member.listening():
                loss = build_and_train(cfg, member.folder, member.progress(cfg.log_every))
    except TrainingHalted:
        exit_together(ranks)
    except Interrupted as error:
        if ranks.is_main:
            member.say({"status": "preempted", "reason": str(error)})
        exit_together(ranks)
        if member.alone:
            sys.exit(error.exit_code)
        return math.inf
    except Exception as raised:
        error = as_rank_lost(raised, ranks) or raised
        report_error(error, ranks, member.folder)
        if ranks.is_main:
            record_failure(member.folder, error)
            member.say({"status": "failed", "reason": str(error)})
        if member.searching:
            raise RunFailed(getattr(error, "exit_code", 1)) from None
        return math.inf
    if ranks.is_main:
        member.say(done or member.record(), before=done is not None)
    if done is not None:
        return lines.loss_of(done)
    return math.inf if loss is None or math.isnan(loss) else loss


def build_and_train(cfg: DictConfig, folder: Path, shown: Any = None) -> float | None:
    """Builds a run and trains it; returns the last validation loss in nats.

    Args:
        cfg: checked.
        folder: the run's.
        shown: how its progress is shown; None as that of a run by itself.
    """
    from stabletrain.trainer.build import build  # loads torch; the checks before do without it
    from stabletrain.trainer.loop import train

    run = build(cfg, folder, shown)
    loss = train(run).val.get("val/loss")
    run.output.tracker.note(run.output.closing())
    return loss


def report_error(error: Exception, ranks: Ranks, folder: Path) -> None:
    """Says why a run ended: what all ranks raise alike rank 0 says, and what one alone has met says that one.

    A refusal may be either. Rank 0's ends the other processes soon; one that is still there then has met it alone.
    """
    if isinstance(error, Interrupted | TrainingHalted) and not ranks.is_main:
        return
    if isinstance(error, StabletrainError) and not isinstance(error, RankLost) and not ranks.is_main:
        time.sleep(ALIKE)
    where = "" if not ranks.distributed else f"[rank {ranks.rank}] "
    if isinstance(error, RankLost):
        print(f"{where}stabletrain: {error}", file=sys.stderr, flush=True)
        if ranks.is_main:
            print(f"continue  {resume_command(ranks, folder)}", file=sys.stderr, flush=True)
        time.sleep(LEFT)  # torchrun ends this process meanwhile, and names the rank that was the first to end
        return
    if isinstance(error, StabletrainError):
        print(f"{where if not ranks.is_main else ''}stabletrain: {error}", file=sys.stderr)
    else:
        trace = "".join(traceback.format_exception(error))
        print("".join(f"{where}{line}" for line in trace.splitlines(keepends=True)), file=sys.stderr)
    publish_failure(ranks, error)
    if isinstance(error, Interrupted) and error.saved:
        print(f"continue  {resume_command(ranks, folder)}", file=sys.stderr)
    if ranks.launched:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # torchrun's own summary ends with it


def record_failure(folder: Path, error: Exception) -> None:
    """Leaves in `run.json` with which code a failed run ends; and all that it says, where the run had none yet."""
    hydra = HydraConfig.get()
    record: dict[str, Any] = {
        "id": None,
        "status": "failed",
        "reason": str(error) or type(error).__name__,
        "choices": {group: option for group, option in hydra.runtime.choices.items() if "hydra" not in group},
        "overrides": list(hydra.overrides.task),
        "command": shlex.join(sys.orig_argv),
        "final": {},
    }
    file = folder / "run.json"
    with suppress(OSError, ValueError):  # the message on the terminal matters more
        if file.exists():
            record = json.loads(file.read_text(encoding="utf-8"))
        if record["status"] == "failed":
            record["exit_code"] = getattr(error, "exit_code", 1)
            file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def refuse(message: str, ranks: Ranks) -> int:
    """Prints a configuration error, which every rank has met, on rank 0; returns its exit code."""
    if ranks.is_main:
        print(f"stabletrain: {message}", file=sys.stderr)
    else:
        time.sleep(ALIKE)
    return ConfigError.exit_code
