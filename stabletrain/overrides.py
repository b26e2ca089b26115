"""Overrides on a recorded configuration: a fix to try on one step, in the words of the command line.

Only what forward and backward depend on may be tried; what else a fix may change, a step cannot show.
"""

import contextlib
import difflib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stabletrain.arguments import Arguments, key_of
from stabletrain.config import CHOSEN_PARTS, check_keys, leaves, plain
from stabletrain.errors import ConfigError
from stabletrain.mistakes import explain

CONF = Path(__file__).parents[1] / "conf"

ACTING = ("model", "precision", "zloss", "qknorm", "softcap", "determinism", "label_smoothing", "grad_accum_steps")
"""What forward and backward depend on, besides weights and batch; these may be overridden."""

PRESETS = ("stability",)
"""Groups that only choose in others."""


def changed(
    recorded: DictConfig, choices: Mapping[str, str], overrides: Sequence[str], config_dir: Path | None
) -> DictConfig:
    """The recorded configuration with overrides.

    A group's option is taken from the configuration folders; all that is not overridden stays as it was recorded, so
    that a run is replayed whatever has become of its own YAML.

    Raises:
        ConfigError: one cannot be read, is unknown, or has no part in a step's forward and backward.
    """
    everything = parsed(overrides, config_dir)
    groups = [override for override in overrides if key_of(override) in choices]
    for override in overrides:
        root = key_of(override).partition(".")[0]
        if root not in (*ACTING, *PRESETS, "device") and root in [*choices, *recorded]:
            raise ConfigError(
                f"{override}: it has no part in one step's forward and backward, so a replay cannot try it; train with "
                f"it, or try one of {', '.join((*ACTING, *PRESETS))}"
            )
        if key_of(override) == "model":
            raise ConfigError(f"{override}: the incident's weights are of model={choices['model']}: change its keys")
    cfg = DictConfig(OmegaConf.to_container(recorded))
    taken = taken_by(groups, config_dir) if groups else {}
    for group, node in taken.items():
        if group in CHOSEN_PARTS and group not in cfg.model and group != "qkclip":
            raise ConfigError(f"{group} does nothing with model={choices['model']}, which has no attention: leave it")
        cfg[group] = node
        if group in CHOSEN_PARTS and group in cfg.model:
            cfg.model[group] = node
    before = dict(leaves(plain(cfg)))
    for key, value in ((key, value) for key, value in everything if key not in choices):
        if key not in before:
            group = f"{key.partition('.')[0]}."
            inside = [name for name in before if name.startswith(group) and not name.endswith("_")]
            hint = difflib.get_close_matches(key, inside if "." in key else [*before, *choices], n=1)
            raise ConfigError(f"{key}={value}: there is no such key{f'; did you mean {hint[0]}?' if hint else ''}")
        OmegaConf.update(cfg, key, value, merge=False)
        part, _, rest = key.partition(".")
        if part in CHOSEN_PARTS and part in cfg.model:
            OmegaConf.update(cfg.model, f"{part}.{rest}", value, merge=False)
    check_keys(dict(leaves(plain(cfg))), before)
    if plain(cfg) == plain(recorded):
        raise ConfigError(f"{' '.join(overrides)}: the run was set to that already, so it changes nothing")
    return cfg


def taken_by(groups: Sequence[str], config_dir: Path | None) -> dict[str, Any]:
    """The options that overrides of groups choose, directly or as a preset, of the groups that act in a step."""
    if not CONF.is_dir():
        raise ConfigError(
            f"{CONF} is missing, where the groups' options are: install from a checkout, pip install -e ."
        )
    search = [] if config_dir is None else [f"hydra.searchpath=[file://{config_dir.resolve()}]"]
    with worded(groups, config_dir), initialize_config_dir(str(CONF), version_base="1.3"):
        first, then = (compose("config", [*search, *more], return_hydra_config=True) for more in ([], groups))
        old, new = first.hydra.runtime.choices, then.hydra.runtime.choices
        typed = {key_of(override) for override in groups}
        chosen = [group for group in ACTING if group in new and (group in typed or new[group] != old.get(group))]
        return {group: OmegaConf.to_container(then[group], resolve=False) for group in chosen}


def parsed(values: Sequence[str], config_dir: Path | None) -> list[tuple[str, Any]]:
    """`key=value` as Hydra reads it."""
    with worded(values, config_dir):
        found = OverridesParser.create().parse_overrides([*values])
        for override in found:
            if override.is_sweep_override() or override.is_delete():
                raise ConfigError(f"{override.input_line}: a replay tries one value: write key=value")
        return [(override.key_or_group, override.value()) for override in found]


@contextlib.contextmanager
def worded(overrides: Sequence[str], config_dir: Path | None) -> Generator[None, None, None]:
    """Hydra's complaints become messages; what it keeps for the process is put away."""
    GlobalHydra.instance().clear()
    options = [] if config_dir is None else ["--config-dir", str(config_dir)]
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        message = explain(error, CONF, Arguments(options, list(overrides)))
        raise ConfigError(message or str(error)) from error
    finally:
        GlobalHydra.instance().clear()
