"""What the user asks of Slurm: the command line of `slurm/launch.sh`, and the cluster's settings in
`slurm/cluster.conf`.
"""

import argparse
import configparser
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from stabletrain.config.arguments import CONFIG_OPTIONS, Arguments, parse_arguments
from stabletrain.errors import ConfigError, did_you_mean
from stabletrain.program import in_checkout
from stabletrain.stored.json_files import read_file


@dataclass(frozen=True)
class Card:
    """The settings to request one GPU type; an empty string requests nothing.

    Attributes:
        name: the section's name in cluster.conf.
        partition, account, qos, constraint, memory: as `sbatch` takes them.
        gres: the GPUs of a node, with `{gpus}` for their number; empty on nodes without GPUs.
        gpus_per_node: default of `--gpus-per-node`.
        cpus_per_gpu: CPU cores for each GPU's process.
        time: default of `--time`.
        notice: seconds before the time limit at which Slurm asks a job to save.
        modules: environment modules to load.
        environment: shell lines that set up the environment, run on the first node of each job.
        python: the interpreter on the nodes; empty for the one that `modules` or `environment` activate, else for the
            one that submits.
        sbatch: further `sbatch` options, one per line.
        srun: further `srun` options, one per line, quoted as in a shell.
        own_environment: whether the section itself sets `environment`, `python` or `modules`; not a key.
    """

    name: str
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    memory: str = ""
    gres: str = ""
    gpus_per_node: str = "1"
    cpus_per_gpu: str = ""
    time: str = ""
    notice: str = "120"
    modules: str = ""
    environment: str = ""
    python: str = ""
    sbatch: str = ""
    srun: str = ""
    own_environment: bool = False


CARD_KEYS = [field.name for field in fields(Card) if field.name not in ("name", "own_environment")]

ENVIRONMENT_KEYS = ("environment", "python", "modules")
"""Keys that choose a job's Python, and so its build of PyTorch."""

MIN_COUNTS = {"gpus_per_node": 1, "cpus_per_gpu": 1, "notice": 30}
"""Keys whose values are integers, and their minimum. Slurm checks time limits every 30 seconds."""


SRUN_OPTIONS_OF_JOB = (
    *("-n", "--ntasks", "--ntasks-per-node", "-N", "--nodes", "-w", "--nodelist", "-x", "--exclude"),
    *("-r", "--relative", "-c", "--cpus-per-task", "-K", "--kill-on-bad-exit", "--multi-prog", "--pty"),
    *("--gpus-per-task", "--ntasks-per-gpu", "-D", "--chdir", "--export"),
)
"""Options of `srun` that `slurm/job.sh` sets or relies on.

It starts one task on each node of the job. The task sees all GPUs of the node, and has the job's folder and environment
variables.
"""


def srun_options(lines: str, where: str = "srun") -> list[str]:
    """Returns the words of the further `srun` options, one option per line.

    Raises:
        ConfigError: a line is no option, or sets what `slurm/job.sh` sets. The message begins with `where`.
    """
    options = []
    for line in filter(None, map(str.strip, lines.splitlines())):
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"{where}: {line}: {error}") from error
        option, *values = words
        if (
            not re.match("--?[a-zA-Z]", option)
            or len(values) > (0 if "=" in option else 1)
            or any(value.startswith("-") for value in values)
        ):
            raise ConfigError(f"{where}: {line} is not one option: write one per line, and quote a value with spaces")
        name = option.partition("=")[0] if option.startswith("--") else option[:2]
        # srun also accepts the first letters of a long option
        if any(each.startswith(name) for each in SRUN_OPTIONS_OF_JOB):
            raise ConfigError(f"{where}: {option} changes what slurm/job.sh sets or relies on: leave it out")
        options += words
    return options


def read_cluster(file: Path, name: str) -> Card:
    """Reads the section of one GPU type, with [DEFAULT] for what it leaves out.

    Raises:
        ConfigError: the file or section does not exist, or a key or value is invalid.
    """
    config = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    try:
        config.read_string(read_file(file).decode(), str(file))
    except OSError as error:
        raise ConfigError(f"--cluster {file} cannot be read ({error.strerror}): see slurm/README.md") from error
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    if name not in config:
        raise ConfigError(f"--gpu {name} is not in {file}, which has {', '.join(config.sections())}: add it there")
    for key, value in config[name].items():
        if key not in CARD_KEYS:
            hint = did_you_mean(key, CARD_KEYS) or f"; there are {', '.join(CARD_KEYS)}"
            raise ConfigError(f"{file}: [{name}] {key}: there is no such key{hint}")
        if value and key in MIN_COUNTS and (not value.isdecimal() or int(value) < MIN_COUNTS[key]):
            raise ConfigError(f"{file}: [{name}] {key} = {value} is not a whole number of at least {MIN_COUNTS[key]}")
    shared = config.defaults()
    own = any(config[name].get(key) and config[name][key] != shared.get(key) for key in ENVIRONMENT_KEYS)
    card = Card(name, **{key: value for key, value in config[name].items() if value}, own_environment=own)
    if card.time:
        seconds(card.time)
    srun_options(card.srun, f"{file}: [{name}] srun")
    return card


CLUSTER = Path(__file__).parents[3] / "slurm" / "cluster.conf"


def check_checkout(then: str) -> None:
    """Checks that this package has the scripts for Slurm beside it.

    Raises:
        ConfigError: it does not; the message ends with what to do in a checkout.
    """
    if not in_checkout():
        raise ConfigError(
            "launch.sh, job.sh and cluster.conf are not part of the installed package: clone the repository, run "
            f"`pip install -e .` in it, and {then}"
        )


TIME_FORMATS = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?|(?P<short>\d+(?::\d+){0,2}))"
)
"""Slurm's time formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours, and so on."""

EXAMPLES = """\
one job           slurm/launch.sh --gpu a100 --time 8:00:00 precision=bf16 stability=zloss_qknorm
two nodes of four slurm/launch.sh --gpu h100 --nodes 2 --gpus-per-node 4 model=gpt2 batch_size=512
a sweep           slurm/launch.sh --gpu a100,v100 --parallel-jobs 8 -m seed=0,1,2 optimizer.lr=1e-3,1e-2
only print it     slurm/launch.sh --dry-run ...
20 steps of it    slurm/launch.sh --test ..., after which --dry-run says the GPU-hours
four on one GPU   slurm/launch.sh --pack 4 -m seed=0,1,2,3
where it stands   stabletrain status multirun/<date>/<time>
continue          slurm/launch.sh resume=auto ...

A job that is pre-empted or reaches its time limit saves a checkpoint and requeues. `scancel <job>` ends it for good,
`scancel --signal=USR2 <job>` makes it save and requeue now. The cluster's settings are in slurm/cluster.conf."""


@dataclass(frozen=True)
class Request:
    """The parsed command line of `slurm/launch.sh`.

    Attributes:
        cards: sections of cluster.conf; several only with a sweep.
        nodes: number of nodes of each run.
        gpus: GPUs per node; None for cluster.conf's value.
        time, partition, account, qos: as Slurm takes them; None for cluster.conf's values.
        dependency: of the jobs, as Slurm takes it, such as `afterok:17`; None for none.
        name: the jobs' name.
        parallel_jobs: how many runs of an array may run at once; None for Slurm's own limit.
        max_requeues: how many times a job may requeue.
        dry_run: print the scripts and submit nothing.
        cluster: path of the cluster's configuration.
        arguments: what is passed on to `train.py`.
        skip_unsupported: whether to leave out the runs of a sweep that a GPU type cannot do.
        test: whether to submit only a few steps of the first run.
        pack: how many runs of a sweep share a task and its GPU.
    """

    cards: Sequence[str]
    nodes: int
    gpus: int | None
    time: str | None
    partition: str | None
    account: str | None
    qos: str | None
    dependency: str | None
    name: str
    parallel_jobs: int | None
    max_requeues: int
    dry_run: bool
    cluster: Path
    arguments: Arguments
    skip_unsupported: bool = False
    test: bool = False
    pack: int = 1

    @classmethod
    def of(cls, typed: argparse.Namespace, **more: Any) -> "Request":
        """Returns the request of a parsed command line, and of `more`, which takes precedence."""
        found = vars(typed) | more
        return cls(**{field.name: found[field.name] for field in fields(cls) if field.name in found})

    def processes(self, customary: str) -> int:
        """Returns the number of processes per node, one per GPU; `customary` is cluster.conf's number."""
        return self.gpus or int(customary)

    def options(self, card: str) -> list[str]:
        """Returns the `launch.sh` options that request one run on this GPU type."""
        asked: dict[str, object] = {"--gpu": card, "--nodes": self.nodes if self.nodes > 1 else None}
        asked |= {"--gpus-per-node": self.gpus}
        asked |= {"--time": self.time, "--partition": self.partition, "--account": self.account, "--qos": self.qos}
        asked |= {"--cluster": None if self.cluster == CLUSTER else Path(os.path.realpath(self.cluster))}
        return [word for name, value in asked.items() if value is not None for word in (name, str(value))]


class Parser(argparse.ArgumentParser):
    """An `argparse` parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with argparse's message."""
        raise ConfigError(f"{message}: slurm/launch.sh --help lists the options")


def at_least(lowest: int):
    """Returns an `argparse` type: an integer with a lower bound."""

    def number(typed: str) -> int:
        if not typed.isdecimal() or int(typed) < lowest:
            raise argparse.ArgumentTypeError(f"{typed!r} is not a whole number of at least {lowest}")
        return int(typed)

    return number


def seconds(time: str) -> int | None:
    """Converts a time limit to seconds; None if it is unlimited.

    Raises:
        ConfigError: it has none of Slurm's formats, or is zero.
    """
    if time.lower() in ("infinite", "unlimited"):
        return None
    found = TIME_FORMATS.fullmatch(time)
    if not found:
        raise ConfigError(f"--time {time} is not a time: use minutes, hours:minutes:seconds or days-hours:minutes")
    if short := found["short"]:
        parts = [int(part) for part in short.split(":")]
        total = {1: lambda m: 60 * m, 2: lambda m, s: 60 * m + s, 3: lambda h, m, s: 3600 * h + 60 * m + s}
        limit = total[len(parts)](*parts)
    else:
        days, hours, minutes, rest = (int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
        limit = 86400 * days + 3600 * hours + 60 * minutes + rest
    if not limit:
        raise ConfigError(f"--time {time} is zero: leave --time out to use the partition's limit")
    return limit


def parser() -> Parser:
    """Builds the parser of the command line."""
    made = Parser(
        prog="slurm/launch.sh",
        usage="slurm/launch.sh [options] [-m] [group=option | key=value ...]",
        description="Trains on a Slurm cluster: one job, or with -m a job array with one run per task.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    one = at_least(1)
    made.add_argument("--gpu", default="any", metavar="CARD[,CARD]", help="a section of cluster.conf; several with -m")
    made.add_argument("--nodes", type=one, default=1, metavar="N", help="nodes per run (1)")
    made.add_argument("--gpus-per-node", dest="gpus", type=one, metavar="G", help="GPUs per node (cluster.conf)")
    add_job_options(made)
    made.add_argument("--parallel-jobs", type=one, metavar="N", help="with -m: parallel tasks per GPU type")
    made.add_argument(
        "--pack", type=one, default=1, metavar="N", help="with -m: train N runs side by side on one GPU (1)"
    )
    made.add_argument(
        "--skip-unsupported", action="store_true", help="with -m: leave out runs that a GPU type cannot do"
    )
    made.add_argument("--dry-run", action="store_true", help="print the scripts and GPU-hours, submit nothing")
    made.add_argument("--test", action="store_true", help="submit 20 steps of the first run, for --dry-run's GPU-hours")
    made.add_argument("-m", "--multirun", action="store_true", help="every combination of comma-separated values")
    for long, short in CONFIG_OPTIONS.items():  # passed on to `train.py`
        made.add_argument(short, long, action="append", help=argparse.SUPPRESS)
    made.add_argument("overrides", nargs="*", help="what train.py takes: precision=bf16, optimizer.lr=1e-3")
    return made


def add_job_options(to: argparse._ActionsContainer) -> None:
    """Adds the options of a job that do not depend on what it runs, also to `stabletrain whatif`."""
    to.add_argument("--time", metavar="LIMIT", help="of one start, in Slurm's format (cluster.conf)")
    to.add_argument("--partition", metavar="NAME", help="(cluster.conf)")
    to.add_argument("--account", metavar="NAME", help="(cluster.conf)")
    to.add_argument("--qos", metavar="NAME", help="(cluster.conf)")
    to.add_argument("--dependency", metavar="LIST", help="of other jobs, such as afterok:17")
    to.add_argument("--name", default="stabletrain", metavar="NAME", help="job name (stabletrain)")
    to.add_argument(
        "--max-requeues", type=at_least(0), default=100, metavar="N", help="limit on requeues of a job (100)"
    )
    to.add_argument("--cluster", type=Path, default=CLUSTER, metavar="FILE", help="(slurm/cluster.conf)")


def read_request(typed: Sequence[str]) -> Request:
    """Parses the command line of `slurm/launch.sh`.

    Raises:
        ConfigError: an option does not exist, or a value is invalid.
    """
    found = parser().parse_intermixed_args(typed)
    if found.time:
        seconds(found.time)
    cards = found.gpu.split(",")
    if "" in cards or len(set(cards)) < len(cards):
        raise ConfigError(f"--gpu {found.gpu}: name each card once, with commas between them, such as a100,v100")
    if len(cards) > 1 and not found.multirun:
        raise ConfigError(f"--gpu {found.gpu}: several cards are a sweep over them: add -m")
    if found.parallel_jobs and not found.multirun:
        raise ConfigError(
            f"--parallel-jobs {found.parallel_jobs}: without -m there is one job: leave it out, or add -m"
        )
    if found.skip_unsupported and not found.multirun:
        raise ConfigError("--skip-unsupported: without -m there is one run: leave it out, or add -m")
    if found.pack > 1 and (found.test or not found.multirun):
        fix = "leave one of them out" if found.test else "leave it out, or add -m"
        raise ConfigError(f"--pack {found.pack}: {'--test' if found.test else 'without -m there'} is one run: {fix}")
    if found.test and any(each.startswith("resume=") for each in found.overrides):
        raise ConfigError("--test: it is a new run: leave out resume")
    options = ["-m"] if found.multirun else []
    for long in CONFIG_OPTIONS:
        for value in getattr(found, long[2:].replace("-", "_")) or []:
            options += [long, value]
    return Request.of(found, cards=cards, arguments=parse_arguments([*options, *found.overrides]))
