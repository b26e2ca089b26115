"""Writes the batch script of one job or job array: sbatch options, environment, and the overrides of each task."""

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from stabletrain.beside.slurm.request import Card, Request, seconds, srun_options
from stabletrain.config.arguments import LAUNCH_VARIABLE
from stabletrain.errors import ConfigError

ROOT = Path(__file__).parents[3]


class Job(NamedTuple):
    """One submission to `sbatch`.

    Attributes:
        card: the GPU type.
        folder: the run folder, or the sweep's folder.
        tasks: numbers of the sweep's runs to submit, each in the subfolder of its number; None for a single run.
        overrides: overrides of every run, including those that are not submitted.
        options: Hydra's options, shared by all runs.
        home: the folder from which the job is submitted; relative paths start there.
        pack: how many runs of a sweep a task of the array trains side by side.
    """

    card: Card
    folder: Path
    tasks: list[int] | None
    overrides: list[list[str]]
    options: list[str]
    home: Path
    pack: int = 1

    @property
    def groups(self) -> dict[int, list[int]]:
        """Returns the runs of each task of the array, which has the number of its first run; empty for a single run."""
        runs = self.tasks or []
        return {runs[at]: runs[at : at + self.pack] for at in range(0, len(runs), self.pack)}

    @property
    def folders(self) -> list[Path]:
        """Returns the folder of each submitted run."""
        return [self.folder] if self.tasks is None else [self.folder / str(number) for number in self.tasks]


def script(job: Job, request: Request) -> str:
    """Returns the text of the batch script.

    Raises:
        ConfigError: the time limit is not longer than the notice, or the folder's name contains quotes, a backslash or
            a line break.
    """
    lines = first_lines(job, request, "slurm/launch.sh")
    folder, train = shlex.quote(str(job.folder)), shlex.join([str(ROOT / "train.py"), *job.options])
    command = f'{train} "${{overrides[@]}}" hydra.run.dir="\'$folder\'" resume=auto'
    if job.pack > 1:
        lines += ['case "$SLURM_ARRAY_TASK_ID" in', *(packed_line(job, task) for task in job.groups), "esac"]
        lines.append("folder=${packed_folders[0]}")
        command = f'{shlex.quote(str(ROOT / "slurm" / "pack.py"))} "$python" {train} -- "${{runs[@]}}"'
    elif job.tasks:
        lines.append('case "$SLURM_ARRAY_TASK_ID" in')
        lines += [f"  {number}) overrides=({shlex.join(job.overrides[number])}) ;;" for number in job.tasks]
        lines += ["esac", f'folder={folder}/"$SLURM_ARRAY_TASK_ID"']
    else:
        lines += [f"overrides=({shlex.join(job.overrides[0])})", f"folder={folder}"]
    again = shlex.join([str(ROOT / "slurm" / "launch.sh"), *request.options(job.card.name)])
    lines.append(f"export {LAUNCH_VARIABLE}={shlex.quote(again)}")
    lines += last_lines(job, request, command)
    return "\n".join(lines) + "\n"


def packed_line(job: Job, task: int) -> str:
    """Returns the line of a task that trains several runs: their folders, and each folder with its overrides."""
    folders = {number: str(job.folder / str(number)) for number in job.groups[task]}
    words = [word for number, folder in folders.items() for word in ("--", folder, *job.overrides[number])]
    return f"  {task}) packed_folders=({shlex.join(folders.values())}) runs=({shlex.join(words[1:])}) ;;"


def first_lines(job: Job, request: Request, writer: str) -> list[str]:
    """Returns the first lines of a batch script: the options of `sbatch`, the environment, and `$python`.

    Raises:
        ConfigError: as `script`.
    """
    gpus = request.processes(job.card.gpus_per_node)
    if bad := set("'\"\\\n") & set(str(job.folder)):
        raise ConfigError(f"the run folder {job.folder} has {sorted(bad)[0]!r} in its name: choose one without")
    runs = f"{len(job.tasks)} runs" if job.tasks else "One run"
    runs += f", {job.pack} side by side," if job.pack > 1 else ""
    size = f"{request.nodes} x {gpus} processes each"
    lines = ["#!/usr/bin/env bash", f"# {runs} on {job.card.name}, {size}; written by {writer}."]
    lines += [f"#SBATCH {option}" for option in sbatch_options(job, request, gpus)]
    return [*lines, "set -e", *environment(job.card)]


def last_lines(job: Job, request: Request, command: str) -> list[str]:
    """Returns the last lines of a batch script, which start the ranks; `$folder` is the run folder.

    Args:
        job: the submission.
        request: the number of processes, and how many times the job may requeue.
        command: what `$python` runs, in the words of the shell.
    """
    gpus = request.processes(job.card.gpus_per_node)
    of_srun = [quoted_with_variables(word) for word in srun_options(job.card.srun)]
    return [
        "# shellcheck source=/dev/null",
        f"source {shlex.quote(str(ROOT / 'slurm' / 'job.sh'))} \\",
        " ".join(['  "$folder"', str(gpus), str(request.max_requeues), job.card.notice, *of_srun, "-- \\"]),
        f'  "$python" {command}',
    ]


def environment(card: Card) -> list[str]:
    """Returns the lines that set up the environment and choose the interpreter, `$python`."""
    lines = [f"module load {shlex.join(card.modules.split())}"] if card.modules else []
    lines += [line.strip() for line in card.environment.splitlines() if line.strip()]
    python = f"python={shlex.quote(card.python or sys.executable)}"
    if not lines or card.python:
        return [*lines, python]
    # an environment that brings its own Python must not run with the one that submits
    activated = '[[ $(command -v python) == "$submitted" ]] || python=python'
    return ["submitted=$(command -v python || true)", *lines, python, activated]


def sbatch_options(job: Job, request: Request, gpus: int) -> list[str]:
    """Returns the options of `sbatch`.

    Raises:
        ConfigError: the time limit is not longer than the notice.
    """
    card = job.card
    time = request.time or card.time
    if time and (limit := seconds(time)) is not None and limit <= int(card.notice):
        raise ConfigError(
            f"--time {time} is {limit} s, not longer than the notice of {card.notice} s, at which a job saves and "
            "requeues: raise --time, or lower notice in cluster.conf"
        )
    log = "%a/slurm.log" if job.tasks else "slurm.log"
    values = {
        "job-name": request.name,
        "partition": request.partition or card.partition,
        "account": request.account or card.account,
        "qos": request.qos or card.qos,
        "dependency": request.dependency,
        "constraint": card.constraint,
        "nodes": str(request.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(int(card.cpus_per_gpu) * gpus) if card.cpus_per_gpu else "",
        "mem": card.memory,
        "gres": card.gres.replace("{gpus}", str(gpus)),
        "time": time,
        "chdir": str(job.home),
        "output": str(job.home / job.folder).replace("%", "%%") + f"/{log}",
        "open-mode": "append",
        "signal": f"B:USR2@{card.notice}",
    }
    if job.tasks:
        values["array"] = ranges([*job.groups]) + (f"%{request.parallel_jobs}" if request.parallel_jobs else "")
    lines = [f"--{name}={quoted(value)}" for name, value in values.items() if value]
    return [*lines, "--requeue", *(line.strip() for line in card.sbatch.splitlines() if line.strip())]


def ranges(numbers: list[int]) -> str:
    """Writes ascending numbers in Slurm's form: `0-3,5,7-8`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, ends)) for ends in found)


def quoted_with_variables(word: str) -> str:
    """Quotes a word for the shell, which still replaces variables such as $HOME in it."""
    if "$" not in word:
        return shlex.quote(word)
    return '"' + re.sub(r'([\\"`])', r"\\\1", word) + '"'


def quoted(value: str) -> str:
    """Quotes a value for an `#SBATCH` line.

    Raises:
        ConfigError: the value contains a line break.
    """
    if "\n" in value:
        raise ConfigError(f"{value!r} has a line break in it, which Slurm cannot take: leave it out")
    if all(letter.isalnum() or letter in "-_./:,=@%+" for letter in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
