"""The weights that a new run begins with: those of its `init`, or those that `init_from` names.

Only weights and buffers are taken. The optimizer, the guard and the step number start anew. A resumed run has its
weights in its own checkpoint, so it does not read the source again, which may be gone by then.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from stabletrain.checkpoint import reader
from stabletrain.checkpoint.folder import Folder, inside
from stabletrain.config.arguments import show
from stabletrain.config.make import Choice
from stabletrain.config.moved import updated
from stabletrain.config.resuming import ADDED_GROUPS
from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.parallel.ranks import Ranks, run_on_main
from stabletrain.stability.attention_gate import NoAttentionGate
from stabletrain.stability.norm_placement import PreNorm
from stabletrain.stability.softmax import PlainSoftmax
from stabletrain.tracking.run_folder import RunFolder
from stabletrain.trainer.contract import FROM_DATA
from stabletrain.trainer.options import Options
from stabletrain.trainer.saved import config_of, open_sizes, sizes_in
from stabletrain.weights.load import Fit, fit, load_
from stabletrain.weights.sources import Source, find

MEANING = ("n_head", "position", "norm", "mlp", "stem", "alpha")
MEANING += ("qknorm", "softmax", "attention_gate", "norm_placement")
"""Keys of a model that can differ although all shapes agree, and then make the weights compute something else."""

ONLY_TRAINING = ("dropout", "embedding_gradient")
"""Keys of a model that a new run may choose as it likes."""

MAY_EXCEED = ("vocab_size", "block_size")
"""Sizes of a model that may be larger than the data needs; numbers of classes and channels are the data's."""

PARTS = ("qknorm", "softcap", "softmax", "attention_gate", "norm_placement")
"""Keys of a model that hold the option of a config group, and that forward passes depend on."""

ADDED: dict[str, Any] = {
    "swiglu_limit": None,
    "n_kv_head": None,
    **{
        key: {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
        for key, kind in (("softmax", PlainSoftmax), ("attention_gate", NoAttentionGate), ("norm_placement", PreNorm))
    },
}
"""Keys that a GPT of an older version and GPT-2 do not have, and the value with which they compute the same."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        record: for `run.json` and W&B; empty if nothing was loaded.
        notes: lines for the user.
    """

    record: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


class OwnInit:
    """Leaves the weights as they are, for a run without `init_from`, and for one whose checkpoint has them."""

    def load_(self, model: nn.Module) -> Loaded:
        """Does nothing."""
        return Loaded()


@dataclass(frozen=True)
class InitFrom(OwnInit):
    """Loads the weights that `init_from` names.

    Attributes:
        where: what `init_from` names.
        strict: whether all weights must fit.
        model: this run's model.
        choices: the chosen option of each config group.
        data: the data set, which may determine sizes of the model.
        ranks: one rank chooses the checkpoint, and all of them read it.
    """

    where: str
    strict: bool
    model: Choice[Any]
    choices: Mapping[str, str]
    data: Any
    ranks: Ranks

    def load_(self, model: nn.Module) -> Loaded:
        """Loads the weights into an unsharded model on the CPU.

        Raises:
            ConfigError: there are no weights, they cannot be read, or they do not fit and `init_strict` is true.
        """
        given = self.where
        source = run_on_main(self.ranks, lambda: find(given, as_gpt2=isinstance(model, GPT)))
        tensors = source.read()
        found = fit(model, tensors)
        theirs, option = source_model(source, tensors)
        ours = updated(dict(self.model.node)) | {key: getattr(self.data, key, None) for key in open_sizes(self.model)}
        other = differing(theirs, ours)
        meant = {key: pair for key, pair in other.items() if key in MEANING}
        about = describe(source)
        if self.strict and (meant or not found.whole):
            words = to_type(theirs, ours, other, option, self.choices)
            same = f"type {words} to build the source's model, or " if words else "type "
            raise ConfigError(
                f"init_from={given}: the weights of {about} do not fit model={self.choices['model']}: "
                f"{reasons(found, meant)}; {same}init_strict=false to load what fits"
            )
        if not found.fitting:
            raise ConfigError(
                f"init_from={given}: no tensor of {about} fits model={self.choices['model']}: {found.differences()}"
            )
        try:
            load_(model, found)
        except ConfigError as error:
            raise ConfigError(f"init_from={given}: {about}: {error}") from error
        return Loaded(source.record(), notes(about, found, other, theirs, self.data))


def starting_weights(options: Options, data: Any, ranks: Ranks, folder: Path) -> OwnInit:
    """Returns what puts the first weights into the model.

    Args:
        folder: the run folder; if `resume` finds a checkpoint in it, that has the weights.
    """
    if options.init_from == "none" or run_on_main(ranks, lambda: has_checkpoint(options.resume, folder)):
        return OwnInit()
    return InitFrom(options.init_from, options.init_strict, options.model, options.choices, data, ranks)


def has_checkpoint(resume: str, folder: Path) -> bool:
    """Returns whether `resume` will restore a checkpoint; otherwise the run starts from step 0."""
    if resume != "auto":
        return resume != "none"
    # A checkpoint counts only if it verifies: if none does, the run starts again, from the same weights.
    lines: list[str] = []
    return Folder(inside(folder), run=RunFolder(folder).read().get("id"), tell=lines.append).newest() is not None


def source_model(source: Source, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Returns the configuration of the source's model, and the options of its run; both are empty if unknown."""
    if source.kind == "gpt2":
        return {**source.model, "_target_": f"{GPT.__module__}.{GPT.__qualname__}"}, {}
    if not source.ours:
        return updated(dict(source.model)), {}
    with suppress(ConfigError):
        model = Choice.of(config_of(reader.peek(source.path)), "model")
        shapes = {name: tensor.shape for name, tensor in tensors.items() if hasattr(tensor, "shape")}
        sizes = sizes_in(model, shapes)
        return updated(dict(model.node)) | sizes, RunFolder(source.path.parent.parent).read().get("choices", {})
    return {}, {}


def differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the keys of two models of one class that differ, each with the source's value and this run's."""
    if theirs.get("_target_") != ours.get("_target_"):
        return {}
    theirs = {**ADDED, **theirs}
    keys = [key for key in theirs if key in ours and key not in ("_target_", "modality", *ONLY_TRAINING)]
    known = [key for key in keys if key not in FROM_DATA or None not in (theirs[key], ours[key])]
    return {
        key: (theirs[key], ours[key])
        for key in known
        if theirs[key] != ours[key] and (key in PARTS or not isinstance(theirs[key], dict))
    }


def to_type(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    other: Mapping[str, tuple[Any, Any]],
    options: Mapping[str, str],
    choices: Mapping[str, str],
) -> str:
    """Returns the overrides that build the source's model, such as `model=gpt_mini`; empty if unknown."""
    if theirs.get("_target_") != ours.get("_target_"):
        return f"model={options['model']}" if "model" in options else ""
    words = [
        f"model.{key}={show(value)}"
        for key, (value, mine) in other.items()
        if not isinstance(value, dict) and (key not in FROM_DATA or (key in MAY_EXCEED and value > mine))
    ]
    options = ADDED_GROUPS | {**options}
    words += [f"{part}={options[part]}" for part in PARTS if part in other and options.get(part) != choices.get(part)]
    return " ".join(words)


def reasons(found: Fit, meant: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns why weights do not fit, in words."""
    keys = [
        f"another {key}" if isinstance(then, dict) else f"{key} is {then} in the source and {now} here"
        for key, (then, now) in meant.items()
    ]
    return "; ".join(filter(None, [found.differences(), *keys]))


def describe(source: Source) -> str:
    """Returns the path, and of a checkpoint its validation loss."""
    loss = "" if source.val_loss is None else f" (val loss {source.val_loss:.3f})"
    path = source.path
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}{loss}"


def notes(
    about: str, found: Fit, other: Mapping[str, tuple[Any, Any]], theirs: Mapping[str, Any], data: Any
) -> list[str]:
    """Returns the lines that say what was loaded and what the user should know about it."""
    loaded = found.total - len(found.missing) - len(found.misfit)
    lines = [f"weights from {about}: {loaded} of {found.total} tensors"]
    if not found.whole:
        lines[0] += f"; {found.differences()}; what is not loaded keeps its init"
    changed = [key for key in other if key not in FROM_DATA and (found.whole or key in MEANING)]
    if changed:
        pairs = [(key, *other[key]) for key in changed]
        shown = [key if isinstance(then, dict) else f"{key}={then}, here {now}" for key, then, now in pairs]
        lines.append(f"the source's model had other settings: {'; '.join(shown)}")
    ids, needed = theirs.get("vocab_size"), getattr(data, "vocab_size", None)
    if None not in (ids, needed) and ids != needed:
        lines.append(f"the source's vocabulary has {ids:,} ids, the data's {needed:,}: an id may mean another token")
    return lines
