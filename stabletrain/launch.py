"""The command line around a run: where `resume` continues, what an error says, and with which code the process ends.

| code | meaning |
|---|---|
| 0 | finished |
| 1 | failed: an error of the program or the machine, with its traceback |
| 2 | refused: the configuration cannot work |
| 3 | halted by the guard |
| 75 | interrupted by a signal, saved; `resume=auto` continues |
| 130 | interrupted twice, or without checkpoints to save to: stopped |

In a sweep each run ends with its own code, a failing run does not stop the others, and the sweep ends with the code of
the first run that did not finish.
"""

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from stabletrain.arguments import Arguments, added, continued, key_of, take_apart
from stabletrain.commands import again
from stabletrain.config import check
from stabletrain.errors import ConfigError, Interrupted, RankLost, StabletrainError, TrainingHalted
from stabletrain.last_words import introduce, leave_word, lost
from stabletrain.mistakes import explain
from stabletrain.ranks import Ranks, end_together, first_does, here, join, leave

RUNS: list[tuple[Path, list[str]]] = []
"""Folder and overrides of each run of this process."""


ALIKE = 5.0
"""Seconds within which ranks that refuse the same configuration all have said so."""

LEFT = 5.0
"""Seconds within which torchrun has noticed that a rank is gone, and ends the others."""


class RunFailed(Exception):
    """A run of a sweep did not finish, and has said why; raised so that Hydra goes on with the others."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def launch(main: Callable[[], Any], config_dir: Path) -> int:
    """Runs `main`, Hydra's decorated entry point, over `sys.argv`; returns the process's exit code.

    Args:
        main: composes the configuration and runs the jobs.
        config_dir: the project's `conf/`.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come here, and are worded here
    typed, ranks = take_apart(sys.argv[1:]), here()
    try:
        sys.argv[1:] = [*chain(*agreed(typed, ranks))]
        main()
    except StabletrainError as error:
        return refuse(str(error), ranks)
    except RunFailed as failure:
        return failure.exit_code
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
        if len(RUNS) > 1 and ranks.first:
            print(sweep_summary(), flush=True)
    if ranks.launched:
        leave()
    return 0


def agreed(typed: Arguments, ranks: Ranks) -> Arguments:
    """The command line with `resume` resolved and, for several ranks, with the one folder that rank 0 chose.

    Ranks that torchrun has started anew, because one of them failed, continue what they had begun.
    """
    if not ranks.launched:
        return continued(typed)
    join(ranks)
    introduce(ranks)
    if ranks.restarts:
        typed = added(typed, "resume=auto")
    found = first_does(ranks, lambda: in_one_folder(continued(typed)))
    return found if ranks.first else added(found, "hydra.output_subdir=null")


def in_one_folder(arguments: Arguments) -> Arguments:
    """The arguments with the folder that Hydra would choose; it is named by the time, so ranks would choose several."""
    kind, root = ("sweep", "multirun") if arguments.sweeps else ("run", "outputs")
    if arguments.value(f"hydra.{kind}.dir"):
        return arguments
    return added(arguments, f"hydra.{kind}.dir={time.strftime(f'{root}/%Y-%m-%d/%H-%M-%S')}")


def run_job(cfg: DictConfig) -> float | None:
    """One run, from a composed configuration to its end; returns the last validation loss in nats.

    Raises:
        SystemExit: with the run's exit code, where it did not finish (single runs, and an interrupted sweep).
        RunFailed: the same in a sweep.
    """
    hydra, ranks = HydraConfig.get(), here()
    folder = Path(hydra.runtime.output_dir)
    RUNS.append((folder, list(hydra.overrides.task)))
    try:
        check(cfg)
        from stabletrain.build import build  # torch is loaded here, after the checks that do without
        from stabletrain.loop import run

        job = build(cfg, folder)
        val_loss = run(job).val.get("val/loss")
        job.tracker.note(job.closing())
        return val_loss
    except Exception as raised:
        error = lost(raised, ranks) or raised
        tell(error, ranks, folder)
        if ranks.first:
            record_refusal(folder, error)
        code = getattr(error, "exit_code", 1)
        if hydra.mode == RunMode.MULTIRUN and not isinstance(error, Interrupted):
            raise RunFailed(code) from None
        if isinstance(error, Interrupted | TrainingHalted):
            end_together(ranks)
        sys.exit(code)


def tell(error: Exception, ranks: Ranks, folder: Path) -> None:
    """Says why a run ended: what all ranks raise alike rank 0 says, and what one alone has met says that one.

    A refusal may be either. Rank 0's ends the other processes soon; one that is still there then has met it alone.
    """
    if isinstance(error, Interrupted | TrainingHalted) and not ranks.first:
        return
    if isinstance(error, StabletrainError) and not isinstance(error, RankLost) and not ranks.first:
        time.sleep(ALIKE)
    where = "" if ranks.alone else f"[rank {ranks.rank}] "
    if isinstance(error, RankLost):
        print(f"{where}stabletrain: {error}", file=sys.stderr, flush=True)
        if ranks.first:
            print(f"continue  {again(ranks, folder)}", file=sys.stderr, flush=True)
        time.sleep(LEFT)  # torchrun ends this process meanwhile, and names the rank that was the first to end
        return
    if isinstance(error, StabletrainError):
        print(f"{where if not ranks.first else ''}stabletrain: {error}", file=sys.stderr)
    else:
        trace = "".join(traceback.format_exception(error))
        print("".join(f"{where}{line}" for line in trace.splitlines(keepends=True)), file=sys.stderr)
    leave_word(ranks, error)
    if isinstance(error, Interrupted) and error.saved:
        print(f"continue  {again(ranks, folder)}", file=sys.stderr)
    if ranks.launched:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # torchrun's own summary ends with it


def sweep_summary() -> str:
    """How each run of a sweep ended, a line each, with what was varied between them."""
    common = set.intersection(*(set(overrides) for _, overrides in RUNS))
    lines = []
    for folder, overrides in RUNS:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        loss = record.get("final", {}).get("val/loss")
        result = f"val loss {loss:.3f}" if isinstance(loss, float) else f"val loss {loss or '-'}"
        varied = " ".join(override for override in overrides if override not in common)
        if record["status"] not in ("finished", "running"):
            result = f"{result}   {' '.join(str(record.get('reason')).split())[:100]}"
        lines.append((record["status"], f"{record['status']:<9} {varied:<40} {folder.name:>3}  {result}"))
    finished = sum(status == "finished" for status, _ in lines)
    head = f"sweep    {len(lines)} runs, {finished} finished, in {RUNS[0][0].parent}"
    rates = {o for _, overrides in RUNS for o in overrides if key_of(o) == "optimizer.lr"}
    then = [f"next     stabletrain compare {RUNS[0][0].parent}"] if len(rates) > 1 else []
    return "\n".join([head, *(f"         {line}" for _, line in lines), *then])


def record_refusal(folder: Path, error: Exception) -> None:
    """Leaves a `run.json` that says why, where the run ended before it had one."""
    hydra = HydraConfig.get()
    record = {
        "id": None,
        "status": "failed",
        "reason": str(error) or type(error).__name__,
        "choices": {group: option for group, option in hydra.runtime.choices.items() if "hydra" not in group},
        "overrides": list(hydra.overrides.task),
        "command": shlex.join(sys.orig_argv),
        "final": {},
    }
    with suppress(OSError):  # the message on the terminal matters more
        if not (folder / "run.json").exists():
            (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def refuse(message: str, ranks: Ranks) -> int:
    """Prints a configuration error, which every rank has met, on rank 0; returns its exit code."""
    if ranks.first:
        print(f"stabletrain: {message}", file=sys.stderr)
    else:
        time.sleep(ALIKE)
    return ConfigError.exit_code
