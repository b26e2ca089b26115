"""How many GPU-hours a request takes: steps times the time of a step, as another run has measured it.

A run tells the time of a step of another one if it has finished at least `TEST_STEPS` steps, on the same number of GPUs
of the same kind, and the settings on which the time depends (`DECIDES`) are equal. The newest such run counts.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from stabletrain.beside.comparison.reading.runs import read_run
from stabletrain.beside.slurm.request import Request
from stabletrain.beside.slurm.runs import TEST_STEPS, Runs
from stabletrain.beside.slurm.script import Job
from stabletrain.beside.slurm.submitted import submitted
from stabletrain.config.resuming import Settings, recorded_settings
from stabletrain.stored.run_files import RUN, RunRecord, run_record_or_empty

DECIDES = ("model", "data", "precision", "batch_size", "grad_accum_steps", "loss_chunk", "compile", "parallel")
"""Groups, with their keys, and keys on which the time of a step depends. Of the optimizer, only the option counts."""

DOES_NOT = ("data.seed", "data.length_warmup")
"""Keys of those groups that do not matter."""

MOST = 100
"""Greatest number of runs whose settings are read, the newest first."""


class Measured(NamedTuple):
    """A run that has measured the time of a step.

    Attributes:
        folder: its run folder.
        settings: see `deciding`.
        seconds: of a step, without evaluations and checkpoints.
    """

    folder: Path
    settings: dict[str, Any]
    seconds: float


def cost_lines(request: Request, jobs: Sequence[Job], runs: Runs) -> list[str]:
    """Returns a line for each GPU type: the GPU-hours of its runs, as far as they are known."""
    return [cost_line(request, job, runs) for job in jobs]


def cost_line(request: Request, job: Job, runs: Runs) -> str:
    """Returns the line of one GPU type."""
    numbers = [0] if job.tasks is None else job.tasks
    processes = request.nodes * request.processes(job.card.gpus_per_node) / request.pack
    known = measurements(runs.folder, job.card.name, processes if job.card.gres else 0)
    unit = "GPU-hours" if job.card.gres else "process-hours"
    hours, unknown, example = 0.0, [], None
    for number in numbers:
        settings = runs.settings[number]
        wanted = deciding(settings)
        found = next((each for each in known if agree(each.settings, wanted)), None)
        if found is None:
            unknown.append(number)
        else:
            example = example or found
            hours += processes * settings.values["steps"] * found.seconds / 3600
    begin = f"cost     {job.card.name}: "
    fix = "run one with --test" if request.pack == 1 else f"no run of --pack {request.pack} has finished yet"
    if example is None:
        return f"{begin}{unit} unknown: {fix}"
    measured = f"{example.seconds:.3g} s a step in {example.folder}"
    if not unknown:
        return f"{begin}about {hours:.3g} {unit} without evaluations and checkpoints, {measured}"
    which = f"{len(unknown)} of {len(numbers)} runs, such as {' '.join(job.overrides[unknown[0]])}"
    return f"{begin}at least {hours:.3g} {unit}, {measured}; unknown for {which}: {fix}"


def measurements(folder: Path, gpu: str, gpus: float) -> list[Measured]:
    """Returns the finished runs on this number of GPUs of a kind, newest first.

    They are looked for below `outputs` and `multirun` here, and beside the folder of the request.

    Args:
        folder: of the request.
        gpu: section of cluster.conf. A run has it if it was submitted with it, or the card's name contains it.
    """
    places = dict.fromkeys(sorted(run_folders(folder), key=lambda place: -(place / RUN).stat().st_mtime))
    fitting = (place for place in places if is_measured(place, run_record_or_empty(place), gpu, gpus))
    found = []
    for place, _ in zip(fitting, range(MOST), strict=False):
        settings, seconds = recorded_settings(place, math.inf), read_run(place).seconds_per_step
        if settings is not None and not math.isnan(seconds):
            found.append(Measured(place, deciding(settings), seconds))
    return found


def run_folders(folder: Path) -> Iterator[Path]:
    """Yields the folders that hold a `run.json`, near a folder and in the usual places."""
    for place, depths in ((Path("outputs"), 3), (Path("multirun"), 4), (folder.parent, 2)):
        for depth in range(1, depths + 1):
            yield from (file.parent for file in place.glob("*/" * depth + RUN))


def is_measured(place: Path, record: RunRecord, gpu: str, gpus: float) -> bool:
    """Returns whether a run has finished enough steps on these GPUs."""
    starts = record.get("starts", [])
    if record.get("status") != "finished" or not starts or starts[-1].get("gpus") != gpus:
        return False
    jobs = submitted(place) or submitted(place.parent)
    named = jobs[-1]["gpu"] == gpu if jobs else gpu.lower() in str(record.get("hardware", {}).get("name")).lower()
    return named and cast("int", record.get("final", {}).get("steps", 0)) >= TEST_STEPS


def deciding(settings: Settings) -> dict[str, Any]:
    """Returns the settings on which the time of a step depends."""
    return {
        key: value
        for key, value in (settings.flat() | settings.choices).items()
        if (key == "optimizer" or key.partition(".")[0] in DECIDES)
        and key not in DOES_NOT
        and not key.endswith("_target_")
    }


def agree(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Returns whether the values of all keys that both have are equal."""
    return all(others[key] == value for key, value in some.items() if key in others)
