"""The command line: parses it, resolves `resume` to a folder, and builds the command that continues a run.

A run's `run.json` records the arguments of its first start. This record, not Hydra's own, decides which command a run
folder belongs to.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from stabletrain.config import trust
from stabletrain.config.make import load_yaml
from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks
from stabletrain.printable import say
from stabletrain.program import conf_folder, started
from stabletrain.stored import trusted
from stabletrain.stored.json_files import DamagedFile, MissingFile, check_type
from stabletrain.stored.run_files import read_run_record, read_sweep_command

CONFIG_OPTIONS = {"--config-dir": "-cd", "--config-name": "-cn", "--config-path": "-cp"}
"""Hydra's options that say where the configuration is: long and short."""

WITH_VALUE = CONFIG_OPTIONS | {"--package": "-p", "--cfg": "-c", "--info": "-i", "--shell-completion": "-sc"}
OPTIONS_WITH_VALUE = frozenset({*WITH_VALUE, *WITH_VALUE.values()})
"""Hydra's options that take a value as the next word."""

SWEEP = frozenset({"-m", "--multirun"})

OPTIONS = OPTIONS_WITH_VALUE | SWEEP | {"--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r"}
OPTIONS |= {"--experimental-rerun", trusted.OPTION}

INFORMATION_OPTIONS = frozenset(
    ["--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"]
)
"""Options that make Hydra print information and run nothing."""
"""All options of Hydra, and our own."""


class Arguments(NamedTuple):
    """A parsed command line.

    Attributes:
        options: Hydra's options with their values, in order, such as `--config-dir my_conf`.
        overrides: `key=value`, `+key=value` and `~key`, in order; of a repeated key only the last.
    """

    options: list[str]
    overrides: list[str]

    @property
    def sweeps(self) -> bool:
        """Whether this is a sweep (`-m`)."""
        return bool(SWEEP & set(self.options))

    def value(self, key: str) -> str | None:
        """Returns the value that an override gives `key`, without quotes; None if there is none."""
        found = [o.partition("=")[2] for o in self.overrides if key_of(o) == key and "=" in o]
        return unquoted(found[-1]) if found else None

    def without(self, key: str) -> "Arguments":
        """Returns the arguments without the overrides of `key`."""
        return Arguments(self.options, [o for o in self.overrides if key_of(o) != key])

    def identity(self) -> list[str]:
        """Returns what identifies a command: its overrides, sorted, without `resume` and Hydra's own."""
        return sorted(o for o in self.overrides if key_of(o) != "resume" and not key_of(o).startswith("hydra"))


def unquoted(value: str) -> str:
    """Returns a value without its quotes, if it has any, as Hydra reads it."""
    if len(value) < 2 or value[0] != value[-1] or value[0] not in "'\"":
        return value
    # Backslashes are doubled before a quote and at the end, and only there.
    return re.sub(rf"(\\+)(?={value[0]}|$)", lambda found: found[1][: len(found[1]) // 2], value[1:-1])


def quoted(value: Any) -> str:
    """Returns a text in quotes, as Hydra reads it: a path may hold anything."""
    return QuotedString(str(value), Quote.single).with_quotes()


def show(value: Any) -> str:
    """Formats a value as it is typed on the command line."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def key_of(override: str) -> str:
    """Returns the key of `key=value`, `+key=value` or `~key`."""
    return override.lstrip("+~").partition("=")[0]


def job_overrides(kind: str = "task") -> list[str]:
    """Returns the overrides of the current Hydra job as they were typed; `kind` is `task`, or `hydra` for Hydra's own.

    Does not resolve `${...}` in them: in Hydra's configuration, where they are recorded, it means something else.
    """
    raw: Any = OmegaConf.to_container(getattr(HydraConfig.get().overrides, kind), resolve=False)
    return [str(override) for override in raw]


def parse_arguments(typed: list[str]) -> Arguments:
    """Splits a command line into options and overrides. Options may stand anywhere; Hydra expects them first."""
    options: list[str] = []
    overrides: dict[str, str] = {}
    rest = iter(typed)
    for argument in rest:
        if argument.startswith("-"):
            options.append(argument)
            if argument in OPTIONS_WITH_VALUE and (value := next(rest, None)) is not None:
                options.append(value)
        else:
            overrides.pop(key_of(argument), None)
            overrides[key_of(argument)] = argument
    return Arguments(options, list(overrides.values()))


def check_folders(typed: Arguments) -> None:
    """Refuses an empty folder, as from an unset variable: the run would write into the working folder.

    Raises:
        ConfigError: `hydra.run.dir`, `hydra.sweep.dir` or an option of Hydra is typed without a value.
    """
    options = [*typed.options, ""]
    for option, value in pairwise(options):
        if (option in OPTIONS_WITH_VALUE and not value) or (option[-1:] == "=" and option[:-1] in OPTIONS_WITH_VALUE):
            raise ConfigError(f"{option.removesuffix('=')} has no value: name one, or leave it out")
    for key, usual in (("hydra.run.dir", "outputs/<name>"), ("hydra.sweep.dir", "multirun/<name>")):
        if (value := typed.value(key)) is not None and not value.strip():
            raise ConfigError(
                f"{key}= has no value: the run's files would go into the working folder; write {key}={usual}, or "
                f"{key}=. if that is meant"
            )


def resolve_resume(typed: Arguments) -> Arguments:
    """Replaces `resume` by the folder or the checkpoint to continue from; without `resume` nothing changes.

    - `resume=auto` continues the newest run (with `-m`: sweep) that has the same overrides, in its folder.
    - `resume=<run or sweep folder>` continues in that folder, with the arguments it was started with. Arguments typed
      now take precedence.
    - `resume=<checkpoint folder>` does the same in a new run folder.
    - With `-m`, `hydra.sweep.dir=<folder of a sweep>` alone is enough.

    Raises:
        ConfigError: `resume` names neither a run, a sweep nor a checkpoint, or one that names unknown code.
    """
    resume = typed.value("resume")
    if resume is None and typed.sweeps and sweep_arguments(Path(typed.value("hydra.sweep.dir") or "/")) is not None:
        resume = "auto"
    if resume is None or resume == "none":
        return typed
    typed = typed.without("resume")
    if not resume:
        raise ConfigError("resume= has no value: use auto, none, a run folder or a checkpoint")
    key = "hydra.sweep.dir" if typed.sweeps else "hydra.run.dir"
    if resume == "auto":
        folder = typed.value(key) or newest_of_same_command(typed)
        if folder is None:
            say("resume=auto: no earlier run of this command found here; starting a new run", file=sys.stderr)
            return with_overrides(typed, "resume=none")
        return in_folder(with_overrides(typed, "resume=auto"), key, Path(folder))
    path = Path(resume)  # a sweep's folder, a run's folder, its checkpoints/ folder, or one checkpoint
    if (first := sweep_arguments(path)) is not None:
        trust.check_arguments(*first, path)
        typed = merged(Arguments(["-m", *first.options], first.overrides), typed)
        return in_folder(with_overrides(typed, "resume=auto"), "hydra.sweep.dir", path)
    path = path.parent if path.name == "checkpoints" else path
    if os.path.exists(path / "manifest.json"):  # not `Path.exists`, which raises if the name is too long for a file
        return with_overrides(merged(trusted_arguments(path.parent.parent), typed), f"resume={quoted(path)}")
    if os.path.isdir(path / "checkpoints"):
        return in_folder(with_overrides(merged(trusted_arguments(path), typed), "resume=auto"), "hydra.run.dir", path)
    raise ConfigError(
        f"resume={resume} is neither a run folder nor a checkpoint: use auto, none, or outputs/<date>/<time>"
    )


def with_overrides(arguments: Arguments, *overrides: str) -> Arguments:
    """Returns the arguments with more overrides, which take precedence over the existing ones."""
    return parse_arguments([*arguments.options, *arguments.overrides, *overrides])


def merged(first: Arguments, then: Arguments) -> Arguments:
    """Merges recorded arguments with those typed now, which take precedence."""
    options = then.options if set(first.options) <= set(then.options) else [*first.options, *then.options]
    kept = [o for o in first.overrides if not is_of_another_option(o, then, options)]
    return parse_arguments([*options, *kept, *then.overrides])


def is_of_another_option(override: str, then: Arguments, options: list[str]) -> bool:
    """Returns whether a recorded override sets a key that the group's option, as typed now, does not have.

    Args:
        override: such as `clipping.max_norm=2`.
        then: typed now, perhaps with `clipping=agc`.
        options: Hydra's, which may name the user's own configuration folders.
    """
    group, _, key = key_of(override).partition(".")
    option = then.value(group) if key else None
    if option is None:
        return False
    known = keys_of_option(options, group, option)
    return known is not None and key.partition(".")[0] not in known


def keys_of_option(options: Sequence[str], group: str, option: str) -> Mapping[str, Any] | None:
    """Returns what the file of a group's option sets; None if there is none, or it cannot be read.

    Args:
        options: Hydra's, which may name the user's own configuration folders.
        group, option: such as `optimizer` and `adamw`.
    """
    own = [value for name, value in pairwise(options) if name in ("--config-dir", "-cd")]
    files = (folder / group / f"{option}.yaml" for folder in (*map(Path, own), conf_folder()))
    try:
        return next((load_yaml(file) for file in files if file.is_file()), None)
    except Exception:  # Hydra reports what is wrong with the file
        return None


def usual_lr(options: Sequence[str], optimizer: str) -> float | None:
    """Returns the learning rate that an option of `optimizer` has by itself; None if there is none."""
    found = (keys_of_option(options, "optimizer", optimizer) or {}).get("lr")
    return found if isinstance(found, int | float) else None


def in_folder(arguments: Arguments, key: str, folder: Path) -> Arguments:
    """Returns the arguments with the folder to continue in."""
    # null keeps Hydra from overwriting `.hydra/`, its record of the first start
    there = os.path.isdir(folder / "checkpoints")
    began = os.path.exists(folder / "run.json") or (there and os.path.exists(folder / ".hydra"))
    kept = ["hydra.output_subdir=null"] if began else []
    return with_overrides(arguments, f"{key}={quoted(folder)}", *kept)


def recorded_arguments(folder: Path) -> Arguments:
    """Reads the arguments that the run in `folder` was first started with; empty if they are not recorded."""
    return arguments_of(folder) or Arguments([], [])


def trusted_arguments(folder: Path) -> Arguments:
    """The same, to be run.

    Raises:
        ConfigError: they name unknown code.
    """
    found = recorded_arguments(folder)
    trust.check_arguments(*found, folder)
    return found


def arguments_of(folder: Path) -> Arguments | None:
    """Reads the arguments of a run from its `run.json`, or from Hydra's record if that is damaged; None if both are."""
    try:
        record = read_run_record(folder)
        if "overrides" not in record:
            raise DamagedFile(f"{folder / 'run.json'} is damaged: it has no overrides")
        return parse_arguments([*record.get("options", []), *record.get("overrides", [])]).without("resume")
    except MissingFile:
        return None
    except DamagedFile:
        pass
    try:
        overrides = OmegaConf.to_container(load_yaml(folder / ".hydra" / "overrides.yaml"))
        check_type(overrides, list[str])
    except Exception:  # YAML parsers raise many types
        return None
    return parse_arguments([str(each) for each in cast("list", overrides)]).without("resume")


def sweep_arguments(folder: Path) -> Arguments | None:
    """Reads the arguments that the sweep in `folder` was started with; None if it is no sweep."""
    try:
        if (folder / "sweep.json").exists():
            record = read_sweep_command(folder)
            options = [option for option in record["options"] if option not in SWEEP]
            return parse_arguments([*options, *record["overrides"]])
        if (folder / "multirun.yaml").exists():  # written by a Slurm job array
            tasks = OmegaConf.select(load_yaml(folder / "multirun.yaml"), "hydra.overrides.task") or []
            return parse_arguments([str(task) for task in tasks]).without("resume")
    except Exception:  # JSON and YAML parsers raise many types; a damaged record counts as none
        return None
    return None


def newest_of_same_command(typed: Arguments, part: str = ".") -> str | None:
    """Finds the newest run below `outputs/` (or sweep below `multirun/`) that was started with the same overrides.

    Args:
        part: the subfolder of a sweep that records its command, if the sweep's own folder does not.
    """
    if typed.sweeps:
        for folder in sorted(Path("multirun").glob("*/*/"), reverse=True):
            if (first := sweep_arguments(folder / part)) is not None and first.identity() == typed.identity():
                return str(folder)
        return None
    found = [
        (recorded, str(file.parent))
        for file in sorted(Path("outputs").glob("*/*/run.json"), reverse=True)
        if (file.parent / "checkpoints").is_dir() and (recorded := arguments_of(file.parent)) is not None
    ]
    # The very same command first. Otherwise a run that differs in `steps` only: its user has raised them to continue.
    same = [folder for recorded, folder in found if recorded.identity() == typed.identity()]
    any_steps = typed.without("steps").identity()
    longer = [folder for recorded, folder in found if recorded.without("steps").identity() == any_steps]
    return next(iter([*same, *longer]), None)


LAUNCH_VARIABLE = "STABLETRAIN_LAUNCH"
"""Environment variable that the Slurm job script sets: `slurm/launch.sh` with its options."""


def program(ranks: Ranks) -> list[str]:
    """Returns how this process was started: `python train.py`, `stabletrain train`, `torchrun ... train.py` ..."""
    if launch := os.environ.get(LAUNCH_VARIABLE):
        return shlex.split(launch)
    if not ranks.launched:
        return started().program
    each, nodes = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world_size)), os.environ.get("GROUP_WORLD_SIZE", "1")
    rendezvous = []
    if nodes != "1":  # the same command is typed on each node
        rendezvous = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={os.environ['MASTER_ADDR']}:29400"]
    return ["torchrun", *rendezvous, f"--nproc_per_node={each}", *started().for_torchrun]


def resume_command(ranks: Ranks, folder: Path) -> str:
    """Returns the command that continues an interrupted run: the typed one with `resume=auto`.

    If `resume` named another run or a checkpoint, the command names the run's folder: its record is not what was typed.
    """
    words = program(ranks)
    if LAUNCH_VARIABLE in os.environ:
        return f"automatically if Slurm requeues the job; otherwise: {shlex.join([*words, f'resume={folder}'])}"
    typed = [word for word in started().typed if key_of(word) != "resume"]
    named = parse_arguments(started().typed).value("resume") not in (None, "none", "auto")
    return shlex.join([*words, *typed, f"resume={folder}" if named else "resume=auto"])
