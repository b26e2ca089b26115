"""What the user names: a run, one of its incidents, or one of its checkpoints."""

from dataclasses import dataclass
from pathlib import Path

from stabletrain.checkpoint.folder import NAME
from stabletrain.checkpoint.reader import MANIFEST
from stabletrain.errors import ConfigError
from stabletrain.stored.run_files import DIAGNOSIS, RUN


@dataclass(frozen=True)
class Target:
    """What to try fixes for.

    Attributes:
        run: the run folder.
        incident: folder of the named incident; None if none was named.
        checkpoint: step of the named checkpoint; None if none was named.
    """

    run: Path
    incident: Path | None = None
    checkpoint: int | None = None


def find_target(path: Path) -> Target:
    """Returns what a path names.

    Raises:
        ConfigError: it names neither a run folder, nor an incident or a checkpoint inside one.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {what}; fix: name a run folder, such as outputs/<date>/<time>, or an incident in it")
    named = NAME.fullmatch(path.name)
    if (path / DIAGNOSIS).exists() or (named and path.parent.name == "incidents"):
        return Target(inside_run(path, "incident"), incident=path)
    if (path / MANIFEST).exists() or (named and path.parent.name == "checkpoints"):
        if not named:
            raise ConfigError(f"{path}: a checkpoint's folder is named step-<number>; fix: give it its name back")
        return Target(inside_run(path, "checkpoint"), checkpoint=int(named[1]))
    if (path / RUN).exists():
        return Target(path)
    raise ConfigError(
        f"{path} is neither a run folder, an incident nor a checkpoint: it has no {RUN}, {DIAGNOSIS} or {MANIFEST}; "
        "fix: name a run folder, such as outputs/<date>/<time> or multirun/<date>/<time>/<number>"
    )


def inside_run(path: Path, what: str) -> Path:
    """Returns the run folder of an incident or a checkpoint; raises ConfigError if it does not lie in one."""
    run = path.absolute().parent.parent
    if not (run / RUN).exists():
        raise ConfigError(
            f"{path}: this {what} does not lie in a run folder ({run} has no {RUN}), so the run cannot be repeated; "
            f"fix: name the {what} where the run wrote it"
        )
    return path.parent.parent if len(path.parts) > 2 else run
