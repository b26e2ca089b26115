"""`slurm/launch.sh`: reads the request, creates the run folders, and submits one job per GPU type."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from stabletrain.beside.slurm import submitted
from stabletrain.beside.slurm.gpu_hours import cost_lines
from stabletrain.beside.slurm.request import Card, Request, check_checkout, read_cluster, read_request
from stabletrain.beside.slurm.runs import Runs, environment_notes, expand, trial_arguments
from stabletrain.beside.slurm.script import Job, script
from stabletrain.beside.sweep.plan import status_of
from stabletrain.cli import hydra_patches
from stabletrain.cli.finished import FINAL_STATUSES
from stabletrain.cli.own_folder import unused
from stabletrain.config import trust
from stabletrain.config.arguments import (
    Arguments,
    merged,
    newest_of_same_command,
    parse_arguments,
    recorded_arguments,
    sweep_arguments,
)
from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.machine.slurm import has_slurm, max_array_size, sbatch
from stabletrain.printable import say
from stabletrain.tracking.metrics import replace


def main() -> int:
    """Submits the jobs, or with `--dry-run` prints their scripts; returns the exit code, 2 for an invalid request."""
    hydra_patches.raise_errors()
    try:
        check_checkout("submit with its slurm/launch.sh")
        request = read_request(sys.argv[1:])
        cards = [read_cluster(request.cluster, name) for name in request.cards]
        jobs, runs, scripts = planned(request, cards)
        if not jobs:
            say(f"every run in {runs.folder} is done: there is nothing to continue", file=sys.stderr)
            return 0
        costs = cost_lines(request, jobs, runs) if request.dry_run else []
        for note in [*environment_notes(cards), *runs.notes, *costs]:
            say(note, file=sys.stderr)
        if request.dry_run:
            say("\n".join(scripts), end="")
            return 0
        for number, (job, text) in enumerate(zip(jobs, scripts, strict=True)):
            submit(job, text, runs.record, before=number)
    except (StabletrainError, OSError) as error:
        say(f"slurm/launch.sh: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    say(f"runs     {runs.folder}")
    if request.test:
        say("then     with --dry-run in place of --test, launch.sh says the GPU-hours when this has finished")
    elif len(runs.overrides) * len(cards) > 1:
        say(f"then     stabletrain compare {shlex.quote(str(runs.folder))}")
    return 0


def planned(request: Request, cards: list[Card]) -> tuple[list[Job], Runs, list[str]]:
    """Returns the jobs, their runs and their scripts. Creates a new folder that is named by the time.

    Another launch may take that name in the meantime: then the jobs are planned anew, with the next one.

    Raises:
        ConfigError: see `plan_jobs`; or there is no Slurm here.
    """
    while True:
        jobs, runs = plan_jobs(request, cards)
        scripts = [script(job, request) for job in jobs]
        if jobs and not request.dry_run and not has_slurm():
            raise ConfigError("there is no sbatch here: run this on a login node of the cluster, or add --dry-run")
        if not request.dry_run:
            check_array_size(jobs)
        if not runs.by_time or not jobs or request.dry_run:
            return jobs, runs, scripts
        with suppress(FileExistsError):
            runs.folder.mkdir(parents=True)
            return jobs, runs, scripts


def check_array_size(jobs: list[Job]) -> None:
    """Checks that Slurm takes arrays with these tasks.

    Raises:
        ConfigError: it does not; the message says how many it takes.
    """
    last = max((number for job in jobs for number in job.groups), default=0)
    if last and (most := max_array_size()) is not None and last >= most:
        raise ConfigError(
            f"a sweep of {last + 1:,} runs is above this cluster's MaxArraySize, {most:,}: submit parts of at most "
            f"that many runs, such as seed=range(0,{most}) and then seed=range({most},{last + 1})"
        )


def plan_jobs(request: Request, cards: list[Card]) -> tuple[list[Job], Runs]:
    """Returns one job per GPU type, in the runs' folder, or in one subfolder per GPU type if there are several.

    Of a sweep that is continued with the settings it has, leaves out the runs that are done. A new folder that is named
    by the time gets a name that is free.

    Raises:
        ConfigError: a run's configuration is invalid, or its folder is taken.
    """
    arguments, folder, same = resumed_arguments(request)
    resumed = [] if folder is None else [folder / card.name for card in cards] if len(cards) > 1 else [folder]
    processes = {card.name: request.nodes * request.processes(card.gpus_per_node) for card in cards}
    if request.pack > 1 and (several := [name for name, count in processes.items() if count > 1]):
        raise ConfigError(
            f"--pack {request.pack}: on {several[0]} a run has {processes[several[0]]} devices, and only runs of one "
            "device can share it: leave out --pack, or add --gpus-per-node 1 and leave out --nodes"
        )
    runs = expand(arguments, processes, resumed, skip_unsupported=request.skip_unsupported)
    if request.test:
        return trial_jobs(cards, processes, arguments, runs)
    if folder is not None:
        runs = runs._replace(folder=folder, by_time=False)
    elif runs.by_time:
        runs = runs._replace(folder=unused(runs.folder))
    options = [option for option in arguments.options if option != "-m"]
    jobs = []
    for card in cards:
        where = runs.folder / card.name if len(cards) > 1 else runs.folder
        numbers = [n for n in range(len(runs.overrides)) if n not in runs.left_out.get(card.name, ())]
        tasks = [n for n in numbers if not (same and status_of(where / str(n)) in FINAL_STATUSES)]
        queued = tasks if arguments.sweeps else None
        jobs.append(Job(card, where, queued, runs.overrides, options, Path.cwd(), request.pack))
    jobs = [job for job in jobs if job.folders]
    key = "hydra.sweep.dir" if arguments.sweeps else "hydra.run.dir"
    for each in (each for job in jobs for each in job.folders):
        if folder is None and ((each / "slurm.log").exists() or (each / "run.json").exists()):
            raise ConfigError(f"{each} already holds a run: continue it with resume=auto, or choose another {key}")
    return jobs, runs


def trial_jobs(
    cards: Sequence[Card], processes: Mapping[str, int], arguments: Arguments, runs: Runs
) -> tuple[list[Job], Runs]:
    """Returns one job per GPU type, with a few steps of the first run that it would get, and these runs."""
    jobs, tried = [], runs
    for card in cards:
        first = next((n for n in range(len(runs.overrides)) if n not in runs.left_out.get(card.name, ())), None)
        if first is None:
            continue
        typed = trial_arguments(arguments, runs, first)
        tried = expand(typed, {card.name: processes[card.name]})
        folder = unused(tried.folder)
        where = folder / card.name if len(cards) > 1 else folder
        jobs.append(Job(card, where, None, tried.overrides, typed.options, Path.cwd()))
    return jobs, tried._replace(folder=jobs[0].folder if len(cards) == 1 else jobs[0].folder.parent, notes=runs.notes)


class Resumed(NamedTuple):
    """What `resume` means.

    Attributes:
        arguments: without `resume`.
        folder: to continue in; None if a new run starts.
        unchanged: whether the runs there continue with the settings that they have.
    """

    arguments: Arguments
    folder: Path | None
    unchanged: bool


def resumed_arguments(request: Request) -> Resumed:
    """Returns the arguments and the folder to continue in.

    `resume=auto` finds the newest folder of the same command. `resume=<folder>` takes the command recorded there and
    appends what is typed now.

    Raises:
        ConfigError: the folder holds no run or sweep.
    """
    typed = request.arguments.without("resume")
    resume = request.arguments.value("resume")
    if resume in (None, "none"):
        return Resumed(typed, None, unchanged=False)
    key = "hydra.sweep.dir" if typed.sweeps else "hydra.run.dir"
    if resume == "auto":
        part = request.cards[0] if len(request.cards) > 1 else "."  # one subfolder per GPU type
        named = typed.value(key) or newest_of_same_command(typed, part)
        found = Path(named) if named else None
        if found is None:
            say("resume=auto: no earlier run of this command found here; starting a new run", file=sys.stderr)
        return Resumed(typed, found, unchanged=found is not None)
    folder, mark = Path(resume), "multirun.yaml" if typed.sweeps else "run.json"
    places = [folder / card for card in request.cards] if len(request.cards) > 1 else [folder]
    for place in places:
        if not typed.sweeps and (place / "multirun.yaml").exists():
            raise ConfigError(f"resume={resume} is the folder of a sweep: add -m")
        if not (place / mark).exists():
            raise ConfigError(f"resume={resume}: there is no {place / mark}: use auto, or a folder that was begun")
    first = (sweep_arguments(places[0]) if typed.sweeps else recorded_arguments(folder)) or Arguments([], [])
    trust.check_arguments(*first, folder)
    both = merged(first, typed)
    return Resumed(both, folder, unchanged=set(both.identity()) == set(first.identity()))


def submit(job: Job, text: str, record: DictConfig | None, *, before: int) -> None:
    """Creates the folders for Slurm's logs, saves the script beside them, and submits it.

    Raises:
        StabletrainError: sbatch refuses the job.
    """
    for folder in job.folders:
        # Slurm does not create the folder of a log file.
        folder.mkdir(parents=True, exist_ok=True)
    if record is not None:
        trust.remember_arguments([], parse_arguments([*record.hydra.overrides.task]).without("resume").overrides)
        replace(job.folder / "multirun.yaml", OmegaConf.to_yaml(record))
    file = job.folder / "slurm.sh"
    replace(file, text)
    try:
        number = sbatch(file)
    except StabletrainError as error:
        others = f" ({before} of the sweep's jobs are submitted already)" if before else ""
        raise StabletrainError(
            f"sbatch refused the job on {job.card.name}: {error}{others}; its script is {file}"
        ) from None
    submitted.record(job, number)
    tasks = f", {len(job.groups)} tasks" if job.tasks else ""
    tasks += f" of up to {job.pack} runs" if job.pack > 1 else ""
    log = job.folder / "<n>" / "slurm.log" if job.tasks else job.folder / "slurm.log"
    say(f"job      {number} on {job.card.name}{tasks}, log {log}")


if __name__ == "__main__":
    sys.exit(main())
