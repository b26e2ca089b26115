"""The command line around a run: where `resume` continues, what an error says, and with which code the process ends.

| code | meaning |
|---|---|
| 0 | finished |
| 1 | failed: an error of the program or the machine, with its traceback |
| 2 | refused: the configuration cannot work |
| 3 | halted by the guard |
| 75 | interrupted by a signal, saved; `resume=auto` continues |
| 130 | interrupted twice: stopped at once |

In a sweep each run ends with its own code, a failing run does not stop the others, and the sweep ends with the code of
the first run that did not finish.
"""

import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from stabletrain.config import check, explain
from stabletrain.errors import ConfigError, Interrupted, StabletrainError

RUNS: list[tuple[Path, list[str]]] = []
"""Folder and overrides of each run of this process."""


class RunFailed(Exception):
    """A run of a sweep did not finish, and has said why; raised so that Hydra goes on with the others."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def launch(main: Callable[[], Any], config_dir: Path) -> int:
    """Runs `main`, Hydra's decorated entry point, over `sys.argv`; returns the process's exit code.

    Args:
        main: composes the configuration and runs the jobs.
        config_dir: the project's `conf/`.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come here, and are worded here
    typed = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))  # Hydra wants it first
    try:
        sys.argv[1:] = continued(typed)
        main()
    except RunFailed as failure:
        return failure.exit_code
    except KeyboardInterrupt:
        print("\nstabletrain: stopped at once; the last checkpoint is kept", file=sys.stderr)
        return 130
    except Exception as error:
        message = explain(error, config_dir, typed)
        if message is None:
            traceback.print_exc()
            return 1
        return refuse(message)
    finally:
        if len(RUNS) > 1:
            print(sweep_summary(), flush=True)
    return 0


def run_job(cfg: DictConfig) -> float | None:
    """One run, from a composed configuration to its end; returns the last validation loss in nats.

    Raises:
        SystemExit: with the run's exit code, where it did not finish (single runs, and an interrupted sweep).
        RunFailed: the same in a sweep.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    RUNS.append((folder, list(hydra.overrides.task)))
    try:
        check(cfg)
        from stabletrain.build import build  # torch is loaded here, after the checks that do without
        from stabletrain.loop import run

        job = build(cfg, folder)
        val_loss = run(job).val.get("val/loss")
        job.tracker.note(job.closing())
        return val_loss
    except Exception as error:
        if isinstance(error, StabletrainError):
            print(f"stabletrain: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        if isinstance(error, Interrupted):
            print(f"continue  {again()}", file=sys.stderr)
        record_refusal(folder, error)
        code = getattr(error, "exit_code", 1)
        if hydra.mode == RunMode.MULTIRUN and not isinstance(error, Interrupted):
            raise RunFailed(code) from None
        sys.exit(code)


def sweep_summary() -> str:
    """How each run of a sweep ended, a line each, with what was varied between them."""
    common = set.intersection(*(set(overrides) for _, overrides in RUNS))
    lines = []
    for folder, overrides in RUNS:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        loss = record.get("final", {}).get("val/loss")
        result = f"val loss {loss:.3f}" if isinstance(loss, float) else f"val loss {loss or '-'}"
        varied = " ".join(override for override in overrides if override not in common)
        lines.append((record["status"], f"{record['status']:<9} {result:<14} {varied:<40} {folder.name}"))
    finished = sum(status == "finished" for status, _ in lines)
    head = f"sweep    {len(lines)} runs, {finished} finished, in {RUNS[0][0].parent}"
    return "\n".join([head, *(f"         {line}" for _, line in lines)])


def record_refusal(folder: Path, error: Exception) -> None:
    """Leaves a `run.json` that says why, where the run ended before it had one."""
    if not (folder / "run.json").exists():
        reason = str(error) or type(error).__name__
        (folder / "run.json").write_text(
            json.dumps({"id": None, "status": "failed", "reason": reason}, indent=2) + "\n"
        )


def again() -> str:
    """The command that was typed, with `resume=auto`."""
    typed = [argument for argument in sys.orig_argv[1:] if not argument.startswith("resume=")]
    return shlex.join(["python", *typed, "resume=auto"])


def continued(typed: list[str]) -> list[str]:
    """The command line with `resume` resolved to the folder it continues in; others are returned as they are.

    `resume=auto` looks for the newest run (or, with `-m`, sweep) of the same overrides. `resume=<run folder>` continues
    there with that run's recorded overrides, which those typed now may change. `resume=<checkpoint folder>` does the
    same in a new run folder.
    """
    wanted = [argument.partition("=")[2] for argument in typed if argument.startswith("resume=")]
    if not wanted or wanted[-1] in ("none", ""):
        return typed
    sweep = bool({"-m", "--multirun"} & set(typed))
    key = "hydra.sweep.dir" if sweep else "hydra.run.dir"
    if wanted[-1] == "auto":
        if any(argument.startswith(f"{key}=") for argument in typed):
            return typed
        folder = newest_of_same(typed, sweep)
        if folder is None:
            print("resume=auto: no earlier run of this command here; a new one starts", file=sys.stderr)
            return typed
        return [*typed, f"{key}='{folder}'"]
    path = Path(wanted[-1])
    if (path / "manifest.json").exists():
        return [*recorded(path.parent.parent), *typed]
    if (path / "checkpoints").is_dir():
        rest = [argument for argument in typed if not argument.startswith("resume=")]
        return [*recorded(path), *rest, "resume=auto", f"hydra.run.dir='{path}'"]
    raise SystemExit(
        refuse(f"resume={path} is neither a run folder nor a checkpoint: use auto, none, or outputs/<date>/<time>")
    )


def refuse(message: str) -> int:
    """Prints a configuration error; returns its exit code."""
    print(f"stabletrain: {message}", file=sys.stderr)
    return ConfigError.exit_code


def recorded(folder: Path) -> list[str]:
    """The overrides a run was started with, without `resume`; none where they are not recorded."""
    file = folder / ".hydra" / "overrides.yaml"
    overrides = [str(override) for override in OmegaConf.load(file)] if file.exists() else []
    return [override for override in overrides if not override.startswith("resume=")]


def newest_of_same(typed: list[str], sweep: bool) -> Path | None:
    """The newest run folder (or sweep folder) below the current one that was started with the same overrides."""
    same = sorted(o for o in typed if "=" in o and not o.startswith(("-", "resume=", "hydra.")))
    if sweep:
        for file in sorted(Path("multirun").glob("*/*/multirun.yaml"), reverse=True):
            tasks = [str(override) for override in OmegaConf.select(OmegaConf.load(file), "hydra.overrides.task")]
            if sorted(o for o in tasks if not o.startswith("resume=")) == same:
                return file.parent
        return None
    for file in sorted(Path("outputs").glob("*/*/.hydra/overrides.yaml"), reverse=True):
        folder = file.parent.parent
        if sorted(recorded(folder)) == same and (folder / "checkpoints").is_dir():
            return folder
    return None
