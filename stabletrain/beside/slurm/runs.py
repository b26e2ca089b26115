"""Expands a command line into runs and checks each of them before anything queues.

Hydra's own parser and sweeper expand a sweep, so the runs are those of `python train.py -m`. Each run is composed and
checked as `train.py` does, so a mistake is reported in seconds instead of after hours in the queue.
"""

import glob
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from stabletrain.beside.slurm.request import Card
from stabletrain.beside.sweep.plan import grid
from stabletrain.cli.own_folder import named_by_time
from stabletrain.config.arguments import SWEEP, Arguments, key_of, merged
from stabletrain.config.checks import check, check_ranks
from stabletrain.config.jobs import explained, hydra
from stabletrain.config.make import leaves, plain
from stabletrain.config.resuming import Settings, check_resume, settings
from stabletrain.data.files import GLOB_CHARACTERS, existing, required
from stabletrain.errors import ConfigError
from stabletrain.machine.torch_builds import DEFAULT_CAPABILITY, LEGACY_PACKAGES
from stabletrain.parallel.ranks import Ranks
from stabletrain.program import conf_folder

BEFORE_AMPERE = {"v100": (7, 0), "t4": (7, 5), "p100": (6, 0)}
"""GPU types without bf16 and TF32, whose compute capability is below 8.0."""

NEEDS_AMPERE = ("bf16", "bf16_params", "tf32", "fp8")
"""Precisions that those GPUs do not support: fp8 computes everything but linear layers in bf16."""

WITHOUT_FP8 = {"a100": (8, 0), "a30": (8, 0), "a10": (8, 6), "a40": (8, 6), "a6000": (8, 6)}
"""GPU types with bf16 but without fp8, which `precision=fp8` emulates: compute capability below 8.9."""


WITH_BF16 = frozenset({*WITHOUT_FP8, "h100", "h200", "b200"})
"""GPU types on which `precision=auto` is bf16."""

NAMED = 3
"""Maximum number of runs that a line names."""


class Runs(NamedTuple):
    """The runs to submit.

    Attributes:
        folder: the run folder, or the sweep's folder.
        by_time: whether that folder is a new one that is named by the time, and not by the user.
        overrides: overrides of each run.
        record: what Hydra writes to `multirun.yaml` for a sweep; None for a single run.
        notes: lines to print before submitting.
        left_out: for each GPU type, the numbers of the runs that are not queued on it.
        settings: of each run.
    """

    folder: Path
    by_time: bool
    overrides: list[list[str]]
    record: DictConfig | None
    notes: list[str]
    left_out: Mapping[str, frozenset[int]] = MappingProxyType({})
    settings: Sequence[Settings] = ()


class Checked(NamedTuple):
    """A run whose configuration is valid: its `hydra.run`, lines of advice, and its settings."""

    run: DictConfig
    notes: list[str]
    settings: Settings


TEST_STEPS = 20
"""Number of steps of `--test`, which is enough to measure the time of a step."""

TEST = (f"steps={TEST_STEPS}", "log_every=1", f"eval_every={TEST_STEPS}", "eval_batches=1", "wandb=disabled")
"""Overrides of `--test`: every step is logged, and the evaluation at the end is short."""

SHORTER = ("warmup.steps", "data.length_warmup")
"""Keys that must be below the number of steps."""


class Unsupported(ConfigError):
    """A GPU type cannot do a run."""


def expand(
    arguments: Arguments, cards: Mapping[str, int], resumed: Sequence[Path] = (), *, skip_unsupported: bool = False
) -> Runs:
    """Expands a command line into runs and checks that each composes and can run on the GPUs.

    Args:
        arguments: the arguments of `train.py`, without `resume`.
        cards: processes per run, by GPU type.
        resumed: the folders of the runs that are continued: the run folder, or the sweep's, for each GPU type.
        skip_unsupported: whether runs of a sweep that a GPU type cannot do are left out on it.

    Raises:
        ConfigError: a run is invalid, or changes what a resume cannot; the message says what is wrong, and in a sweep,
            with which run.
    """
    with explained(arguments, conf_folder()), hydra(arguments, conf_folder()) as name:
        if not arguments.sweeps:
            run, notes, own = checked_run(name, arguments.overrides, cards, resumed)
            return Runs(Path(run.dir), named_by_time(run), [arguments.overrides], None, notes, settings=[own])
        return sweep_runs(name, arguments, cards, resumed, skip_unsupported)


def sweep_runs(
    name: str, arguments: Arguments, cards: Mapping[str, int], resumed: Sequence[Path], skip_unsupported: bool
) -> Runs:
    """Expands and checks the runs of a sweep."""
    found = grid(name, arguments.overrides)
    sweep, runs = found.cfg, found.runs
    if runs is None:
        raise ConfigError(
            f"hydra/sweeper={found.sweeper} chooses each run from the results of earlier ones, but a job array needs "
            "all of them at once: use Hydra's basic sweeper"
        )
    hydras = [override for override in arguments.overrides if key_of(override).startswith("hydra")]
    if "hydra.sweep.subdir" in map(key_of, hydras):
        raise ConfigError("hydra.sweep.subdir: the tasks of an array, and so their folders, are numbered: leave it out")
    hydras = [override for override in hydras if not key_of(override).startswith("hydra.sweep")]
    runs = [[*hydras, *run] for run in runs]
    said: dict[str, None] = {}
    unsupported: dict[str, list[int]] = {card: [] for card in cards}
    found_settings: dict[int, Settings] = {}
    for number, run in enumerate(runs):
        each = [{card: count} for card, count in cards.items()] if skip_unsupported else [cards]
        for some in each:
            try:
                with explained(arguments, conf_folder()):
                    here = [folder / str(number) for folder in resumed]
                    _, notes, found_settings[number] = checked_run(name, run, some, here)
            except Unsupported as error:
                if not skip_unsupported:
                    more = "; --skip-unsupported leaves out such runs and queues the others"
                    raise ConfigError(f"run {number} of {len(runs)} ({' '.join(run)}): {error}{more}") from error
                unsupported[next(iter(some))].append(number)
            except ConfigError as error:
                raise ConfigError(f"run {number} of {len(runs)} ({' '.join(run)}): {error}") from error
            else:
                said |= dict.fromkeys(notes)
    twice = {card: same_runs(card, runs) for card in cards}
    for card, numbers in unsupported.items():
        for what, found in (("which it cannot do", numbers), ("equal to others there", twice[card])):
            said |= dict.fromkeys(left_out_note(card, what, found, runs))
    left_out = {card: frozenset([*unsupported[card], *twice[card]]) for card in cards}
    if all(len(left_out[card]) == len(runs) for card in cards):
        raise ConfigError(f"--gpu {','.join(cards)}: none of the {len(runs)} runs can be done there")
    place = sweep.hydra.sweep
    of_each = [found_settings.get(number, Settings({}, {})) for number in range(len(runs))]
    return Runs(Path(place.dir), named_by_time(place), runs, sweep, list(said), left_out, of_each)


def trial_arguments(arguments: Arguments, runs: Runs, number: int) -> Arguments:
    """Returns the command line that tries a run of a request: `TEST_STEPS` steps in a folder of its own."""
    values = runs.settings[number].flat()
    lower = [f"{key}={TEST_STEPS // 2}" for key in SHORTER if (values.get(key) or 0) >= TEST_STEPS]
    own = [each for each in runs.overrides[number] if not key_of(each).startswith(("hydra.run", "hydra.sweep"))]
    return merged(
        Arguments([each for each in arguments.options if each not in SWEEP], own), Arguments([], [*TEST, *lower])
    )


def same_runs(card: str, runs: Sequence[Sequence[str]]) -> list[int]:
    """Returns the runs with `precision=auto` beside which another one names the precision that it chooses there."""
    chosen = "precision=fp16" if card in BEFORE_AMPERE else "precision=bf16" if card in WITH_BF16 else None
    known = {tuple(run) for run in runs}
    named = [tuple(str(chosen) if word == "precision=auto" else word for word in run) for run in runs]
    return [number for number, run in enumerate(runs) if "precision=auto" in run and chosen and named[number] in known]


def left_out_note(card: str, what: str, numbers: Sequence[int], runs: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line that names runs that are not queued; none if there are none."""
    if not numbers:
        return []
    named = [f"{number} ({' '.join(runs[number])})" for number in numbers[:NAMED]]
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return [f"note     {card}: {len(numbers)} of {len(runs)} runs left out, {what}: {', '.join(named)}{more}"]


def checked_run(name: str, overrides: Sequence[str], cards: Mapping[str, int], resumed: Sequence[Path]) -> Checked:
    """Composes one run's configuration, and applies the checks of `train.py`.

    Args:
        name: the configuration's name.
        overrides: of the run.
        cards: processes per run, by GPU type.
        resumed: the folders in which it is continued; some may not hold a run yet.

    Raises:
        ConfigError: the configuration is invalid, or unsupported on one of the GPU types.
    """
    cfg: Any = compose(name, [*overrides], return_hydra_config=True)
    # `check` reads the group choices from the global HydraConfig.
    HydraConfig.instance().set_config(cfg)
    choices = cfg.hydra.runtime.choices
    mine: Any = cfg.copy()
    with open_dict(mine):
        del mine["hydra"]
    mine.resume = "auto" if resumed else mine.resume
    own = settings(mine, choices)
    for folder in resumed:
        check_resume(mine.resume, own, folder, unfinished=False)
    check(mine)
    precision, values = choices.get("precision"), plain(mine)
    for card, processes in cards.items():
        check_processes(values, choices.get("parallel"), card, processes)
        if card in BEFORE_AMPERE and precision in NEEDS_AMPERE:
            raise Unsupported(
                f"precision={precision} on --gpu {card}, which has neither bf16 nor TF32: use stability=v100 for a GPT "
                "(fp16, QK-norm, z-loss), precision=fp16, or precision=auto, which takes what each card has"
            )
    notes = data_notes(choices["data"], values["data"])
    return Checked(cfg.hydra.run, [*notes, *advice(choices, values["model"].get("modality"), cards)], own)


def data_notes(option: str, data: Mapping[str, Any]) -> list[str]:
    """Looks at the data's path, where it must lie on this machine; else returns a line that says so.

    A path of which not even the folder exists here may lie on the nodes alone, as may the files of a glob.

    Raises:
        ConfigError: the path is missing, or does not exist although its folder does.
    """
    if "path" not in data:
        return []
    path = required(data["path"], f"data={option}", "a file or a folder")
    place = Path(path).expanduser()
    elsewhere = place.is_absolute() and place.parent != Path(place.anchor) and not place.parent.is_dir()
    if not GLOB_CHARACTERS & set(path) and not elsewhere:
        existing(path, "data.path")
    elif not place.exists() and not any(glob.iglob(str(place))):
        return [f"note     data.path={path} was not found here: it must be there on the nodes"]
    return []


def check_processes(values: Mapping[str, Any], kind: str, card: str, processes: int) -> None:
    """Checks that the run can be split over this number of processes.

    Raises:
        ConfigError: it cannot; the message names the options that set the number of processes.
    """
    asked = f"--gpu {card} with {processes} process{'es' if processes > 1 else ''} (--nodes x --gpus-per-node)"
    try:
        check_ranks(dict(leaves(values)), Ranks(world_size=processes))
    except ConfigError as error:
        raise ConfigError(f"{asked}: {error}") from None
    if processes == 1 and kind in ("ddp", "fsdp", "hsdp"):
        raise ConfigError(
            f"{asked}: parallel={kind} needs several processes: request more with --nodes or --gpus-per-node, or use "
            "parallel=auto"
        )


def advice(choices: Mapping[str, str], modality: str, cards: Iterable[str]) -> list[str]:
    """Returns lines to print before the run is queued."""
    old = [card for card in cards if card in BEFORE_AMPERE]
    fp16 = choices.get("precision") in ("auto", "fp16")
    if old and modality == "tokens" and choices.get("stability") == "none" and fp16:
        return [f"note     {', '.join(old)} trains in fp16: stability=v100 is the preset that keeps a GPT stable in it"]
    if choices.get("precision") == "fp8":
        return [
            f"note     {card} has no fp8 (compute capability {WITHOUT_FP8[card][0]}.{WITHOUT_FP8[card][1]}): it is "
            "emulated, slower than precision=bf16"
            for card in cards
            if card in WITHOUT_FP8
        ]
    return []


def environment_notes(cards: Iterable[Card]) -> list[str]:
    """Returns which GPU types need another build of PyTorch, if cluster.conf sets no environment for them."""
    found = []
    for card in cards:
        major, minor = BEFORE_AMPERE.get(card.name, DEFAULT_CAPABILITY)
        if (major, minor) < DEFAULT_CAPABILITY and not card.own_environment:
            found.append(
                f"note     {card.name} has compute capability {major}.{minor}, which PyTorch's default builds no "
                f"longer support: make an environment with pip install {LEGACY_PACKAGES}, and activate it in the "
                f"section [{card.name}] of cluster.conf"
            )
    return found
