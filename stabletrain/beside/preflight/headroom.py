"""How near the numbers are to the edge of their precision, and eps to what it is added to.

- Range: weights and layers' outputs in fp16 against its largest number; gradients under the loop's loss scale against
  those under a larger one, which are the same but for what fp16 made 0.
- Eps: the optimizer's update against that with eps=0, after one step; a norm's variance against its eps.
- Softmax: what is left for all but the largest score; the first loss against that of equal scores.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.loop import Loop, Maker
from stabletrain.beside.preflight.recording import users_line
from stabletrain.beside.preflight.tracing import running, without_compiler

LARGEST = torch.finfo(torch.float16).max
NEAR = LARGEST / 8
"""A number in fp16 from which on 3 bits are left: other batches and the first steps easily make it 8 times larger."""

LOST = 0.1
"""Share of a parameter's gradient that fp16 may lose; its rounding loses 0.001 at most."""

RAISE = 2.0**12
"""How much larger the loss scale is, at first, with which gradients are compared."""

SMALL = 0.1
"""A step that eps makes smaller than this share is not the step that the optimizer is named for."""

MEANT = 1e-3
"""The same if eps is not the optimizer's own default: published ones, as 1e-3 for RMSprop, leave a hundredth."""

FLAT = 30
"""How many times eps is a norm's variance; then the output's spread is 0.18 in place of 1."""

SOFT = 0.05
"""Mean of 1 - sum p^2 over a softmax's rows, below which it is one-hot: of two equal scores it is 0.5."""

APART = 50.0
"""Difference between a softmax's largest and smallest score above which one-hot is not learnt but made by the scale."""

TOO_FAR = 1000.0
"""The same at which no meaning is left: exp(-1000) is 0 in every precision; a temperature of 0.01 gives 200."""

SURPRISED, NATS = 30, 100.0
"""How many times the loss of equal scores the first loss is, or how much more: the logits are large, and wrong. CLIP
multiplies similarities by 100 at most: then random features have some 10 times the loss, and at most 100 more."""

MASKED = -5000.0
"""Scores below are those of a mask: -1e4, -1e9, the smallest number of a type, or -inf."""

ROWS = 4096
"""Most rows of a softmax that are looked at."""

MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""Names of the second moment in the state of Adam and its kin, RMSprop, Adagrad."""

PRODUCTS = {"mm", "addmm", "bmm", "convolution", "mv", "linear"}
"""Operations that multiply with weights; not `baddbmm`, to which attention gives its mask of -inf."""

SOFTMAXES = {"_softmax", "_safe_softmax", "_log_softmax"}
NORMS = {
    *("native_layer_norm", "native_batch_norm", "native_group_norm", "_fused_rms_norm"),
    *("_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"),
}
"""Operations whose third result, or last one, is 1 / sqrt(variance + eps)."""


def check(make: Maker) -> list[Finding]:
    """Checks a loop with one batch, and one step."""
    loop = make()
    batch = loop.batch(0)
    found = _of_weights(loop.model, loop.precision)
    numerics = watch(loop, batch)
    found += numerics.found()
    if loop.precision.startswith("fp16"):
        found += _lost_gradients(make)
    if loop.step is not None:
        with without_compiler():
            loop.step(batch if loop.next_batch is None else loop.next_batch())
    found += _of_zero_eps(loop.optimizers) or _of_moments(loop.optimizers)
    text = f"largest output of a layer {numerics.largest:.3g}, largest difference of scores {numerics.apart:.3g}"
    return found or [Finding("headroom", "passed", text)]


def headroom_of(model: nn.Module, optimizers: Sequence[Optimizer], precision: str) -> list[Finding]:
    """Checks weights against the precision's range, and eps against the moments' type; calls and changes nothing.

    Args:
        model: whose weights are trained.
        optimizers: of these weights, with their state or before the first step.
        precision: as that of a `Loop`.
    """
    found = [*_of_weights(model, precision), *_of_zero_eps(optimizers), *_of_moments(optimizers)]
    return found or [Finding("headroom", "passed", f"weights and eps have room in {precision}")]


# ---- range


def _of_weights(model: nn.Module, precision: str) -> list[Finding]:
    """Finds weights near the largest number of fp16: those in fp16, and those that autocast casts to it."""
    large = {}
    for name, weight in model.named_parameters():
        cast = precision == "fp16" and weight.ndim > 1
        if weight.numel() and weight.is_floating_point() and (weight.dtype == torch.float16 or cast):
            size = float(weight.detach().abs().max())
            if size >= NEAR:
                large[name] = size
    if not large:
        return []
    text = f"{listed([*large])} reach {max(large.values()):.4g} in fp16, whose largest number is {LARGEST:.0f}"
    fix = "scale the layer's input in place of its weights, or use bf16"
    return [Finding("headroom", "fault", text, tuple(large), "", fix)]


def _lost_gradients(make: Maker) -> list[Finding]:
    """Finds gradients that are 0 or inexact in fp16 at the loop's loss scale, by those at a larger scale."""
    loop = make()
    scale = loop.scaler.get_scale() if loop.scaler is not None and loop.scaler.is_enabled() else 1.0
    ours = _gradients(loop, scale)
    if not _finite(ours):  # the first step will be skipped, and the scale lowered
        return []
    for larger in (scale * RAISE, scale * RAISE / 16, scale * RAISE / 256):
        theirs = _gradients(make(), larger)
        if _finite(theirs):
            break
    else:
        return []
    lost = _apart(ours, theirs)
    # What the larger scale saved is the same at half of it; not so if a hook clips, whose gradients differ at each.
    if not lost or _apart(_gradients(make(), larger / 2), theirs).keys() & lost.keys():
        return []
    worst = max(lost, key=lambda name: lost[name])
    zero = float(((ours[worst] == 0) & (theirs[worst] != 0)).double().mean())
    text = f"gradients of {listed([*lost])} are below fp16's smallest numbers at the loss scale {scale:g}: of {worst}"
    text += f" {lost[worst]:.0%} is lost, and {zero:.0%} of it are 0 that are not 0 at {larger:g}"
    fix = f"raise the loss scale: GradScaler(init_scale={larger:g})"
    return [Finding("headroom", "fault", text, ("scaler", *lost), "", fix)]


def _gradients(loop: Loop, scale: float) -> dict[str, Tensor]:
    """Returns the gradients of a batch under a loss scale, which is divided out, in fp64."""
    with without_compiler():
        (loop.loss(loop.batch(0)).float() * scale).backward()
    named = loop.parameters.items()
    return {name: each.grad.double() / scale for name, each in named if each.grad is not None}


def _finite(gradients: Mapping[str, Tensor]) -> bool:
    return all(bool(each.isfinite().all()) for each in gradients.values())


def _apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the parameters whose gradients differ by more than LOST of their norm, and by how much."""
    # Only of matrices: the gradient of a bias before a norm is nothing but rounding.
    names = [name for name, each in theirs.items() if name in ours and each.ndim > 1 and bool(each.any())]
    sizes = {name: float(theirs[name].square().mean().sqrt()) for name in names}
    usual = sorted(sizes.values())[len(sizes) // 2] if sizes else 0.0
    apart = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in names}
    return {name: each for name, each in apart.items() if each > LOST and sizes[name] > usual / 1000}


# ---- eps


def _of_zero_eps(optimizers: Sequence[Optimizer]) -> list[Finding]:
    """Finds an eps that is 0 in the type of the moments that it is added to."""
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            eps = group.get("eps")
            # A fused step computes in fp32. Other optimizers than PyTorch's may keep their moments in another type.
            if not isinstance(eps, float) or eps == 0 or group.get("fused"):
                continue
            known = type(optimizer).__module__.startswith("torch.optim")
            moments = [_moment(optimizer, each) for each in group["params"]]
            types = {each.dtype for each in moments if each is not None}
            types = types or ({each.dtype for each in group["params"]} if known else set())
            for dtype in types:
                if float(torch.tensor(eps, dtype=dtype)) == 0:
                    place = f"optimizers.{index}.param_groups[{number}].eps"
                    text = f"eps={eps:g} is 0 in {str(dtype).removeprefix('torch.')}, the type of the second moments:"
                    text += " where they are 0, the step divides by 0"
                    fix = "keep weights and moments in fp32, with autocast; or set eps=1e-4"
                    return [Finding("headroom", "fault", text, (place,), "", fix)]
    return []


def _of_moments(optimizers: Sequence[Optimizer]) -> list[Finding]:
    """Finds an eps so far above the roots of the second moments that the step is not the optimizer's any more."""
    found = []
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            eps = group.get("eps")
            roots = [each for each in (_roots(optimizer, group, each) for each in group["params"]) if each is not None]
            if not roots or not isinstance(eps, float) or not torch.cat(roots).numel():
                continue
            sizes = torch.cat(roots)
            kept = sizes / (sizes + eps)
            parameter = inspect.signature(type(optimizer).__init__).parameters.get("eps")
            default = parameter is not None and parameter.default == eps
            # 90 %: some weights may have tiny gradients in any loop, but not nearly all.
            most = float(kept.sort().values[int(0.9 * len(kept))])
            if most >= SMALL:
                continue
            certain = most < (SMALL if default else MEANT)
            text = (
                f"eps={eps:g} is far above the root of the second moments, {float(sizes.median()):.2g} in the middle:"
            )
            text += f" it makes nine of ten updates less than {most:.1g} of what they are with eps=0"
            fix = "make the loss larger (a mean in place of a sum that is divided by too much), or eps smaller"
            place = f"optimizers.{index}.param_groups[{number}].eps"
            found.append(Finding("headroom", "fault" if certain else "note", text, (place,), "", fix))
    return found


def _moment(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    """Returns the second moment of a parameter, if the optimizer has one of a known name."""
    state = optimizer.state.get(parameter, {})
    found = [state[name] for name in MOMENTS if isinstance(state.get(name), Tensor)]
    return found[0] if found and found[0].shape == parameter.shape else None


def _roots(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    """Returns roots of the second moment that are not 0, as the step divides by them; at most ROWS of a parameter."""
    moment = _moment(optimizer, parameter)
    if moment is None:
        return None
    values = moment.detach().double().flatten()
    values = values[:: max(len(values) // ROWS, 1)]
    step = optimizer.state[parameter].get("step")
    if "betas" in group and step is not None:
        values = values / (1 - group["betas"][1] ** float(step))
    return values[values > 0].sqrt().cpu()


# ---- activations, norms and softmaxes


@dataclass(frozen=True)
class Seen:
    """A number that was seen in a module: a size, and what belongs to it."""

    module: str
    line: str
    size: float
    other: float = 0.0


class Numerics(TorchDispatchMode):
    """Measures what the operations of a forward pass get and give.

    Attributes:
        modules: names of the modules that are running.
        largest: largest output of a layer.
        apart: largest difference of a softmax's scores, as a median over its rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []
        self.largest = self.apart = 0.0
        self._near: list[Seen] = []
        self._near_inputs: list[Seen] = []
        self._flat: list[Seen] = []
        self._hard: list[Seen] = []
        self._wrong: list[Seen] = []
        self._layer = ""
        self._added: tuple[Any, float] = (None, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Runs the operation unchanged."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        if name in PRODUCTS:
            self._layer = self.modules[-1] if self.modules else ""
            self._see_output(out, given)
        elif name in NORMS:
            self._see_norm(given, out[-1] if name == "_fused_rms_norm" else out[2])
        elif name in SOFTMAXES and given["self"].numel() > 1:
            self._see_scores(given["self"].movedim(given["dim"], -1), loss=name == "_log_softmax")
        elif "scaled_dot_product" in name and "backward" not in name:
            self._see_scores(_scores(given), loss=False)
        elif name in ("nll_loss_forward", "nll_loss2d_forward"):
            self._see_loss(
                given["self"].movedim(min(1, given["self"].ndim - 1), -1), given["target"], given["ignore_index"]
            )
        elif name == "binary_cross_entropy_with_logits":
            self._see_logits(given["self"], given["target"])
        elif name == "add" and isinstance(given.get("other"), float):
            self._added = (out, given["other"])
        elif name == "rsqrt" and given["self"] is self._added[0] and 0 < self._added[1] < 1e-2:
            # A norm by hand: 1 / sqrt(mean square + eps).
            self._see_norm({"eps": self._added[1]}, given["self"].detach().double().rsqrt())
        return out

    def _seen(self, size: float, other: float = 0.0) -> Seen:
        return Seen(self.modules[-1] if self.modules else "", users_line(), size, other)

    def _see_output(self, out: Tensor, given: Mapping[str, Any]) -> None:
        for each in given.values():  # such as a time in fp32, which autocast casts
            if isinstance(each, Tensor) and each.dtype == torch.float16 and each.numel():
                size = float(each.detach().abs().max())
                if not size < NEAR:
                    self._near_inputs.append(self._seen(size))
        if out.numel() and out.is_floating_point():
            size = float(out.detach().abs().max())
            self.largest = max(self.largest, size)
            if out.dtype == torch.float16 and not size < NEAR:
                self._near.append(self._seen(size))

    def _see_norm(self, given: Mapping[str, Any], inverse: Tensor) -> None:
        eps = given.get("eps", given.get("epsilon"))
        if not eps or not inverse.numel():  # in eval mode BatchNorm gives none
            return
        share = eps * inverse.detach().double().square()  # eps / (variance + eps)
        share = share[share < 1 - 1e-6]  # a variance of 0 is that of a layer that begins at 0
        if share.numel() and float(share.median()) > FLAT / (FLAT + 1):
            self._flat.append(self._seen(eps * (1 / float(share.median()) - 1), eps))

    def _see_scores(self, scores: Tensor, loss: bool) -> None:
        rows = scores.detach().reshape(-1, scores.shape[-1])
        rows = rows[:: max(len(rows) // ROWS, 1)].float()
        rows = rows[(rows > MASKED).sum(1) > 1]
        masked = ~(rows > MASKED)
        if not rows.numel():
            return
        apart = float((rows.amax(1) - rows.masked_fill(masked, math.inf).amin(1)).median())
        left = float((1 - rows.masked_fill(masked, -math.inf).softmax(1).square().sum(1)).mean())
        self.apart = max(self.apart, apart)
        if apart > TOO_FAR or (apart > APART and left < SOFT and not loss):
            self._hard.append(self._seen(apart, left))

    def _see_loss(self, logs: Tensor, target: Tensor, ignored: int) -> None:
        logs = logs if logs.ndim > 1 else logs[None]
        target = target.reshape(logs.shape[:-1])
        kept = (target != ignored) & (target >= 0) & (target < logs.shape[-1])
        losses = -logs.detach().float()[kept].gather(1, target[kept][:, None])
        classes = logs.shape[-1]
        self._see_surprise(losses, math.log(max(classes, 1)))

    def _see_logits(self, logits: Tensor, target: Tensor) -> None:
        losses = nn.functional.binary_cross_entropy_with_logits(logits.detach(), target.detach(), reduction="none")
        self._see_surprise(losses.float(), math.log(2))

    def _see_surprise(self, losses: Tensor, equal: float) -> None:
        losses = losses[losses.isfinite()]
        if losses.numel() and equal > 0 and float(losses.mean()) > min(SURPRISED * equal, equal + NATS):
            self._wrong.append(Seen(self._layer, users_line(), float(losses.mean()), equal))

    def found(self) -> list[Finding]:
        """Returns what is wrong."""
        found = []
        near = self._near or self._near_inputs  # where an output is near, it is the input of what comes next
        if near:
            size, what = max(each.size for each in near), "outputs" if self._near else "inputs"
            text = f"{what} of {_named(near)} reach {size:.4g} in fp16, whose largest number is {LARGEST:.0f}"
            found.append(_fault(text, near, "scale the layer's weights or input down, or use bf16"))
        if self._flat:
            worst = min(self._flat, key=lambda each: each.size / each.other)
            text = f"the input of {_named(self._flat)} has a variance of {worst.size:.2g}, far below"
            text += f" eps={worst.other:g}: its output is not normalized"
            found.append(
                _fault(text, self._flat, "make its input larger (the init of what is before it), or eps smaller")
            )
        if self._hard:
            worst = max(self._hard, key=lambda each: each.size)
            text = (
                f"scores of the softmax in {_named(self._hard)} are {worst.size:.3g} apart, and all but the largest get"
            )
            text += f" {worst.other:.1g} of the weight: where it is one-hot, nothing before it gets a gradient"
            fix = "divide the scores by sqrt(d), raise the temperature, or make the init of what gives them smaller"
            found.append(_fault(text, self._hard, fix))
        if self._wrong:
            worst = max(self._wrong, key=lambda each: each.size / each.other)
            text = f"the first loss is {worst.size:.3g}, where equal scores have {worst.other:.3g}: the scores that"
            text += f" {_named(self._wrong)} gives to the loss's softmax (cross_entropy) are large, and wrong"
            found.append(
                _fault(text, self._wrong, "make the init of the last layer smaller, or the temperature higher")
            )
        return found


def _fault(text: str, seen: Sequence[Seen], fix: str) -> Finding:
    places = tuple(dict.fromkeys(each.module for each in seen if each.module))
    return Finding("headroom", "fault", text, places, seen[0].line, fix)


def _named(seen: Sequence[Seen]) -> str:
    """Returns the modules' names for a text."""
    return listed(list(dict.fromkeys(each.module or "the model" for each in seen)))


def _scores(given: Mapping[str, Any]) -> Tensor:
    """Returns the scores of an attention of which only queries and keys are known, of the first row of the batch."""
    q, k = given["query"][:1].detach().float(), given["key"][:1].detach().float()
    scores = q @ k.transpose(-1, -2) * (given.get("scale") or q.shape[-1] ** -0.5)
    if given.get("is_causal"):
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores


def watch(loop: Loop, batch: Any) -> Numerics:
    """Calls the loss with a batch, and returns what was measured."""
    numerics = Numerics()
    with running(loop.model) as numerics.modules, without_compiler(), numerics:
        loop.loss(batch)
    return numerics
