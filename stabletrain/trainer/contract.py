"""The contract between a model and its data: the sizes they must agree on, and the format of a batch.

Both may be the user's own plug-ins. If one breaks the contract, the run is refused with a message that names the
violation.

A model's `forward(inputs)` returns what the objective takes: for the cross-entropy logits, `[batch, classes]` or
`[batch, time, vocab]`, or an object or a tuple that holds them (`TakeLogits`). Two
attributes are optional, and default to the data's: `vocab_size` (ids outside it are bad data), and `block_size` (the
maximum number of tokens it reads at once when it generates text).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.config.make import Choice
from stabletrain.errors import ConfigError
from stabletrain.machine.determinism import rng_restored
from stabletrain.machine.hardware import flops_per_sample, meta_copy
from stabletrain.parallel.ranks import Ranks
from stabletrain.records import Batch, reads_rows
from stabletrain.stability.objective import CrossEntropy, Objective

FROM_DATA = ("vocab_size", "block_size", "num_classes", "in_channels")
"""Model sizes that are taken from the data if they are null in the model's option."""

DEFAULT_VAL_BATCHES = 20
"""Batches in an evaluation if the data has no method `batches(size, split)`."""


def make_model(choice: Choice[Any], data: Any, objective: Objective) -> nn.Module:
    """Builds the model; sizes that are null are taken from the data.

    Raises:
        ConfigError: a size is missing or does not fit the data, or the target is not a trainable `nn.Module`.
    """
    model = choice.build(**sizes_from_data(choice, data))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {choice.target} gives a {type(model).__name__}, not an nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"model: {choice.target} has no parameters to train")
    accept_output_(model, data, objective)
    return model


def sizes_from_data(choice: Choice[Any], data: Any) -> dict[str, Any]:
    """Returns the model's sizes that are null in its option, from the data.

    Raises:
        ConfigError: a size is missing or does not fit the data.
    """
    given = {}
    for key in FROM_DATA:
        if key not in choice.node:
            continue
        wanted, needed = choice.node[key], getattr(data, key, None)
        if wanted is None and needed is None:
            raise ConfigError(f"model.{key} is null, and the data has no {key}: set model.{key}")
        if wanted is None:
            given[key] = needed
        elif needed is not None and (wanted < needed or (key == "in_channels" and wanted != needed)):
            raise ConfigError(f"model.{key}={wanted} does not fit the data, which needs {needed}: leave it null")
    return given


@dataclass(frozen=True)
class TakeLogits:
    """A forward hook that replaces a model's output by its logits, so that calling the model returns a tensor.

    Takes the attribute `.logits` of an object (as in transformers), or the first element of a tuple. Any other output
    stays as it is.

    Attributes:
        note: a line for the user that says where the logits are; empty if unknown.
    """

    note: str = ""

    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> Any:
        """Returns the logits of `output`."""
        return output_of(output)


def output_of(output: Any) -> Any:
    """Returns the logits of a model's output: the output itself, its `.logits`, or the first element of a tuple."""
    if isinstance(output, Tensor):
        return output
    if isinstance(logits := getattr(output, "logits", None), Tensor):
        return logits
    return output[0] if isinstance(output, tuple) and output and isinstance(output[0], Tensor) else output


def accept_output_(model: nn.Module, data: Any, objective: Objective) -> None:
    """Makes calls of the model return its logits, even if its output is an object or tuple that contains them.

    Runs a copy of the model on two samples. A model that returns a tensor gets no hook, so its calls stay as fast. A
    loss of the user's own gets the output as it is, and is not tried here.

    Raises:
        ConfigError: the output holds no tensor that the objective takes, or it does not fit the targets.
    """
    built_in = type(model).__module__.startswith("stabletrain.") and isinstance(objective, CrossEntropy)
    if built_in or not objective.takes_tensor:  # the models of this package return logits
        return
    sample, output = None, None
    with suppress(Exception):  # an error in the data is reported when training reads it
        sample = checked(data.batch(0, 2, "val")).transformed()
        output = trial_output(model, sample.inputs)
    if sample is None or output is None:
        model.register_forward_hook(TakeLogits())  # unknown: take the logits if there are any
        return
    logits = TakeLogits()(model, sample.inputs, output)
    objective.check(logits, sample.targets)
    if logits is not output:
        part = "its .logits are" if logits is getattr(output, "logits", None) else "its first element is"
        note = f"model output of type {type(output).__name__}: {part} taken as the logits"
        model.register_forward_hook(TakeLogits(note))


def trial_output(model: nn.Module, inputs: Tensor) -> Any:
    """Returns the output of a copy of the model; None if it fails, because training will report the error."""
    # Try the meta device first: it needs no memory and no computation. A model that reads values of tensors fails
    # there, so run such a model on the CPU.
    for device, copied in (("meta", meta_copy), ("cpu", copy.deepcopy)):
        with suppress(Exception), rng_restored(model), torch.no_grad():
            return copied(model)(inputs.to(device))
    return None


def output_note(model: nn.Module) -> str:
    """Returns the line that says where the logits are in the model's output; empty if the output is a tensor."""
    return next((hook.note for hook in model._forward_hooks.values() if isinstance(hook, TakeLogits)), "")


def vocabulary(model: nn.Module, data: Any) -> int | None:
    """Returns the model's `vocab_size`, else the data's, else the size of the first embedding; None if unknown."""
    tables = (module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    known = declared_size("vocab_size", model, data)
    return next(tables, None) if known is None else known


def context_length(model: nn.Module, data: Any) -> int | None:
    """Returns how many tokens the model can read at once: its `block_size`, else the data's; None if unknown."""
    return declared_size("block_size", model, data)


def declared_size(name: str, *knows: Any) -> int | None:
    """Returns the attribute of the first object that has it as a whole number; None if none has."""
    return next((size for each in knows if isinstance(size := getattr(each, name, None), int)), None)


def units(modality: str | None, data: Any) -> tuple[str, str]:
    """Returns the unit of throughput and the unit of the loss, such as `("tok", "byte")`.

    Args:
        modality: what the data's YAML says that it gives; None if it says nothing.
        data: the data set.
    """
    if modality == "images":
        return "img", "image"
    # without a modality, inspect one sample: a single target is a class, several targets are text
    if modality is None:
        targets = checked(data.batch(0, 1, "val")).targets
        if targets.ndim == 1 or targets.is_floating_point():
            return "sample", "sample"
    return "tok", "byte" if getattr(data, "vocab_size", None) == 256 else "token"  # 256 ids: text as raw bytes


def cost(model: nn.Module, data: Any) -> tuple[float, int] | None:
    """Returns the training FLOPs of a sample, and its units of throughput; None if they cannot be counted."""
    try:
        sample = checked(data.batch(0, 1, "val")).transformed()
    except Exception:  # an error in the data is reported when training reads it
        return None
    flops = flops_per_sample(model, sample.inputs)
    return None if flops is None else (flops, sample.units)


def checked(batch: Any) -> Batch:
    """Returns the batch unchanged if it keeps the contract.

    Raises:
        ConfigError: the batch breaks the contract.
    """
    if not isinstance(batch, Batch):
        raise ConfigError(
            f"data: batch() returned a {type(batch).__name__}: return stabletrain.records.Batch(inputs, targets)"
        )
    for name in ("inputs", "targets"):
        value = getattr(batch, name)
        if not isinstance(value, Tensor):
            raise ConfigError(f"data: {name} is a {type(value).__name__}, not a tensor: stack its elements into one")
    if len(batch.inputs) != len(batch.targets):
        raise ConfigError(
            f"data: a batch has {len(batch.inputs)} inputs and {len(batch.targets)} targets: return one target "
            "per input"
        )
    return batch


def first_rows(data: Any, step: int, size: int, split: str, count: int | None = None) -> Batch:
    """Returns the first `count` samples of a batch, all by default; always all if the data set has no `rows`."""
    rows = slice(0, size if count is None else count)
    return checked(data.rows(step, size, split, rows) if reads_rows(data) else data.batch(step, size, split))


def val_batches(data: Any, size: int, limit: int | None) -> int:
    """Returns the number of batches in an evaluation, at most `limit`."""
    count = data.batches(size, "val") if hasattr(data, "batches") else DEFAULT_VAL_BATCHES
    return min(count, limit or count)


def validation(
    data: Any, size: int, limit: int | None, ranks: Ranks, show: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Batch]:
    """Yields this rank's share of the validation split, or of its first `limit` batches, in a fixed order.

    Every rank gets the same number of batches. A rank that runs out of batches repeats the last batch, marked as one
    that does not count.

    Args:
        show: called with the number of batches done and the total number, before each batch and at the end.
    """
    count = val_batches(data, size, limit)
    for first in range(0, count, ranks.world_size):
        show(first, count)
        number = first + ranks.rank
        batch = first_rows(data, min(number, count - 1), size, "val")
        # all ranks must run equally many forward passes, because each pass gathers sharded weights from all of them
        yield batch if number < count else batch.counting(0)
    show(count, count)
