"""The command line: as typed, where `resume` continues, and what a user types to go on.

The command line as it was typed: options before overrides, and `resume` resolved to the folder it continues in.

A run's `run.json` keeps the arguments it was first started with; that record, and not Hydra's own, which each start
rewrites, says which command a folder belongs to.

How this process was started, by python, torchrun or Slurm, so that a person can be told a command to go on with.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks

WITH_VALUE = frozenset(
    [
        "--config-dir",
        "-cd",
        "--config-name",
        "-cn",
        "--config-path",
        "-cp",
        "--package",
        "-p",
        "--cfg",
        "-c",
        "--info",
        "-i",
        "--shell-completion",
        "-sc",
    ]
)
"""Hydra's options that are followed by a value."""

SWEEP = frozenset({"-m", "--multirun"})


class Arguments(NamedTuple):
    """A command line, taken apart.

    Attributes:
        options: Hydra's, such as `--config-dir my_conf`, each with its value, in order.
        overrides: `key=value` and the like, in order, of the same key only the last.
    """

    options: list[str]
    overrides: list[str]

    @property
    def sweeps(self) -> bool:
        """Whether every combination is to be run."""
        return bool(SWEEP & set(self.options))

    def value(self, key: str) -> str | None:
        """The value an override gives `key`, without quotes; None where there is no such override."""
        found = [o.partition("=")[2] for o in self.overrides if key_of(o) == key and "=" in o]
        return found[-1].strip("'\"") if found else None

    def without(self, key: str) -> "Arguments":
        """The same without the overrides of `key`."""
        return Arguments(self.options, [o for o in self.overrides if key_of(o) != key])

    def identity(self) -> list[str]:
        """What makes a command the same command: its overrides, sorted, but for `resume` and Hydra's own."""
        return sorted(o for o in self.overrides if key_of(o) != "resume" and not key_of(o).startswith("hydra"))


def key_of(override: str) -> str:
    """The key of `key=value`, `+key=value`, `~key`."""
    return override.lstrip("+~").partition("=")[0]


def parse_arguments(typed: list[str]) -> Arguments:
    """Options wherever they stand, which Hydra wants first, and overrides."""
    options: list[str] = []
    overrides: dict[str, str] = {}
    rest = iter(typed)
    for argument in rest:
        if argument.startswith("-"):
            options.append(argument)
            if argument in WITH_VALUE and (value := next(rest, None)) is not None:
                options.append(value)
        else:
            overrides.pop(key_of(argument), None)
            overrides[key_of(argument)] = argument
    return Arguments(options, list(overrides.values()))


def resolve_resume(typed: Arguments) -> Arguments:
    """The command line with `resume` resolved; one without it as it is.

    `resume=auto` looks for the newest run (or, with `-m`, sweep) of the same overrides, and continues in its folder.
    `resume=<run or sweep folder>` continues there with the arguments it was started with; those typed now win.
    `resume=<checkpoint folder>` does the same in a new run folder.
    With `-m` the folder of a sweep, named by `hydra.sweep.dir`, is enough.

    Raises:
        ConfigError: `resume` names nothing that could be continued.
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
        folder = typed.value(key) or newest_of_same(typed)
        if folder is None:
            print("resume=auto: no earlier run of this command here; a new one starts", file=sys.stderr)
            return with_overrides(typed, "resume=none")
        return in_folder(with_overrides(typed, "resume=auto"), key, Path(folder))
    path = Path(resume)
    if (first := sweep_arguments(path)) is not None:
        typed = merged(Arguments(["-m", *first.options], first.overrides), typed)
        return in_folder(with_overrides(typed, "resume=auto"), "hydra.sweep.dir", path)
    path = path.parent if path.name == "checkpoints" else path
    if (path / "manifest.json").exists():
        return with_overrides(merged(recorded_arguments(path.parent.parent), typed), f"resume='{path}'")
    if (path / "checkpoints").is_dir():
        return in_folder(with_overrides(merged(recorded_arguments(path), typed), "resume=auto"), "hydra.run.dir", path)
    raise ConfigError(
        f"resume={resume} is neither a run folder nor a checkpoint: use auto, none, or outputs/<date>/<time>"
    )


def with_overrides(arguments: Arguments, *overrides: str) -> Arguments:
    """The arguments with more overrides, which win over those before."""
    return parse_arguments([*arguments.options, *arguments.overrides, *overrides])


def merged(first: Arguments, then: Arguments) -> Arguments:
    """Recorded arguments, and those typed now, which win."""
    options = then.options if set(first.options) <= set(then.options) else [*first.options, *then.options]
    return parse_arguments([*options, *first.overrides, *then.overrides])


def in_folder(arguments: Arguments, key: str, folder: Path) -> Arguments:
    """The arguments with the folder to continue in; Hydra leaves its record of the first start there alone."""
    kept = ["hydra.output_subdir=null"] if (folder / "run.json").exists() else []
    return with_overrides(arguments, f"{key}='{folder}'", *kept)


def recorded_arguments(folder: Path) -> Arguments:
    """The arguments that the run in `folder` was first started with; none where they are not recorded."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return parse_arguments([*record.get("options", []), *record.get("overrides", [])]).without("resume")
    except (OSError, ValueError, AttributeError, TypeError):
        return Arguments([], [])


def sweep_arguments(folder: Path) -> Arguments | None:
    """The arguments that the sweep in `folder` was started with; None where there is none."""
    try:
        if (folder / "sweep.json").exists():
            record = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
            options = [option for option in record["options"] if option not in SWEEP]
            return parse_arguments([*options, *record["overrides"]])
        if (folder / "multirun.yaml").exists():  # of a job array
            tasks = OmegaConf.select(OmegaConf.load(folder / "multirun.yaml"), "hydra.overrides.task") or []
            return parse_arguments([str(task) for task in tasks]).without("resume")
    except Exception:  # whatever a parser of JSON or YAML raises: a damaged record is none
        return None
    return None


def newest_of_same(typed: Arguments, part: str = ".") -> str | None:
    """The newest run folder (or sweep folder) below the current one that was started with the same overrides.

    Args:
        typed: the command line.
        part: a folder in the sweep's that records the command, where not the sweep's own does.
    """
    if typed.sweeps:
        for folder in sorted(Path("multirun").glob("*/*/"), reverse=True):
            if (first := sweep_arguments(folder / part)) is not None and first.identity() == typed.identity():
                return str(folder)
        return None
    for file in sorted(Path("outputs").glob("*/*/run.json"), reverse=True):
        if recorded_arguments(file.parent).identity() == typed.identity() and (file.parent / "checkpoints").is_dir():
            return str(file.parent)
    return None


LAUNCH = "STABLETRAIN_LAUNCH"
"""In a Slurm job's environment: `slurm/launch.sh` and its options, as its script has them."""


def program(ranks: Ranks) -> list[str]:
    """The words before what `train.py` is given: `python train.py`, `torchrun --nproc_per_node=2 train.py` ..."""
    if launch := os.environ.get(LAUNCH):
        return shlex.split(launch)
    if not ranks.launched:
        return ["python", sys.argv[0]]
    each, nodes = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world_size)), os.environ.get("GROUP_WORLD_SIZE", "1")
    rendezvous = []
    if nodes != "1":  # typed on each of them
        rendezvous = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={os.environ['MASTER_ADDR']}:29400"]
    return ["torchrun", *rendezvous, f"--nproc_per_node={each}", sys.argv[0]]


def resume_command(ranks: Ranks, folder: Path) -> str:
    """How to go on with a run that was interrupted: what was typed, with `resume=auto`.

    Args:
        ranks: this process among those of the run.
        folder: the run's.
    """
    words = program(ranks)
    if LAUNCH in os.environ:
        return f"by itself, where the job queues again; else {shlex.join([*words, f'resume={folder}'])}"
    typed = [word for word in arguments(sys.orig_argv, sys.argv[0]) if key_of(word) != "resume"]
    return shlex.join([*words, *typed, "resume=auto"])


def arguments(command: list[str], script: str) -> list[str]:
    """What follows the script in a command line."""
    return command[command.index(script) + 1 :] if script in command else command[1:]
