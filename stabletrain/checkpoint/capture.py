"""Captures the whole state of a run as a tree, and restores it.

The optimizer state is stored by parameter name. PyTorch's `optimizer.state_dict()` stores it by position, so that
reordering a model would silently assign the wrong moments.
"""

import copy
from collections.abc import Mapping
from itertools import chain, repeat, zip_longest
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from stabletrain.checkpoint.reader import UnusableCheckpoint
from stabletrain.checkpoint.tree import Piece, Tree, is_sharded, local_part, map_tensors
from stabletrain.errors import ConfigError
from stabletrain.records import TrainState
from stabletrain.several_optimizers import optimizers_of

SCHEDULES = {"peak_weight_decay", "decay_with_lr", "peak_momentum", "momentum_schedule"}
"""Keys of a parameter group that `stability/schedule.py` reads: the configuration decides them."""

NOT_RESTORED = frozenset({"params", "lr", "peak_lr", *SCHEDULES})
"""Keys of a parameter group that are not restored, so that a learning rate changed for the resumed run takes effect."""

FIX = "resume with the options the run began with, or start a new run in another folder"


@runtime_checkable
class Stateful(Protocol):
    """An object with state to save: a guard's window, a loss scale, the running mean of a clipping."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as a tree of `checkpoint/tree.py`."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restores such a tree. Tuples may have become lists."""
        ...


def capture(state: TrainState, parts: Mapping[str, Stateful]) -> Tree:
    """Returns the whole state as a tree that still shares memory with it. `to_host` makes it a snapshot.

    Args:
        state: model, optimizer and counters. `model.compile()` keeps the parameters' names; `torch.compile(model)` does
            not.
        parts: further objects with state, by a name the caller chooses.

    Returns:
        `{"model", "optimizer", "step", "skipped", "tick", "parts"}`, and `"average"` if the weights are averaged.

    Raises:
        ConfigError: the optimizer holds a parameter that is not in the model, or state that belongs to no parameter.
    """
    return {
        "model": dict(state.model.state_dict()),
        "optimizer": _capture_optimizer(state),
        "step": state.step,
        "skipped": [list(span) for span in state.skipped],
        "tick": state.executed_steps,
        "parts": {name: part.state_dict() for name, part in parts.items()},
        **({} if state.average is None else {"average": state.average.captured()}),
    }


ADDED = ("forecast",)
"""Parts that older versions did not save: without a saved state they begin anew."""


def restore(tree: Tree, state: TrainState, parts: Mapping[str, Stateful]) -> None:
    """Restores a captured state bit for bit into the existing tensors, on their devices and in their dtypes.

    A `Piece` goes straight from the host into its tensor, so the device never holds a second copy of a sharded state.
    The tree is not modified and shares no memory with the state. Saved parts that are missing from `parts` are ignored.

    Raises:
        ConfigError: the tree does not fit; names the first difference and the fix. Model, optimizer and counters are
            then unchanged.
    """
    # Check before changing anything: a checkpoint that does not fit must leave the model as it was.
    _check_model(tree["model"], state)
    _check_optimizer(tree["optimizer"], state)
    device = next(state.model.parameters()).device
    for name, part in parts.items():
        if name not in tree["parts"] and name not in ADDED:
            raise UnusableCheckpoint(
                f"the checkpoint has no state of '{name}': another version of stabletrain wrote it; resume with that "
                "version, or start a new run in another folder"
            )
        try:
            part.load_state_dict(map_tensors(lambda tensor: tensor.to(device, copy=True), tree["parts"].get(name, {})))
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UnusableCheckpoint(f"the checkpoint's state of '{name}' does not fit ({error!r}): {FIX}") from error
    live = state.model.state_dict()
    whole = {name: _like(live[name], v) if isinstance(v, Tensor | Piece) else v for name, v in tree["model"].items()}
    state.model.load_state_dict(whole)
    _restore_optimizer(tree["optimizer"], state)
    if state.average is not None:
        state.average.restore(tree.get("average"), _like)
    state.step = tree["step"]
    state.skipped = [(start, stop) for start, stop in tree["skipped"]]
    state.executed_steps = tree.get("tick", tree["step"])  # older checkpoints have no "tick"


def sharded_tensors(state: TrainState) -> dict[str, Tensor]:
    """Returns the sharded tensors of the model by name. They tell a rank which shards of a checkpoint to read."""
    return {name: tensor for name, tensor in state.model.state_dict().items() if is_sharded(tensor)}


def _names(state: TrainState) -> dict[Tensor, str]:
    """Returns the name of each parameter. A shared parameter has the first of its names."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model "
                    "does not have: build it from model.parameters()"
                )
    return names


def _capture_optimizer(state: TrainState) -> Tree:
    parts = [_capture_one(each, _names(state)) for each in optimizers_of(state.optimizer)]
    return {
        "kind": type(state.optimizer).__name__,
        "state": {name: values for part in parts for name, values in part["state"].items()},
        "param_groups": [group for part in parts for group in part["param_groups"]],
        "options": [dict(options) for options in state.options],
    }


def _capture_one(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Tree:
    """Returns state and groups of one optimizer, by the names of its parameters."""
    packed = optimizer.state_dict()
    by_index = [names[p] for group in optimizer.param_groups for p in group["params"]]
    # Only state that belongs to a parameter or a group can be saved by name.
    stray = [repr(key) for key in packed if key not in ("state", "param_groups")]
    stray += [f"state[{key!r}]" for key in packed["state"] if not isinstance(key, int)]
    if stray:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} keeps {stray[0]}, which belongs to no parameter and "
            "no group: keep it in optimizer.state[parameter] or in a parameter group"
        )
    return {
        "state": {by_index[index]: dict(values) for index, values in packed["state"].items()},
        "param_groups": [
            {**group, "params": [by_index[index] for index in group["params"]]} for group in packed["param_groups"]
        ],
    }


def _restore_optimizer(tree: Tree, state: TrainState) -> None:
    names, optimizer = _names(state), state.optimizer
    # Older checkpoints have no options, and neither have groups that a user's own loop added later.
    known = zip_longest(state.options, tree.get("options", ()), fillvalue={})
    given = chain(known, repeat(({}, {})))
    states = [each.state for each in optimizers_of(optimizer) for _ in each.param_groups]
    groups = zip(optimizer.param_groups, states, strict=True)
    for (group, state_of), saved, (now, then) in zip(groups, tree["param_groups"], given, strict=False):
        # The optimizer's arguments (betas, weight decay ...) come from the configuration of the resumed run. An
        # argument that was given the same now as then is restored: where it differs, the optimizer counts in it.
        same = {key for key in now.keys() & then.keys() if now[key] == then[key]}
        scheduled = {key.removeprefix("peak_") for key in SCHEDULES & saved.keys()}  # its value was that of one step
        for key in saved.keys() - NOT_RESTORED - scheduled - (optimizer.defaults.keys() - same):
            group[key] = _copy_into(group.get(key), saved[key], torch.device("cpu"))
        for parameter in group["params"]:
            values = tree["state"].get(names[parameter])
            if values is None:  # the parameter had no update before the capture
                state_of.pop(parameter, None)
                continue
            live = state_of[parameter]
            for key in live.keys() - values.keys():
                del live[key]
            for key, value in values.items():
                live[key] = _copy_into(live.get(key), value, _home(key, parameter, group), parameter)


def _home(key: str, parameter: Tensor, group: dict[str, Any]) -> torch.device:
    # As PyTorch does: step counters stay on the CPU, unless the kernel reads them on the device.
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if on_host else parameter.device


@torch.no_grad()
def _copy_into(live: Any, saved: Any, device: torch.device, parameter: Tensor | None = None) -> Any:
    """Returns the value to store in place of `live`: `live` itself, overwritten, if it is a tensor of that shape."""
    if isinstance(live, Tensor) and isinstance(saved, float | int):  # the learning rate is a tensor now
        return live.fill_(saved)
    if not isinstance(saved, Tensor | Piece):
        # A state may hold lists of tensors, as LBFGS's does.
        own = map_tensors(lambda tensor: tensor.to(device), copy.deepcopy(saved))
        return tuple(own) if isinstance(live, tuple) else own
    if isinstance(live, Tensor) and live.shape == saved.shape:
        return live.copy_(_like(live, saved))
    if parameter is not None and parameter.shape == saved.shape and device == parameter.device:
        made = torch.empty_like(parameter, dtype=local_part(saved).dtype)  # keeps the memory format
        return made.copy_(_like(made, saved))
    return saved.on(device) if isinstance(saved, Piece) else saved.to(device, copy=True)


@torch.no_grad()
def _like(live: Tensor, saved: Tensor | Piece) -> Tensor:
    """Returns `saved` sharded like `live` if `live` is a DTensor; otherwise `saved` unchanged.

    A `Piece` is copied into `live`, which is returned.
    """
    if isinstance(saved, Piece):
        local_part(live).copy_(saved.local)
        return live
    if not hasattr(live, "full_tensor") or hasattr(saved, "full_tensor"):
        return saved
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(live, DTensor)
    return distribute_tensor(saved.to(live.device), live.device_mesh, live.placements)


def _check_model(saved: Mapping[str, Any], state: TrainState) -> None:
    live = state.model.state_dict()
    for name in [*saved, *live]:
        if name not in live or name not in saved:
            has, lacks = ("checkpoint", "model") if name in saved else ("model", "checkpoint")
            raise misfit("the model", f"'{name}' is in the {has}, not in the {lacks}")
        if isinstance(saved[name], Tensor | Piece) and saved[name].shape != live[name].shape:
            then, now = list(saved[name].shape), list(live[name].shape)
            raise misfit("the model", f"'{name}' is {then} in the checkpoint and {now} in the model")


def _check_optimizer(tree: Tree, state: TrainState) -> None:
    names, optimizer = _names(state), state.optimizer
    kind, saved, live = type(optimizer).__name__, tree["param_groups"], optimizer.param_groups
    what = f"optimizer {kind}"
    if tree["kind"] != kind:
        raise misfit(what, f"it holds the state of {tree['kind']}")
    if len(saved) != len(live):
        raise misfit(what, f"it has {len(saved)} parameter groups, the optimizer {len(live)}")
    for i, (then, now) in enumerate(zip(saved, live, strict=True)):
        differ = set(then["params"]) ^ {names[p] for p in now["params"]}
        if differ:
            raise misfit(what, f"'{min(differ)}' is in parameter group {i} of only one of them")


def misfit(what: str, difference: str) -> ConfigError:
    """Returns the error of a checkpoint that does not fit the model or the optimizer."""
    return ConfigError(f"the checkpoint does not fit {what}: {difference}: {FIX}")
