"""Makes a captured state fit a model or an optimizer that differs from the one it was captured from.

Parts are matched by name. A part that the state lacks comes from the caller; a part that the model lacks is dropped.
`capture.restore` stays strict: it restores only a state that fits, so a state is refitted first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.tree import Piece, Tree, is_sharded, local_part, map_tensors
from stabletrain.records import TrainState

SAME_STATE = (frozenset({"AdamW", "GatedAdamW", "CappedAdamW"}),)
"""Kinds of optimizers that keep the same state for each parameter."""


@dataclass(frozen=True)
class Refitted:
    """A state that fits, and what is new in it.

    Attributes:
        tree: as `capture.capture` returns it; shares memory with the tree that was refitted.
        made: names of the model's parameters and buffers that the state lacked.
        dropped: names of those that the model lacks.
        moments_anew: whether the optimizer's whole state starts anew.
    """

    tree: Tree
    made: list[str]
    dropped: list[str]
    moments_anew: bool


def fresh_optimizer(state: TrainState) -> Tree:
    """Captures a copy of the optimizer before its first step: the state that new parameters start with."""
    return map_tensors(kept, capture(state, {})["optimizer"])


def kept(tensor: Tensor) -> Tensor | Piece:
    """Copies a tensor; one that is all 0, such as momentum before the first step, takes no memory."""
    own = local_part(tensor)
    if own.any():
        return tensor.detach().clone()
    zeros = own.new_zeros(()).expand(own.shape)
    return Piece.of(tensor, zeros) if is_sharded(tensor) else zeros


def missing(tree: Tree, state: TrainState) -> list[str]:
    """Returns the names of the model's parameters and buffers that a captured state lacks."""
    return [name for name in state.model.state_dict() if name not in tree["model"]]


def refit(tree: Tree, state: TrainState, new: Mapping[str, Tensor], fresh: Tree) -> Refitted:
    """Returns a captured state that fits `state`, which is not changed.

    Args:
        tree: from `capture`.
        state: the live model and optimizer.
        new: values of the parameters and buffers that the captured state lacks (`missing`), of any float dtype.
        fresh: from `fresh_optimizer`.
    """
    live = state.model.state_dict()
    made = missing(tree, state)
    dropped = [name for name in tree["model"] if name not in live]
    model = {name: new[name] if name in new else tree["model"][name] for name in live if name in {*new, *tree["model"]}}
    optimizer, anew = refit_optimizer(tree["optimizer"], fresh)
    return Refitted({**tree, "model": model, "optimizer": optimizer}, made, dropped, anew)


def refit_optimizer(tree: Tree, fresh: Tree) -> tuple[Tree, bool]:
    """Returns an optimizer's captured state in the groups of another one, and whether none of it could be kept.

    A parameter keeps its moments and its step counter if both optimizers keep the same ones. A group keeps what the
    optimizer itself has added to it, from the captured group with most of its parameters.

    Args:
        tree: the captured state.
        fresh: the other optimizer before its first step, from `fresh_optimizer`.
    """
    kinds = {tree["kind"], fresh["kind"]}
    if len(kinds) > 1 and not any(kinds <= same for same in SAME_STATE):
        return fresh, True
    moments = {}
    for name in (name for group in fresh["param_groups"] for name in group["params"]):
        # Momentum that starts at 0 is there before the first step: keep what the captured state has beside it.
        values = {**fresh["state"].get(name, {}), **tree["state"].get(name, {})}
        if values:
            moments[name] = values
    groups, options = [], []
    both = list(zip_longest(tree["param_groups"], tree.get("options", ()), fillvalue={}))
    for group in fresh["param_groups"]:
        alike, given = max(both, key=lambda each: len({*each[0]["params"]} & {*group["params"]}), default=({}, {}))
        groups.append({**group, **alike, "params": group["params"]})
        options.append(given)
    return {**tree, "kind": fresh["kind"], "state": moments, "param_groups": groups, "options": options}, False
