"""The options of a run as typed objects: one field for each config group and each key of `conf/config.yaml`.

`read` makes all of them once. An option that needs a later value stays a `Choice`, and its `build` receives that value:
the model needs sizes from the data, the precision a device, the optimizer a model. The data set is a `Choice`
because each rank opens them on its own. From here on the code takes objects and values, and sees no configuration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.config.arguments import parse_arguments, usual_lr
from stabletrain.config.make import Choice, plain
from stabletrain.data.batches import Dataset
from stabletrain.errors import ConfigError
from stabletrain.extension import NoFaults, NoForecast, NoPreflight
from stabletrain.forensics.handler import NoIncidentHandler
from stabletrain.guard.policy import NoGuard
from stabletrain.machine.determinism import Off
from stabletrain.monitors.monitors import NoMonitors
from stabletrain.parallel.single import SingleProcess
from stabletrain.program import started
from stabletrain.stability.activation_checkpointing import NoActivationCheckpointing
from stabletrain.stability.attention_gate import NoAttentionGate
from stabletrain.stability.averaging import NoAveraging
from stabletrain.stability.clipping import NoClip
from stabletrain.stability.init import TorchInit
from stabletrain.stability.norm_placement import PreNorm
from stabletrain.stability.objective import CrossEntropy, Custom, NoZLoss, Objective
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.schedule import NoWarmup, Schedule
from stabletrain.stability.softcap import NoSoftcap
from stabletrain.stability.softmax import PlainSoftmax
from stabletrain.tracking.wandb import NoWandb

OptionsT = TypeVar("OptionsT", bound="ForwardOptions")


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """What a forward pass and its loss depend on."""

    model: Choice[Any]  # any class: `contract.make_model` checks that it gives an nn.Module
    precision: Choice[FullPrecision]
    zloss: NoZLoss = field(default_factory=NoZLoss)
    label_smoothing: float = 0.0
    objective: Objective


@dataclass(frozen=True, kw_only=True)
class StepOptions(ForwardOptions):
    """What a step computes with: all that a replay needs."""

    determinism: Off
    clipping: NoClip
    qkclip: NoQKClip
    warmup: NoWarmup
    schedule: Schedule
    steps: int
    grad_accum_steps: int
    seed: int
    device: str
    loss_chunk: int | str = "none"
    activation_checkpointing: NoActivationCheckpointing = field(default_factory=NoActivationCheckpointing)


@dataclass(frozen=True, kw_only=True)
class Options(StepOptions):
    """The options of a whole run.

    Attributes:
        config: the configuration that they were read from, plain and resolved, to be recorded.
        choices: the chosen option of each config group.
    """

    parallel: SingleProcess
    guard: NoGuard
    monitors: NoMonitors
    faults: NoFaults
    forecast: NoForecast
    check: NoPreflight
    data: Choice[Dataset]
    qknorm: NoQKNorm  # the model's YAML builds its own from the same keys; this one has been checked
    softcap: NoSoftcap
    softmax: PlainSoftmax
    attention_gate: NoAttentionGate
    norm_placement: PreNorm
    averaging: NoAveraging = field(default_factory=NoAveraging)
    init: TorchInit
    optimizer: Choice[Callable]
    checkpoint: NoCheckpoints
    wandb: NoWandb
    forensics: NoIncidentHandler
    batch_size: int
    eval_every: int
    eval_batches: int | None
    log_every: int
    compile: bool | str
    report: bool
    init_from: str
    init_strict: bool
    resume: str
    config: dict[str, Any] = field(repr=False)
    choices: dict[str, str] = field(repr=False)

    @property
    def usual_lr(self) -> float | None:
        """The learning rate that the chosen option of `optimizer` has by itself; None if it has none."""
        return usual_lr(parse_arguments(started().typed).options, self.choices["optimizer"])

    def __str__(self) -> str:
        """Returns one line for each field: a key and its value, or a group, its option and the class of its object."""
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        return "\n".join(f"{name:<25}{self._in_words(name, value)}" for name, value in shown.items())

    def _in_words(self, name: str, value: Any) -> str:
        if isinstance(value, Choice):
            return f"{value.option}: {value.target}, not built yet"
        kind = type(value)
        return f"{self.choices[name]}: {kind.__module__}.{kind.__qualname__}" if name in self.choices else repr(value)


def read(kind: type[OptionsT], config: Mapping[str, Any], choices: Mapping[str, str] | None = None) -> OptionsT:
    """Makes the options of a configuration, each an object that fits the type of its field.

    Args:
        kind: which of them.
        config: a run's configuration, checked by `config.checks.check`; or one that an earlier run recorded, which may
            lack the keys that have a default here.
        choices: the chosen option of each config group; Hydra's own groups are left out.

    Raises:
        ConfigError: an option has an unknown key, a value is out of bounds, or an object does not fit its field.
    """
    choices = {group: option for group, option in (choices or {}).items() if "hydra" not in group}
    found: dict[str, Any] = {"config": config, "choices": choices} if issubclass(kind, Options) else {}
    # Each field gets its object or value, of the type that the field names.
    for name, wanted in get_type_hints(kind).items():
        if name not in config or name == "objective":
            continue
        found[name] = value = plain(config[name])
        if isinstance(value, dict):
            [role] = get_args(wanted) or [wanted]
            choice = Choice(name, value, choices.get(name, ""), None if role is Any else role)
            found[name] = choice if get_origin(wanted) is Choice else choice.build()
    # The loss is made last: the cross-entropy takes two other options. Older runs and incidents had no other loss.
    cross_entropy = CrossEntropy(found.get("zloss", NoZLoss()), found.get("label_smoothing", 0.0))
    if "objective" not in config:
        return kind(**found, objective=cross_entropy)
    return kind(**found, objective=objective_of(Choice.of(config, "objective", choices=choices), cross_entropy))


def objective_of(choice: Choice[Any], cross_entropy: CrossEntropy) -> Objective:
    """Builds the objective: an `Objective`, or any callable of the user's, which may be a function or a class.

    Args:
        choice: the option of the group `objective`.
        cross_entropy: the loss if the option is the cross-entropy.

    Raises:
        ConfigError: the target cannot be built or called.
    """
    code = choice.code
    if code is not None and not isinstance(code, type):  # it is the loss itself, not what builds it
        made = choice.build(_partial_=True)
        return Custom(partial(made.func, **made.keywords))  # Hydra's partial would check its target in every step
    objective = choice.build()
    if isinstance(objective, CrossEntropy):
        return replace(objective, zloss=cross_entropy.zloss, label_smoothing=cross_entropy.label_smoothing)
    if isinstance(objective, Objective):
        return objective
    if not callable(objective):
        raise ConfigError(
            f"objective: {choice.target} gives a {type(objective).__name__}, which cannot be called with "
            "(outputs, batch, n_valid)"
        )
    return Custom(objective)
