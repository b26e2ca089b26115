"""Checks that what a checkpoint holds can be the state of a run.

Checksums show that a file is as it was written. They say nothing of a program that wrote nonsense and sealed it. The
types of `state.json` are checked when a checkpoint is verified, and what only the live state shows when it is loaded.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn

from stabletrain.checkpoint.tree import Piece, Tree, local_part
from stabletrain.stored.json_files import Count, brief, check_plain, check_type, is_int

SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Moments that have their parameter's shape."""

TEXTS = ("raised", "names")
"""Lists of texts in the states of our own parts; every other list holds numbers."""


class Group(TypedDict):
    """A parameter group of an optimizer; its other keys are the optimizer's own."""

    params: list[str]


class Optimizer(TypedDict, total=False):
    """The state of an optimizer, by parameter name."""

    kind: str
    state: dict[str, dict[str, Any]]
    param_groups: list[Group]


class Training(TypedDict, total=False):
    """Everything in `state.json` but the model; a state that is no run's has other keys."""

    optimizer: Optimizer
    step: Count
    skipped: list[list[Count]]
    tick: Count
    parts: dict[str, dict[str, Any]]


class Skeleton(TypedDict):
    """The content of `state.json`."""

    model: dict[str, Any]
    training: Training


class Parted(Skeleton):
    """The content of `state.json`, if several ranks wrote the checkpoint."""

    shapes: dict[str, dict[str, list[Count]]]


class Settings(TypedDict):
    """The settings that a checkpoint was trained with."""

    choices: dict[str, str]
    values: dict[str, Any]


class Info(TypedDict, total=False):
    """What a run stores in a manifest."""

    run: str | None
    settings: Settings


class Manifest(TypedDict):
    """The values of `manifest.json` that a run needs."""

    step: Count
    healthy: bool
    val_loss: float | None
    info: Annotated[dict[str, Any], Info]


def check_skeleton(skeleton: Any, step: int, *, parted: bool) -> None:
    """Checks the content of `state.json`.

    Args:
        skeleton: parsed.
        step: the manifest's.
        parted: whether several ranks wrote the checkpoint.

    Raises:
        ValueError: it cannot be the state of a run; names the value.
    """
    check_plain(skeleton)
    check_type(skeleton, Parted if parted else Skeleton)
    training = skeleton["training"]
    if (own := training.get("step", step)) != step:
        raise ValueError(f"training/step is {own}, but the manifest's is {step}")
    for span in training.get("skipped", []):
        if len(span) != 2 or span[0] > span[1]:
            raise ValueError(f"training/skipped holds {brief(span)}, which is no range")


def check_tensors(skeleton: Mapping[str, Any], dtypes: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> None:
    """Checks that the parameters and their moments are floats, and the moments as large as the parameters.

    Args:
        skeleton: of a run's state; nothing is checked in another one.
        dtypes, shapes: of all tensors in the files, by name; dtypes as safetensors call them.

    Raises:
        ValueError: a tensor has another dtype or shape; names it.
    """
    optimizer, model = skeleton["training"].get("optimizer", {}), skeleton["model"]
    for parameter in (name for group in optimizer.get("param_groups", []) for name in group["params"]):
        whole = tensor_name(model.get(parameter))
        if whole is None:
            raise ValueError(f"model/{parameter} is missing, or no tensor")
        check_float(f"model/{parameter}", dtypes[whole])
        for kind, value in optimizer.get("state", {}).get(parameter, {}).items():
            name, shown = tensor_name(value), f"optimizer/state/{parameter}/{kind}"
            if name is not None and kind != "step":
                check_float(shown, dtypes[name])
            unset = value is None and kind == "momentum_buffer"  # as SGD leaves it before the first update
            if kind in SHAPED and not unset and (name is None or [*shapes[name]] != [*shapes[whole]]):
                raise ValueError(f"{shown} does not have its parameter's shape, {[*shapes[whole]]}")
    for group in optimizer.get("param_groups", []):
        alike: dict[str, list[str]] = {}
        for parameter in group["params"]:
            alike.setdefault(dtypes[model[parameter]["$tensor"]], []).append(parameter)
        for names in alike.values():
            check_group({name: optimizer.get("state", {}).get(name, {}) for name in names}, dtypes)


def check_group(states: Mapping[str, Mapping[str, Any]], dtypes: Mapping[str, str]) -> None:
    """Checks that parameters of one group and dtype have the same kinds of state, if they had an update.

    Raises:
        ValueError: a parameter has other state than the one before it; names it.
    """
    kinds = {
        name: {key: dtypes.get(tensor_name(value) or "") for key, value in state.items()}
        for name, state in states.items()
    }
    updated = [(name, kind) for name, kind in kinds.items() if kind]
    for (one, its), (other, theirs) in pairwise(updated):
        if differ := dict(its.items() ^ theirs.items()):
            raise ValueError(f"optimizer/state has another {min(differ)} for {one} than for {other}")


def check_float(name: str, dtype: str) -> None:
    """Raises ValueError if `dtype` is not one of floats."""
    if not dtype.startswith(("F", "BF")):
        raise ValueError(f"{name} holds {dtype}, not floats")


def tensor_name(node: Any) -> str | None:
    """Returns the name of the tensor that a node of a skeleton stands for; None if it is no tensor."""
    name = node.get("$tensor") if isinstance(node, dict) else None
    return name if isinstance(name, str) else None


# ---- against the live state


def check_state(tree: Tree, model: nn.Module, parts: Mapping[str, Any]) -> None:
    """Checks a loaded state against the live one, as far as settings that a resume may change have no effect.

    Args:
        tree: of a checkpoint; see `capture.capture`.
        model: the live model, only for dtypes.
        parts: the live objects with state. Of those that are the user's own nothing is known, so nothing is checked.

    Raises:
        ValueError: a value cannot belong to a run; names it.
    """
    for key in ("model", "optimizer", "step", "skipped", "parts"):
        if key not in tree:
            raise ValueError(f"{key} is missing")
    for key in ("kind", "state", "param_groups"):
        if key not in tree["optimizer"]:
            raise ValueError(f"optimizer/{key} is missing")
    live = model.state_dict()
    for name, value in tree["model"].items():
        if isinstance(own := live.get(name), Tensor):
            if not isinstance(value, Tensor | Piece):
                raise ValueError(f"model/{name} is no tensor")
            dtype = local_part(value).dtype
            if own.is_floating_point() != dtype.is_floating_point:
                raise ValueError(f"model/{name} holds {str(dtype).removeprefix('torch.')}")
    for name, part in parts.items():
        if name in tree["parts"] and type(part).__module__.partition(".")[0] == "stabletrain":
            check_like(tree["parts"][name], part.state_dict(), f"parts/{name}")


def check_like(saved: Any, live: Any, name: str) -> None:
    """Checks that a saved value has the same kind as the live one, which may be empty.

    Raises:
        ValueError: it has another kind; names it.
    """
    if isinstance(live, Mapping) and isinstance(saved, Mapping):
        for key, value in saved.items():
            check_like(value, live.get(key, ABSENT), f"{name}/{key}")
    elif isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        mixed = len({type(each) for each in live}) > 1  # a few numbers, each with its own meaning
        if mixed and len(saved) != len(live):
            raise ValueError(f"{name} has {len(saved)} values, where the run has {len(live)}")
        empty = "" if name.rpartition("/")[2] in TEXTS else ABSENT
        for number, value in enumerate(saved):
            like = live[min(number, len(live) - 1)] if live else empty
            check_like(value, like, f"{name}/{number}")
    elif live is ABSENT:
        inside = saved if isinstance(saved, list | tuple) else saved.values() if isinstance(saved, Mapping) else ()
        for value in inside:
            check_like(value, "" if name.rpartition("/")[2] in TEXTS else ABSENT, f"{name}/...")
        if saved is None or isinstance(saved, str):
            raise ValueError(f"{name} is {brief(saved)}, not a number")
    elif live is not None and not alike(saved, live):
        raise ValueError(f"{name} is {shown(saved)}, where the run has {shown(live)}")


ABSENT = object()
"""Stands for a value that the live state does not have."""


def alike(saved: Any, live: Any) -> bool:
    """Returns whether two leaves have the same kind; a count that is 0 or more stays so."""
    if isinstance(live, Tensor):
        return isinstance(saved, Tensor) and saved.shape == live.shape and kind_of(saved) == kind_of(live)
    if is_int(live):
        return is_int(saved) and (saved >= 0 or live < 0)
    if isinstance(live, float):
        return isinstance(saved, float) or is_int(saved)
    return type(saved) is type(live)


def kind_of(tensor: Tensor) -> tuple[bool, bool]:
    """Returns whether a tensor holds floats, and whether it holds bools."""
    return tensor.is_floating_point(), tensor.dtype == torch.bool


def shown(value: Any) -> str:
    """Returns a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor {[*value.shape]} of {str(value.dtype).removeprefix('torch.')}"
    return "a list" if isinstance(value, list | tuple) else "an object" if isinstance(value, Mapping) else brief(value)
