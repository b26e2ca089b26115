"""The run that an arm repeats: its command and settings at a step, and the command lines that resume its states."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stabletrain.config import trust
from stabletrain.config.arguments import (
    Arguments,
    arguments_of,
    in_folder,
    merged,
    parse_arguments,
    quoted,
    with_overrides,
)
from stabletrain.config.resuming import UNRECORDED_KEYS, Settings, override_of, recorded_settings
from stabletrain.errors import ConfigError
from stabletrain.stored.json_files import DamagedFile
from stabletrain.stored.run_files import RunRecord, read_run_record

QUIET_OVERRIDES = ("log_every=1", "report=false", "wandb=disabled", "forensics=off")
"""Overrides of every run that a what-if starts: it logs each loss, and makes nothing that only the user looks at."""

KEEP_ONE_CHECKPOINT = ("checkpoint.keep=1", "checkpoint.keep_best=false")
"""Overrides that keep no more than an interruption needs."""


@dataclass(frozen=True)
class BaseRun:
    """A run as it was at a step.

    Attributes:
        run: its folder.
        step: the step.
        record: its `run.json`.
        arguments: the command of its first start, and the changes of later resumes up to the step.
        settings: at the step.
        changes: the overrides that later resumes have added to the command by then.
    """

    run: Path
    step: int
    record: RunRecord
    arguments: Arguments
    settings: Settings
    changes: tuple[str, ...] = ()

    @property
    def guard_steps(self) -> dict[str, int]:
        """Steps between two states that the guard holds, and after which it takes one for healthy."""
        return {"every": self.get("guard.snapshot_every", 50), "after": self.get("guard.healthy_after", 20)}

    @property
    def started_at_step_0(self) -> bool:
        """Whether the run began at step 0, and not as a resume of another run's state."""
        return parse_arguments([*self.record.get("overrides", [])]).value("resume") in (None, "none", "auto")

    @property
    def total(self) -> int:
        """The steps of the whole run."""
        return int(self.settings.values["steps"])

    @property
    def precision(self) -> str:
        """The precision in which it computes, also with `precision=auto`."""
        found: Any = self.record.get("hardware", {}).get("precision")
        return str(found or self.settings.choices.get("precision", ""))

    @property
    def repeats_exactly(self) -> bool:
        """Whether a repetition gives the same bits: on a CPU, or with deterministic kernels only."""
        device: Any = self.record.get("hardware", {}).get("device")
        return not str(device).startswith("cuda") or self.settings.choices.get("determinism") == "strict"

    def get(self, key: str, default: int) -> int:
        """Returns a whole number of the configuration; the default if the run has no such key."""
        found = self.settings.flat().get(key)
        return found if isinstance(found, int) else default

    def resumed(self, checkpoint: Path, overrides: Sequence[str], folder: Path) -> Arguments:
        """Returns the command line that resumes a checkpoint in a new folder, with changed overrides."""
        typed = merged(self.arguments, parse_arguments([*overrides]))
        places = f"resume={quoted(checkpoint)}", f"hydra.run.dir={quoted(folder)}"
        return with_overrides(typed, *self.saving(overrides), *places)

    def restarted(self, overrides: Sequence[str], folder: Path) -> Arguments:
        """Returns the command line that repeats the run from step 0 in a new folder."""
        typed = merged(self.arguments, parse_arguments([*overrides]))
        return with_overrides(typed, *self.saving(overrides), "resume=none", f"hydra.run.dir={quoted(folder)}")

    def continued(self, overrides: Sequence[str], folder: Path) -> Arguments:
        """Returns the command line that goes on in the folder of a run that `resumed` or `restarted` has started."""
        typed = merged(self.arguments, parse_arguments([*overrides]))
        return in_folder(with_overrides(typed, *self.saving(overrides), "resume=auto"), "hydra.run.dir", folder)

    def saving(self, overrides: Sequence[str]) -> list[str]:
        """Returns the override that turns checkpoints on, if the run has none."""
        off = self.settings.choices.get("checkpoint") == "off"
        return ["checkpoint=default"] if off and not any(each.startswith("checkpoint=") for each in overrides) else []


def read_base(run: Path, step: int) -> BaseRun:
    """Returns a run as it was at a step.

    Raises:
        ConfigError: its record does not say how it was started, or names unknown code.
    """
    try:
        record = read_run_record(run)
    except DamagedFile as error:
        raise ConfigError(f"{error}; fix: name another run, or repair the file") from error
    first, found = arguments_of(run), recorded_settings(run, step + 1)
    if first is None or found is None or not isinstance(found.values.get("steps"), int):
        raise ConfigError(
            f"{run} does not say how it was started ({run / '.hydra'} is missing or damaged), so it cannot be "
            "repeated; fix: name a run whose folder is whole"
        )
    trust.check_arguments(*first, run)
    changes = [override_of(key, value) for key, value in changed_by(record, step).items()]
    for change in changes:
        trust.check_arguments([], [change], run)
    plain = Arguments(first.options, [each for each in first.overrides if not each.startswith("hydra.")])
    return BaseRun(run, step, record, merged(plain, parse_arguments(changes)), found, tuple(changes))


def changed_by(record: RunRecord, step: int) -> dict[str, Any]:
    """Returns the values that resumes after at most `step` steps have changed, by key."""
    found: dict[str, Any] = {}
    for change in record.get("changes", []):
        if change["step"] <= step:
            found |= {key: now for key, (_, now) in change["keys"].items() if key not in UNRECORDED_KEYS}
    return found
