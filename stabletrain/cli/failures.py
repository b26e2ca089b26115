"""Reports why a run did not finish: on the terminal, to the other ranks, and in `run.json`."""

import json
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig

from stabletrain.config.arguments import job_overrides, resume_command
from stabletrain.errors import ConfigError, Interrupted, RankLost, StabletrainError, TrainingHalted, own_traceback
from stabletrain.parallel.failure_report import publish_failure, says_how_to_continue
from stabletrain.parallel.ranks import Ranks
from stabletrain.printable import printable, say
from stabletrain.program import started
from stabletrain.stored.json_files import DamagedFile, MissingFile
from stabletrain.stored.run_files import read_run_record
from stabletrain.tracking.metrics import replace

if TYPE_CHECKING:
    pass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


DUPLICATE_ERROR_WAIT_S = 5.0
"""How long other ranks wait before they report an error that rank 0 may have met too."""


RANK_LOST_WAIT_S = 5.0
"""How long to wait after a rank was lost. By then, torchrun has noticed it and has ended the other ranks."""


def report_error(error: Exception, ranks: Ranks, folder: Path) -> None:
    """Prints why a run ended: rank 0 reports an error that all ranks raise, otherwise the rank that raised it."""
    if isinstance(error, Interrupted | TrainingHalted) and not ranks.is_main:
        return
    # Either all ranks refuse, or this one alone. If rank 0 refuses too, torchrun ends this process during the wait, so
    # the message is printed only once.
    if isinstance(error, StabletrainError) and not isinstance(error, RankLost) and not ranks.is_main:
        time.sleep(DUPLICATE_ERROR_WAIT_S)
    where = "" if not ranks.distributed else f"[rank {ranks.rank}] "
    if isinstance(error, RankLost):
        say(f"{where}stabletrain: {error}", file=sys.stderr, flush=True)
        if says_how_to_continue(ranks):
            say(f"continue  {resume_command(ranks, folder)}", file=sys.stderr, flush=True)
        time.sleep(RANK_LOST_WAIT_S)  # meanwhile torchrun ends this process, and names the rank that ended first
        return
    if isinstance(error, StabletrainError):
        say(f"{where if not ranks.is_main else ''}stabletrain: {error}", file=sys.stderr)
        if advice := getattr(error, "advice", ""):
            say(advice, file=sys.stderr)
    else:
        trace = traceback_text(error, folder / ("traceback.txt" if ranks.is_main else f"traceback-{ranks.rank}.txt"))
        say("".join(f"{where}{line}" for line in trace.splitlines(keepends=True)), end="", file=sys.stderr)
    publish_failure(ranks, error)
    if isinstance(error, Interrupted) and error.saved:
        say(f"continue  {resume_command(ranks, folder)}", file=sys.stderr)
    if ranks.launched:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # shown at the end of torchrun's own summary


def traceback_text(error: Exception, file: Path) -> str:
    """Returns the traceback to print: for an error in the user's code only that part, with all of it in `file`."""
    whole, own = "".join(traceback.format_exception(error)), own_traceback(error)
    if own is None:
        return whole
    try:
        replace(file, printable(whole))
    except OSError:
        return whole
    return own.replace("Traceback (most recent call last)", f"Traceback (your code; all of it in {file})")


def record_failure(folder: Path, error: Exception) -> None:
    """Writes the exit code of a failed run into its `run.json`; creates the file if the run has none yet."""
    job = HydraConfig.get()
    record: dict[str, Any] = {
        "id": None,
        "status": "failed",
        "reason": str(error) or type(error).__name__,
        "choices": {group: option for group, option in job.runtime.choices.items() if "hydra" not in group},
        "overrides": job_overrides(),
        "command": started().command,
        "final": {},
    }
    file = folder / "run.json"
    with suppress(OSError, DamagedFile):  # the message on the terminal matters more; a damaged record stays as it is
        with suppress(MissingFile):
            record = {**read_run_record(folder)}
        if record.get("status") == "failed":
            record["exit_code"] = getattr(error, "exit_code", 1)
            replace(file, json.dumps(record, indent=2) + "\n")


def refuse(message: str, ranks: Ranks) -> int:
    """Prints on rank 0 a configuration error that all ranks have met; returns its exit code."""
    if ranks.is_main:
        say(f"stabletrain: {message}", file=sys.stderr)
    else:
        time.sleep(DUPLICATE_ERROR_WAIT_S)
    return ConfigError.exit_code


class RunOfSearchFailed(Exception):
    """A run of a search failed and has reported why; it has no loss to return to the sweeper."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)  # unpickling in another process passes these arguments again
        self.exit_code = exit_code
