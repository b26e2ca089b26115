"""Builds small runs in half of the time: what is the same for each run of a process is computed once."""

from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest

from tests.composing import Kept

PACKAGE = Path(__file__).parent.parent / "stabletrain"


def remember(patch: pytest.MonkeyPatch, folder: Path | None = None) -> None:
    """Has this process keep the standard library's text, its hash, FLOPs and sizes of each model, and git's answer.

    A class that an option names is called with the option's values, as Hydra would after copying them three times. The
    text that a run generates at its end is short: with 200 tokens it takes almost half of the time of a small run.

    Args:
        patch: takes it back.
        folder: an existing one, in which processes share FLOPs and sizes; see `composing.Kept`.
    """
    from stabletrain.config import make as making  # not before `--types` has its checks in place
    from stabletrain.data import text
    from stabletrain.tracking import run_folder
    from stabletrain.trainer import banner, contract, memory

    libraries, hashes, kept, commits = {}, {}, Kept(folder), {}
    measure = memory.on_meta
    make, fingerprint, count = text.Stdlib.__init__, text.Stdlib.fingerprint, contract.flops_per_sample
    instantiate, ask_git = making.instantiate, run_folder.git

    @wraps(make)
    def made_once(self: Any, *given: Any, **named: Any) -> None:
        key = repr((type(self), text.sysconfig.get_paths()["stdlib"], given, sorted(named.items())))
        if key not in libraries:
            make(self, *given, **named)
            libraries[key] = {**vars(self)}
        vars(self).update(libraries[key])

    @wraps(fingerprint)
    def hashed_once(self: Any) -> Any:
        key = len(self._train)
        if key not in hashes:
            hashes[key] = fingerprint(self)
        return {**hashes[key]}

    @wraps(count)
    def counted_once(model: Any, inputs: Any) -> float | None:
        shapes = [(name, tuple(value.shape)) for name, value in model.named_parameters()]
        return kept.get(("flops", repr(model), shapes, inputs.shape, inputs.dtype), lambda: count(model, inputs))

    @wraps(measure)
    def measured_once(choice: Any, sizes: Any) -> Any:
        if not choice.target.startswith("stabletrain."):  # a test may have two classes of one name
            return measure(choice, sizes)
        given = choice.target, repr(choice.node), repr(sorted(sizes.items()))
        return kept.get(("sizes", *given), lambda: measure(choice, sizes))

    @wraps(instantiate)
    def instantiated_quickly(node: Any, **given: Any) -> Any:
        named = {**node, **given}
        target, _ = named.pop("_target_"), named.pop("_convert_")
        if not any(key.startswith("_") for key in named) and all(map(is_flat, named.values())):
            try:
                return locate(target)(**{key: copied(value) for key, value in named.items()})
            except Exception:  # Hydra says what is wrong
                pass
        return instantiate(node, **given)

    @wraps(ask_git)
    def asked_once(checkout: Path) -> Any:
        if checkout != PACKAGE.parent:
            return ask_git(checkout)
        if checkout not in commits:
            commits[checkout] = ask_git(checkout)
        return commits[checkout]

    patch.setattr(making, "instantiate", instantiated_quickly)
    patch.setattr(run_folder, "git", asked_once)
    patch.setattr(text.Stdlib, "__init__", made_once)
    patch.setattr(text.Stdlib, "fingerprint", hashed_once)
    patch.setattr(contract, "flops_per_sample", counted_once)
    patch.setattr(memory, "on_meta", measured_once)
    patch.setattr(banner, "SAMPLE_TOKENS", 20)  # with a cache as far as the block, here 16, and without


def is_flat(value: Any) -> bool:
    """Whether Hydra would pass a value on: nothing in it is to be built, or is itself taken for a configuration."""
    if isinstance(value, dict):
        return "_target_" not in value and all(map(is_flat, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_flat, value))
    return not (is_dataclass(value) or (isinstance(value, str) and ("${" in value or value == "???")))


def copied(value: Any) -> Any:
    """Returns a value as Hydra passes it on: lists and dicts are new, and a tuple is a list."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [*map(copied, value)] if isinstance(value, list | tuple) else value
