"""Which files of a checkpoint hold what, and its tensors taken out of them: whole, or as far as a rank needs them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from stabletrain.state.intact import check, checked, naming
from stabletrain.state.tree import Tree, unflatten

MODEL, TRAINING, SKELETON, MANIFEST = ("model.safetensors", "training.safetensors", "state.json", "manifest.json")

WHOLE = {"model": MODEL, "training": TRAINING}
"""The file of each part, where one process has written it."""

PIECE = re.compile(r"(model|training)/shard-[0-9]{5,}-model-00001-of-00001\.safetensors")
"""The files of each part, where several ranks have; DCP's names."""


def parts_of(part: str, files: Mapping[str, Any]) -> list[str]:
    """The names of the files of `model` or of `training`, in order."""
    return sorted(name for name in files if name == WHOLE[part] or name.startswith(f"{part}/"))


def tensors_in(
    path: Path, part: str, files: Mapping[str, Any], skeleton: Mapping[str, Tree], places: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """A part of the tree; with `places`, of which the names are those in the files, what this rank needs of it."""
    names = parts_of(part, files)
    if places is None and names == [WHOLE[part]]:
        content = checked(path, names[0], files)
        with naming(path, names[0]):
            return unflatten(skeleton[part], safetensors.torch.load(content))
    from stabletrain.state import dcp  # takes a second to load

    for name in names if places is None else ():
        check(path, name, files)
    with naming(path, label(part, names)):
        tensors = dcp.read([path / name for name in names], shapes_of(part, skeleton), places or {})
        return unflatten(skeleton[part], tensors)


def places_of_moments(path: Path, skeleton: Tree, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The places of what an optimizer keeps of sharded parameters: the parameters'; by the names in the files."""
    with naming(path, SKELETON):
        moments = _named(skeleton["optimizer"]["state"]) if "optimizer" in skeleton else {}
        return {
            name: places[parameter]
            for parameter, kinds in moments.items()
            if parameter in places
            for name in kinds.values()
            if isinstance(name, _Name)
        }


class _Name(str):
    """A tensor's name, in its place in the tree."""


def _named(skeleton: Tree) -> Tree:
    """The tree with the name of every tensor in its place."""

    class Itself(dict):
        def __missing__(self, name: str) -> _Name:
            return _Name(name)

    return unflatten(skeleton, Itself())


def names_in(path: Path, part: str, names: Sequence[str], skeleton: Mapping[str, Tree]) -> list[str]:
    """The names of the tensors in the files of one part, of which the pieces are all there."""
    if names == [WHOLE[part]]:
        with safe_open(path / names[0], framework="pt") as tensors:
            return list(tensors.keys())
    from stabletrain.state import dcp  # takes a second to load

    return list(dcp.opened([path / name for name in names], shapes_of(part, skeleton))[1]) if names else []


def shapes_of(part: str, skeleton: Mapping[str, Tree]) -> Mapping[str, Sequence[int]] | None:
    """The shapes of all tensors of a part that several ranks have written."""
    return dict(skeleton["shapes"][part]) if "shapes" in skeleton else None


def label(part: str, names: Sequence[str]) -> str:
    """What a message calls the files of a part."""
    return names[0] if names == [WHOLE[part]] else f"{part}/"
