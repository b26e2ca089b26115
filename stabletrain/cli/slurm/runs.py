"""The runs that a command line asks for, expanded and checked before anything queues.

A sweep is expanded by Hydra's own parser and sweeper, so that it is what `python train.py -m` would run; each run is
composed and checked as `train.py` will do it, so that a mistake costs seconds and not a place in the queue.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from stabletrain.cli.sweep.plan import grid, hydra
from stabletrain.config.arguments import Arguments, key_of
from stabletrain.config.checks import check, check_ranks
from stabletrain.config.error_texts import explain
from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks

CONF = Path(__file__).parents[3] / "conf"

BEFORE_AMPERE = ("v100", "t4", "p100")
"""Cards that have neither bf16 nor TF32: compute capability below 8.0."""

NEEDS_AMPERE = ("bf16", "bf16_params", "tf32")
"""Precisions that they cannot have."""


class Runs(NamedTuple):
    """What is to be run.

    Attributes:
        folder: the run's, or of a sweep the one above its runs.
        overrides: of each run.
        record: of a sweep, what Hydra keeps in `multirun.yaml`; None without one.
        notes: lines for the person who submits.
    """

    folder: Path
    overrides: list[list[str]]
    record: DictConfig | None
    notes: list[str]


def expand(arguments: Arguments, cards: Mapping[str, int]) -> Runs:
    """The runs of a command line, each of them known to compose and to be possible on the cards.

    Args:
        arguments: what `train.py` would be given, without `resume`.
        cards: to run on, and how many processes a run has on each.

    Raises:
        ConfigError: naming the run, where there are several, and what is wrong with it.
    """
    try:
        with hydra(arguments, CONF) as name:
            if not arguments.sweeps:
                cfg: Any = checked(name, arguments.overrides, cards)
                return Runs(Path(cfg.hydra.run.dir), [arguments.overrides], None, notes(cfg, cards))
            return swept(name, arguments, cards)
    except ConfigError:
        raise
    except Exception as error:
        if (message := explain(error, CONF, arguments)) is None:
            raise
        raise ConfigError(message) from error


def swept(name: str, arguments: Arguments, cards: Mapping[str, int]) -> Runs:
    """The runs of a sweep."""
    found = grid(name, arguments.overrides)
    sweep, runs = found.cfg, found.runs
    if runs is None:
        raise ConfigError(
            f"hydra/sweeper={found.sweeper} chooses each run by how the one before it ended: a job array needs all of "
            "them at once, so use Hydra's basic sweeper"
        )
    hydras = [override for override in arguments.overrides if key_of(override).startswith("hydra")]
    if "hydra.sweep.subdir" in map(key_of, hydras):
        raise ConfigError("hydra.sweep.subdir: the tasks of an array, and so their folders, are numbered: leave it out")
    hydras = [override for override in hydras if not key_of(override).startswith("hydra.sweep")]
    runs = [[*hydras, *run] for run in runs]
    said: dict[str, None] = {}
    for number, run in enumerate(runs):
        try:
            cfg = checked(name, run, cards)
        except Exception as error:
            message = str(error) if isinstance(error, ConfigError) else explain(error, CONF, arguments)
            if message is None:
                raise
            raise ConfigError(f"run {number} of {len(runs)} ({' '.join(run)}): {message}") from error
        said |= dict.fromkeys(notes(cfg, cards))
    return Runs(Path(sweep.hydra.sweep.dir), runs, sweep, list(said))


def checked(name: str, overrides: Sequence[str], cards: Mapping[str, int]) -> DictConfig:
    """One run's configuration with Hydra's part, after the checks that `train.py` makes.

    Raises:
        ConfigError: it cannot work, anywhere or on one of the cards.
    """
    cfg: Any = compose(name, [*overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    mine: Any = cfg.copy()
    with open_dict(mine):
        del mine["hydra"]
    check(mine)
    precision = cfg.hydra.runtime.choices.get("precision")
    for card, processes in cards.items():
        check_processes(cfg, card, processes)
        if card in BEFORE_AMPERE and precision in NEEDS_AMPERE:
            raise ConfigError(
                f"precision={precision} on --gpu {card}, which has neither bf16 nor TF32: use stability=v100 for a GPT "
                "(fp16, QK-norm, z-loss), precision=fp16, or precision=auto, which takes what each card has"
            )
    return cfg


def check_processes(cfg: Any, card: str, processes: int) -> None:
    """Refuses what so many processes cannot train: what the nodes would refuse after hours in the queue.

    Raises:
        ConfigError: names the numbers, and the options that set how many processes there are.
    """
    asked = f"--gpu {card} with {processes} process{'es' if processes > 1 else ''} (--nodes x --gpus-per-node)"
    try:
        check_ranks(cfg, Ranks(world_size=processes))
    except ConfigError as error:
        raise ConfigError(f"{asked}: {error}") from None
    kind = cfg.hydra.runtime.choices.get("parallel")
    if processes == 1 and kind in ("ddp", "fsdp"):
        raise ConfigError(
            f"{asked}: parallel={kind} is for several: ask for more with --nodes or --gpus-per-node, or use "
            "parallel=auto"
        )


def notes(cfg: Any, cards: Iterable[str]) -> list[str]:
    """What is worth knowing before the run is queued."""
    choices = cfg.hydra.runtime.choices
    old = [card for card in cards if card in BEFORE_AMPERE]
    gpt = cfg.model.get("modality") == "tokens"
    if old and gpt and choices.get("stability") == "none" and choices.get("precision") in ("auto", "fp16"):
        return [f"note     {', '.join(old)} trains in fp16: stability=v100 is the preset that keeps a GPT stable in it"]
    return []
