"""Configuration changes of a resumed run. Any key may change except the data; changes are recorded and shown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from stabletrain.config.make import leaves, plain
from stabletrain.tracking.run_folder import RunFolder, check_same_data
from stabletrain.trainer import roles

NOT_A_CHANGE = ("resume", "device", "report")
"""Configuration keys that may differ between the parts of a resumed run without changing what it computes."""


def option_fingerprint(cfg: DictConfig, choices: Mapping[str, str]) -> dict[str, Any]:
    """Returns the data option and its keys: the fingerprint of a user's data set that has no `fingerprint()`."""
    return {"name": choices["data"], "keys": plain(cfg.data)}


def check_data_of_checkpoint(resume: str, fingerprint: Mapping[str, Any]) -> None:
    """Checks that a checkpoint from another run folder was trained on the same data.

    Raises:
        ConfigError: the run that wrote it recorded another fingerprint.
    """
    if resume not in ("auto", "none"):
        other = Path(resume).absolute().parent.parent
        check_same_data(RunFolder(other).read().get("data", {}), fingerprint, other)


def record_changes(
    cfg: DictConfig,
    choices: Mapping[str, str],
    step: int,
    folder: Path,
    run_folder: roles.RunFolder,
    tracker: roles.Tracker,
) -> None:
    """Records and shows the options and keys that a resumed run changes in its configuration."""
    file = folder / ".hydra" / "config.yaml"
    if cfg.resume != "auto" or not step or not file.is_file():
        return
    first = OmegaConf.load(file.with_name("hydra.yaml")).hydra.runtime.choices
    before = dict(leaves(OmegaConf.to_container(OmegaConf.load(file), resolve=True))) | dict(first)
    for change in RunFolder(folder).read().get("changes", []):
        before |= {key: value for key, (_, value) in change["keys"].items()}
    now = dict(leaves(plain(cfg))) | dict(choices)
    options = {group for group in choices if before.get(group, choices[group]) != choices[group]}
    # Ignore `_target_` and keys that only one configuration has: these differ between versions of stabletrain. But if
    # an option was changed, keep all its keys, because each option has its own.
    keys = {
        key: [before.get(key), value]
        for key, value in sorted(now.items())
        if (before[key] != value if key in before else key.partition(".")[0] in options)
        and key not in NOT_A_CHANGE
        and not key.endswith("_target_")
    }
    if not keys:
        return
    run_folder.change(step, keys)
    tracker.event("changed", step, keys=keys)
    shown = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in keys.items() if key in before)
    longer = "; the learning-rate schedule now ends at the new last step" if "steps" in keys else ""
    tracker.note(f"changed  {shown}{longer}")
