"""A composed configuration, as the rules of `config/rules.py` read it: plain values, defaults and choices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from stabletrain.config.arguments import job_overrides, key_of
from stabletrain.config.make import leaves
from stabletrain.parallel.ranks import Ranks, current_ranks


@dataclass(frozen=True)
class Composed:
    """What a rule reads.

    Attributes:
        values: the value of every dotted key, resolved.
        defaults: the same without the user's values.
        choices: the option of each config group.
        typed: the overrides as typed.
        ranks: the processes of the run.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    typed: Sequence[str] = ()
    ranks: Ranks = field(default_factory=Ranks)

    def __getitem__(self, name: str) -> Any:
        """Returns the chosen option of a group, or the value of a key; None if there is neither."""
        return self.choices[name] if name in self.choices else self.values.get(name)

    @cached_property
    def keys(self) -> Sequence[str]:
        """Every key, then those that the command line removed."""
        return [*self.values, *sorted(set(self.defaults) - set(self.values))]

    @cached_property
    def retargeted(self) -> tuple[str, ...]:
        """Groups whose `_target_` was changed, such as `optimizer.`: the new target checks its own arguments."""
        targets = [key for key in self.values if key.endswith("._target_")]
        return tuple(key.removesuffix("_target_") for key in targets if self[key] != self.defaults.get(key))

    def has(self, path: str) -> bool:
        """Returns whether there is a key, or keys below it."""
        return any(key == path or key.startswith(f"{path}.") for key in self.values)

    def overrides_of(self, key: str) -> Iterator[str]:
        """Yields the typed overrides of a key, or of a group and its keys."""
        return (each for each in self.typed if key in (key_of(each), key_of(each).partition(".")[0]))

    def typed_value(self, key: str) -> str:
        """Returns the value that was typed for a key, as it was typed; empty if none was."""
        return next((each.partition("=")[2] for each in self.typed if key_of(each) == key), "")

    def is_by_preset(self, group: str) -> bool:
        """Returns whether `stability` has chosen the option of a group, which was not typed then."""
        preset = self["stability"] not in (None, "none")
        return preset and group in self.choices and group not in map(key_of, self.typed)


def composed_job(tree: Any) -> Composed:
    """Returns the configuration of the current Hydra job, from its plain values."""
    choices = {**HydraConfig.get().runtime.choices}  # a dict: OmegaConf's containers are slow to look things up in
    return Composed(dict(leaves(tree)), defaults(), choices, job_overrides(), current_ranks())


def defaults() -> dict[str, Any]:
    """Composes the options that were chosen without the values that were typed: the default of every key."""
    hydra = HydraConfig.get()
    chosen = [o for o in job_overrides() if key_of(o) in hydra.runtime.choices]
    chosen += [o for o in job_overrides("hydra") if o.startswith("hydra.searchpath=")]  # where own options lie
    return dict(leaves(OmegaConf.to_container(compose(hydra.job.config_name, chosen), resolve=True)))


def without_preset(choices: Mapping[str, str], unfit: Sequence[str]) -> str:
    """Returns what to type instead of the chosen preset: `stability=none`, and the options that it sets.

    Args:
        choices: the chosen option of each group.
        unfit: groups to leave out, because they do nothing with the chosen model.
    """
    hydra = HydraConfig.get()
    typed = [each for each in job_overrides() if key_of(each) in {*choices} - {"stability"}]
    cfg: Any = compose(hydra.job.config_name, [*typed, "stability=none"], return_hydra_config=True)
    usual = cfg.hydra.runtime.choices
    rest = [f"{group}={option}" for group, option in choices.items() if option != usual[group] and group not in unfit]
    return " ".join(["stability=none", *(each for each in rest if not each.startswith("stability="))])
