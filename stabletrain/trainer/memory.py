"""Refuses a run that cannot fit into memory, before anything large is allocated.

    lower bound = weights + gradients + moments of the optimizer + average of the weights + this rank's batch

Activations come on top, so a run above this bound cannot train. The weights are counted on the meta device, which
allocates nothing. A deep model of this package is built there with a few layers, and the others are extrapolated. Any
other model is built there whole; one that cannot be is not checked.
"""

import contextlib
import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.config.make import Choice
from stabletrain.errors import ConfigError
from stabletrain.machine.determinism import rng_restored
from stabletrain.machine.hardware import device_memory
from stabletrain.machine.memory import host_memory
from stabletrain.records import reads_rows
from stabletrain.trainer.options import Options

DEPTH = {
    "stabletrain.models.gpt.GPT": ("n_layer", 1, 1),
    "stabletrain.models.resnet.CifarResNet": ("depth", 6, 8),
    "stabletrain.models.nf_resnet.NFResNet": ("depth", 6, 8),
}
"""The key of the number of layers, by class; by how much it grows, and the least. The weights grow evenly with it."""

DEEP = 64
"""Layers above which a model is not built whole."""

MOMENTS = {"AdamW": 2, "StableAdamW": 2, "SPAM": 2, "Muon": 1}
"""How many numbers, at least, these optimizers keep for each weight; others may keep none."""


@dataclass(frozen=True)
class Weights:
    """Sizes of a model's parameters in bytes; `inf` if they are beyond any memory.

    Attributes:
        all: all parameters.
        trained: those that get gradients.
    """

    all: float
    trained: float

    def extrapolated(self, more: "Weights", times: int) -> "Weights":
        """Returns the sizes after growing `times` more by the difference to `more`."""
        return Weights(self.all + times * (more.all - self.all), self.trained + times * (more.trained - self.trained))


SLOW = 1000, 4e9
"""Number of layers, and bytes of weights, from which a model takes so long to build that the user is told first."""


def check_memory(options: Options, process: Any, data: Any, sizes: Mapping[str, Any]) -> str:
    """Checks that weights, gradients, moments and one batch fit into the memory of the device and of the host.

    Args:
        options: of the run.
        process: of `stages.py`.
        data: the data set.
        sizes: the model's sizes that are taken from the data.

    Returns:
        a line that says what is going to be built, if that takes long; else empty.

    Raises:
        ConfigError: names what is too large, what it needs at least, and what there is.
    """
    weights = weights_of(options.model, sizes)
    if weights is None:
        return ""
    ranks, device = process.ranks, process.device
    key = depth_key(options.model)
    depth = options.model.node[key] if key else 0
    called = f"model={options.choices['model']}"
    deep = f"{called} with model.{key}={depth}" if key else called
    shards = process.parallel.shards
    half = 0.5 if options.choices.get("precision") == "bf16_params" and shards == 1 else 1
    batch = batch_bytes(options.batch_size, process, data)
    averages = weights.trained if options.choices.get("averaging", "none") != "none" else 0  # in fp32
    training = (half * (weights.all + (1 + moments(options.optimizer)) * weights.trained) + averages) / shards

    def refuse_above(limit: float, model: float, batch: float, has: str) -> None:
        if model + batch <= limit:
            return
        what, fix = deep, f"choose a smaller model{', or fewer layers' if key else ''}"
        if batch > model:
            what, fix = f"batch_size={options.batch_size}", "lower batch_size"
        raise ConfigError(
            f"{what} cannot be trained: weights, gradients and moments need {gigabytes(model)} or more and one batch "
            f"{gigabytes(batch)}, but {has} {gigabytes(limit)} of memory: {fix}"
        )

    on_host = training
    if device.type == "cuda":
        refuse_above(device_memory(device), training, batch, f"{device} has")
        on_host = 0  # the host only builds the weights, and loads the batch
    here = ranks.local_world_size  # each of these ranks builds the whole model
    refuse_above(host_memory(), here * max(weights.all, on_host), here * batch, "this process may use")
    if depth < SLOW[0] and weights.all < SLOW[1]:
        return ""
    return f"building {deep}: weights {gigabytes(weights.all)}, in training {gigabytes(training)} or more"


def gigabytes(size: float) -> str:
    """Formats a number of bytes: `315 GB`, `less than 0.01 GB`; without digits beyond 2^63 bytes."""
    if size < 1e7:
        return "less than 0.01 GB"
    return f"{float(f'{size / 1e9:.3g}'):,g} GB" if size < 2.0**63 else "more than 9 billion GB"


def moments(optimizer: Choice[Any]) -> int:
    """Returns how many numbers the optimizer keeps for each weight, at least."""
    module, _, name = optimizer.target.rpartition(".")
    if not module.startswith("stabletrain."):
        return 0
    return int(bool(optimizer.node.get("momentum"))) if name == "SGD" else MOMENTS.get(name, 0)


def batch_bytes(batch_size: int, process: Any, data: Any) -> float:
    """Returns the bytes of this rank's batch; 0 if the data does not return as many samples as it is asked for."""
    try:
        sample = data.batch(0, 2, "val")
        tensors: list[Tensor] = [sample.inputs, sample.targets]
        if len(sample) != 2:
            return 0
        storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}  # views share memory
    except Exception:  # an error in the data is reported when training reads it
        return 0
    rows = process.parallel.rows(batch_size) if reads_rows(data) else slice(0, batch_size)
    return sum(storages.values()) / 2 * (rows.stop - rows.start)


def depth_key(model: Choice[Any]) -> str:
    """Returns the key of the model's number of layers; empty for a model that is not of this package."""
    return DEPTH.get(path_of(model.code), ("",))[0]


def path_of(code: Any) -> str:
    """Returns the import path of a class. With it, no class has to be imported to be recognized."""
    return ".".join(getattr(code, name, "") for name in ("__module__", "__qualname__"))


def weights_of(model: Choice[Any], sizes: Mapping[str, Any]) -> Weights | None:
    """Returns the sizes of the model's parameters; None if it cannot be built on the meta device."""
    if not (name := depth_key(model)):
        return on_meta(model, sizes)
    _, grows, least = DEPTH[path_of(model.code)]
    depth = model.node[name]
    if depth < least or depth % grows != least % grows or depth <= DEEP * grows:
        return on_meta(model, sizes)
    small, larger = (on_meta(model, {**sizes, name: least + more}) for more in (0, grows))
    return small if small is None or larger is None else small.extrapolated(larger, (depth - least) // grows)


def on_meta(choice: Choice[Any], sizes: Mapping[str, Any]) -> Weights | None:
    """Builds the model on the meta device and returns the sizes of its parameters; None if that fails."""
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(rng_restored(nn.Module()))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # a constructor may print
            stack.enter_context(torch.device("meta"))
            model = choice.build(**sizes)
        parameters = list(model.parameters())
    except Exception as error:  # whatever is wrong with the model, building it says
        own = choice.target.startswith("stabletrain.")
        too_large = "Storage size calculation overflowed" in str(error)
        return Weights(math.inf, math.inf) if own and too_large else None
    return Weights(
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
    )
