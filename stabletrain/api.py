"""What `import stabletrain` offers for runs: `train` one, and `load` its model.

result = stabletrain.train(["precision=bf16", "steps=200"])    # as `stabletrain train precision=bf16 steps=200`
model = stabletrain.load(result.folder)                        # an nn.Module in eval mode
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from stabletrain.cli.failures import record_failure
from stabletrain.cli.train import run_one
from stabletrain.config.arguments import INFORMATION_OPTIONS, SWEEP, check_folders, parse_arguments, resolve_resume
from stabletrain.config.error_texts import unknown_option
from stabletrain.config.jobs import run_as_job
from stabletrain.errors import ConfigError, NotSaved, TrainingHalted
from stabletrain.machine.signals import NoStopRequest
from stabletrain.parallel.ranks import current_ranks
from stabletrain.program import called, conf_folder
from stabletrain.stored.trusted import OPTION, accepting
from stabletrain.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: `finished`, or `halted` if the guard gave up.
        metrics: the last metrics by name, such as `val/loss` in nats; those of `run.json`.
        folder: the run folder, absolute.
        reason: why the guard halted the run, or what is missing in a finished one; None if there is nothing to say.
    """

    status: str
    metrics: Mapping[str, float]
    folder: Path
    reason: str | None = None


def train(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> Result:
    """Trains one run in this process, with the same result as `stabletrain train <overrides>`.

    May be called several times, and in a notebook. Leaves `sys.argv` and signal handlers as they are, and never exits:
    Ctrl-C raises KeyboardInterrupt within a step, so the last checkpoint is kept, and no further one is written.

    Args:
        overrides: `group=option` and `key=value`, as on the command line. Without `hydra.run.dir` the run folder is
            `outputs/<date>/<time>` in the working folder. `resume=auto` continues the newest run of these overrides.
            `--trust` among them accepts the code that the record of a resumed run from elsewhere names.
        config_dir: a folder with config groups of your own, as `--config-dir`.

    Raises:
        ConfigError: the configuration cannot work, or the call is in a process that torchrun has started.
        Exception: any error of your own model or data; `run.json` in the run folder then says `failed`.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r} is one string: write a list, [{overrides!r}]")
    if current_ranks().launched:
        raise ConfigError("stabletrain.train trains in one process: for several ranks, torchrun -m stabletrain train")
    trusts = OPTION in overrides
    typed = [str(each) for each in overrides if each != OPTION]
    typed += [] if config_dir is None else ["--config-dir", str(config_dir)]
    conf = conf_folder()
    if (message := unknown_option(typed, conf)) is not None:
        raise ConfigError(message)
    arguments = parse_arguments(typed)
    if unfit := (SWEEP | INFORMATION_OPTIONS) & {option.partition("=")[0] for option in arguments.options}:
        raise ConfigError(
            f"{min(unfit)}: stabletrain.train trains one run: call it in a loop, or use stabletrain train"
        )
    check_folders(arguments)
    with accepting(trusts):
        resolved = resolve_resume(arguments)
    with accepting(trusts), called(typed, [*resolved.options, *resolved.overrides]):
        folder = run_as_job(resolved, conf, train_job)
    record = RunFolder(folder).read()
    return Result(record["status"], record["final"], folder, record["reason"])


def train_job(cfg: DictConfig, folder: Path) -> None:
    """Trains a run, as a job of Hydra, and records its failure."""
    with suppress(TrainingHalted, NotSaved):  # results, which the record has
        try:
            run_one(cfg, folder, tell=lambda line: None, signals=NoStopRequest())
        except Exception as error:
            record_failure(folder, error)
            raise


def load(
    path: str | Path, *, best: bool = False, averaged: bool = False, device: str = "cpu", trust: bool = False
) -> "nn.Module":
    """Returns the trained model of a run, in eval mode, with its parameters in fp32.

    Args:
        path: a run folder, which stands for its newest healthy checkpoint; or one checkpoint,
            `<run>/checkpoints/step-...`. The checksums of all its files are verified, and nothing is unpickled. Or a
            folder that `stabletrain export --to safetensors` has written.
        best: take the healthy checkpoint with the lowest validation loss instead of the newest.
        averaged: take the averaged weights of a run with `averaging`.
        device: `cpu`, `cuda`, `cuda:N`, or `auto` for what training would use.
        trust: whether to run the code that the configuration of a folder from elsewhere names, as `--trust` does.

    Raises:
        ConfigError: there is no usable checkpoint or configuration, the model's code does not fit the checkpoint any
            more, or there is no such device.
    """
    from stabletrain.trainer.saved import load_model

    with accepting(trust):
        return load_model(Path(path), best=best, averaged=averaged, device=device)
