"""Several faults in one run: a list of faults, each with its kind and the keys of that kind."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import reduce
from typing import Any

from stabletrain.beside.faults.in_data import Empty, Ignored, Input, Label, Poison
from stabletrain.beside.faults.in_io import DiskFull, Kill, LostWandb
from stabletrain.beside.faults.in_state import BitFlip, Update
from stabletrain.beside.faults.in_step import Activation, Gradient, LearningRate
from stabletrain.beside.faults.planned import NoFaults, Planned
from stabletrain.errors import ConfigError, did_you_mean
from stabletrain.records import TrainState

KINDS: dict[str, type[Planned]] = {
    "input": Input,
    "label": Label,
    "ignored": Ignored,
    "empty": Empty,
    "poison": Poison,
    "activation": Activation,
    "gradient": Gradient,
    "learning_rate": LearningRate,
    "bitflip": BitFlip,
    "optimizer": Update,
    "disk_full": DiskFull,
    "kill": Kill,
    "wandb": LostWandb,
}
"""Kinds of faults by the names of their options."""


class Plan(NoFaults):
    """Several faults.

    Args:
        faults: mappings with `kind`, `at`, and other keys of that kind, such as
            `{kind: gradient, at: [30], value: nan}`.

    Raises:
        ConfigError: a kind or key is unknown, or a value is out of range.
    """

    def __init__(self, faults: Sequence[Any]) -> None:
        self.faults = [planned(number, entry) for number, entry in enumerate(faults)]

    def data(self, data: Any) -> Any:
        """Returns the data with all faults in data."""
        return reduce(lambda data, fault: fault.data(data), self.faults, data)

    def checkpoints(self, checkpoints: Any) -> Any:
        """Returns the checkpoints with all faults in checkpoints."""
        return reduce(lambda checkpoints, fault: fault.checkpoints(checkpoints), self.faults, checkpoints)

    def wandb(self, wandb: Any) -> Any:
        """Returns W&B with all its faults."""
        return reduce(lambda wandb, fault: fault.wandb(wandb), self.faults, wandb)

    def state(self, state: TrainState, precision: Any) -> None:
        """Sets up all faults in steps."""
        for fault in self.faults:
            fault.state(state, precision)


def planned(number: int, entry: Any) -> Planned:
    """Builds the fault of one entry of the plan."""
    place = f"faults.faults[{number}]"
    if not isinstance(entry, Mapping) or "kind" not in entry:
        raise ConfigError(f"{place}={entry} has no kind: write {{kind: gradient, at: [30], value: nan}}")
    kind, keys = entry["kind"], {key: value for key, value in entry.items() if key != "kind"}
    # YAML reads these as strings.
    keys |= {key: float(value) for key, value in keys.items() if value in ("nan", "inf", "-inf")}
    if kind not in KINDS:
        raise ConfigError(
            f"{place}: kind={kind} is not a kind of fault{did_you_mean(str(kind), KINDS)}: {', '.join(KINDS)}"
        )
    known = {field.name: field for field in fields(KINDS[kind])}
    for key in keys:
        if key not in known:
            raise ConfigError(f"{place}: {kind} has no key {key}{did_you_mean(str(key), known)}: {', '.join(known)}")
    for name, field in known.items():
        if name not in keys and field.default is MISSING:
            raise ConfigError(f"{place}: {kind} has no {name}: write {{kind: {kind}, {name}: [30]}}")
    try:
        return KINDS[kind](**keys)
    except ConfigError as error:
        raise ConfigError(f"{place}, {kind}: {error}") from None
