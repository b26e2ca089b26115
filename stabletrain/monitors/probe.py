"""Inspects one step in several parts, and combines their results into alarms.

Each part may fail without affecting the others. It computes on the device, synchronises with the host once, and
returns metrics by name. What compares the weights after an update with those before it is a method of `Gradients`,
which `measure_gradients` returns before the update.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.monitors import curvature, growth
from stabletrain.monitors.curvature import along_update, margin
from stabletrain.monitors.forward import (
    block_names,
    headroom,
    isolated,
    isolated_forward,
    log_z,
    recording_activations,
    recording_attention,
    recording_norms,
)
from stabletrain.monitors.module_groups import blocks, by_place, trained
from stabletrain.monitors.tensor_norms import Adaptive, norms, zero_shares
from stabletrain.records import Batch

Metrics = dict[str, float]
"""Metrics by full name."""

Sizes = dict[str, dict[str, float]]
"""Numbers by quantity, then by module group in the order of the forward pass."""


@runtime_checkable
class Forward(Protocol):
    """Autocast settings of the forward pass; see `stability/precision/`."""

    def autocast(self) -> AbstractContextManager: ...


@runtime_checkable
class Loss(Protocol):
    """The loss of a run; see `stability/objective/`."""

    @property
    def softmax(self) -> bool: ...
    @property
    def plain(self) -> "Loss": ...
    def __call__(self, outputs: Any, batch: Batch, n_valid: Tensor) -> Any: ...


@dataclass(frozen=True)
class Part:
    """What one part of an inspection has measured.

    Attributes:
        metrics: by full name.
        sizes: what the alarms compare.
        blocks: the model's blocks in the order of the forward pass; empty if this part does not know them.
        low_precision: `fp16` or `fp8` if the forward pass runs in it; empty if not, or if this part does not know.
    """

    metrics: Metrics
    sizes: Sizes = field(default_factory=dict)
    blocks: Sequence[str] = ()
    low_precision: str = ""


@dataclass(frozen=True)
class Gradients(Part):
    """The raw gradients, and the weights before the update, with which those after it are compared.

    Attributes:
        norms, weight_norms: by parameter.
        weights: copies of the parameters, by name.
    """

    norms: Mapping[str, float] = field(default_factory=dict)
    weight_norms: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def updates(self, model: nn.Module, optimizer: Optimizer) -> Part:
        """Measures ratios of updates to weights, and of gradients to Adam's denominator, after the update."""
        parameters, watched = trained(model), blocks(model)
        moved = torch._foreach_sub([*parameters.values()], [*self.weights.values()])
        adaptive = Adaptive(optimizer, parameters)
        parts = [norms([*moved])]  # collected on the device: `torch.cat(parts).tolist()` is the only synchronisation
        if adaptive.names:
            parts += [norms(adaptive.gradients), adaptive.g_over_sqrt_v()]
        read = torch.cat(parts).tolist()
        count, adapted = len(parameters), len(adaptive.names)
        lengths = dict(zip(parameters, read[:count], strict=True))
        clipped = dict(zip(adaptive.names, read[count : count + adapted], strict=True))
        stale = dict(zip(adaptive.names, read[count + adapted :], strict=True))
        # With eps=0 no gradient is below it: such a parameter has no ratio.
        eps = {name: each for name, each in zip(adaptive.names, adaptive.eps, strict=True) if each > 0}
        numel = {name: p.numel() for name, p in parameters.items()}

        ratio = {}
        for where, names in by_place(parameters, watched).items():
            weights = root_sum(self.weight_norms[name] for name in names)
            if weights:  # a place whose weights are all zero-initialised has no ratio yet
                ratio[where] = root_sum(lengths[name] for name in names) / weights
        found: Sizes = {"update_ratio": ratio, "g_over_sqrt_v": {}}
        over_eps = {}
        for where, names in by_place(adaptive.names, watched).items():
            size = sum(numel[name] for name in names)
            squares = sum(numel[name] * stale[name] ** 2 for name in names)
            found["g_over_sqrt_v"][where] = (squares / size) ** 0.5
            size = sum(numel[name] for name in names if name in eps)
            if size:
                over_eps[where] = root_sum(clipped[name] / eps[name] for name in names if name in eps) / size**0.5
        metrics = {
            **spread(found),
            **over_all("update_ratio_max", np.max, ratio),
            **over_all("g_over_sqrt_v_max", np.max, stale),
            **over_all("grad_over_eps_min", np.min, {n: clipped[n] / eps[n] / numel[n] ** 0.5 for n in eps}),
        }
        return Part(metrics, {"grad_over_eps": over_eps})

    def update_margin(self, model: nn.Module, batch: Batch, objective: Loss) -> Part:
        """Searches along the update for the length at which the loss rises, after the update; see `curvature.py`.

        No metric with sharded parameters.
        """
        if any(hasattr(p, "to_local") for p in self.weights.values()):
            return Part({})
        with isolated(model):
            along = along_update(model, dict(self.weights), batch, objective.plain)
            return Part({"monitors/update_margin": margin(along)})

    def layers(self) -> Part:
        """Returns gradient norm and weight norm of every parameter."""
        return Part(spread({"layer_grad_norm": {**self.norms}, "layer_weight_norm": {**self.weight_norms}}))


def low_precision(precision: Forward, device: str) -> str:
    """Returns `fp16` or `fp8` if the forward pass runs in it on a device type; else an empty string."""
    if getattr(precision, "name", "") == "fp8":
        return "fp8"
    with precision.autocast():
        fp16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    return "fp16" if fp16 else ""


@torch.no_grad()
def measure_forward(model: nn.Module, batch: Batch, precision: Forward, objective: Loss) -> Part:
    """Measures activations, attention and, for logits, log Z of one micro-batch in an isolated forward pass."""
    watched = blocks(model)
    with (
        isolated(model),
        recording_activations(watched) as heard,
        recording_norms(watched) as norm_variances,
        recording_attention(model) as heads,
    ):
        with precision.autocast():
            output = isolated_forward(model, batch.inputs)
        z = log_z(output, batch.targets) if objective.softmax else ()
    name_of = block_names(heads, watched)
    values = {("activation_rms", name): value for name, value in heard.rms.items()}
    values |= {("activation_absmax", name): value for name, value in heard.absmax.items()}
    values |= {("norm_variance", name): value for name, value in norm_variances.items()}
    for name, head in heads.items():
        values[("attn_logit_bound", name_of[name])] = head.bound.amax()
        values[("attn_logit_max", name_of[name])] = head.largest.amax()
        values[("attn_entropy", name_of[name])] = head.entropy.mean()
        values[("attn_entropy_min", name_of[name])] = head.entropy.amin()
    read = torch.stack([*values.values(), *z]).tolist() if values or z else []  # the only host synchronisation
    sizes, z = read[: len(values)], read[len(values) :]
    found: Sizes = {}
    for (what, name), size in zip(values, sizes, strict=True):
        found.setdefault(what, {})[name] = size
    found["headroom"] = {name: headroom(size) for name, size in found.get("activation_absmax", {}).items()}
    metrics = {
        **spread(found),
        **over_all("activation_rms_max", np.max, found.get("activation_rms", {})),
        **over_all("headroom_min", np.min, found["headroom"]),
        **over_all("norm_variance_min", np.min, found.get("norm_variance", {})),
        **over_all("attn_logit_bound", np.max, found.get("attn_logit_bound", {})),
        **over_all("attn_logit_max", np.max, found.get("attn_logit_max", {})),
        **dict(zip(("monitors/log_z_mean", "monitors/log_z_max"), z, strict=False)),
    }
    return Part(metrics, found, [*found.get("activation_rms", {})], low_precision(precision, batch.targets.device.type))


@torch.no_grad()
def measure_gradients(model: nn.Module) -> Gradients:
    """Measures norms of raw gradients and weights, and zero gradients, before the update; copies the weights."""
    parameters, watched = trained(model), blocks(model)
    values, count = [*parameters.values()], len(parameters)
    gradients = [p.grad for p in values if p.grad is not None]
    read = torch.cat([norms(gradients), zero_shares(gradients), norms(values)]).tolist()
    gradient_norms = dict(zip(parameters, read[:count], strict=True))
    zeros = dict(zip(parameters, read[count : 2 * count], strict=True))
    weight_norms = dict(zip(parameters, read[2 * count :], strict=True))
    found: Sizes = {"grad_norm": {}, "zero_grads": {}, "weight_rms": {}}
    grad_rms = {}
    for where, names in by_place(parameters, watched).items():
        sizes = {name: parameters[name].numel() for name in names}
        found["grad_norm"][where] = whole = root_sum(gradient_norms[name] for name in names)
        found["zero_grads"][where] = sum(zeros[n] * size for n, size in sizes.items()) / sum(sizes.values())
        grad_rms[where] = whole / sum(sizes.values()) ** 0.5
        found["weight_rms"][where] = root_sum(weight_norms[name] for name in names) / sum(sizes.values()) ** 0.5
    everywhere = sum(zeros[name] * p.numel() for name, p in parameters.items()) / sum(p.numel() for p in values)
    return Gradients(
        spread(found) | {"monitors/zero_grads": everywhere},
        {**found, "grad_rms": grad_rms},
        [*watched],
        norms=gradient_norms,
        weight_norms=weight_norms,
        weights={name: p.clone() for name, p in parameters.items()},
    )


def measure_hessian(model: nn.Module, batch: Batch, objective: Loss, iterations: int, samples: int) -> Part:
    """Measures the top eigenvalue of the loss's Hessian in an isolated forward pass."""
    with isolated(model):
        top = curvature.of_loss(model, batch, objective.plain, iterations, samples)
    return Part({"monitors/hessian_top": top.item()})


AnyPart = TypeVar("AnyPart", bound=Part)


class Probe:
    """One inspection of one step: collects its parts, and judges them together.

    Attributes:
        metrics: metrics measured so far, by name.
        failure: why some metrics are missing, in one line; None if none are.
    """

    def __init__(self) -> None:
        self.metrics: Metrics = {}
        self.failure: str | None = None
        self._sizes: Sizes = {}
        self._blocks: Sequence[str] = ()
        self._low_precision = ""

    def attempt(self, what: str, measure: Callable[[], AnyPart]) -> AnyPart | None:
        """Measures a part and returns it; if that fails, records why and returns None."""
        try:
            part = measure()
        except Exception as error:  # a user's model may raise anything, and monitors must not end a run
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.failure = self.failure or (
                f"the monitors could not measure {what} ({reason}); training continues without these metrics"
            )
            return None
        self.metrics |= part.metrics
        self._sizes |= part.sizes
        self._blocks = self._blocks or part.blocks
        self._low_precision = self._low_precision or part.low_precision
        return part

    def signs(self, applied: bool) -> dict[str, str | None]:
        """Returns the text of each alarm by kind, None for each that does not hold.

        `starving` (gradients too small) is an alarm only if it holds for several inspections.
        """
        # Gradients of a skipped step may have any value: do not judge them.
        activation_rms = self._of_blocks("activation_rms")
        grad_rms = self._of_blocks("grad_rms") if applied else {}
        zeros = self._of_blocks("zero_grads") if applied else {}
        return {
            "monitors": self.failure,
            "explosion": growth.explosion(activation_rms, grad_rms),
            "vanishing": growth.vanishing(activation_rms, grad_rms),
            "attention": growth.attention(self._sizes.get("attn_logit_max", {})),
            "starving": growth.starving(
                self._of_blocks("grad_over_eps"),
                zeros,
                fp16=self._low_precision == "fp16",
                fp8=self._low_precision == "fp8",
            ),
        }

    def _of_blocks(self, what: str) -> dict[str, float]:
        """Returns the sizes of the blocks only, in the order of the forward pass."""
        sizes = self._sizes.get(what, {})
        return {name: sizes[name] for name in self._blocks if name in sizes}


def spread(sizes: Sizes) -> Metrics:
    """Names sizes as in `metrics.jsonl`."""
    return {f"monitors/{what}/{name}": size for what, found in sizes.items() for name, size in found.items()}


def over_all(name: str, pick: Callable[[list[float]], np.floating], sizes: dict[str, float]) -> Metrics:
    """Reduces the sizes of all places to one metric, NaN if any is NaN; empty without places."""
    return {f"monitors/{name}": float(pick([*sizes.values()]))} if sizes else {}


def root_sum(values: Iterable[float]) -> float:
    """Returns the norm of a concatenation from the norms of its parts."""
    return sum(value * value for value in values) ** 0.5
