"""What the loss makes of its batch: what reaches the loss functions as targets, and what reaches the first layers.

A `TorchFunctionMode` sees each PyTorch function that the loss calls. It follows the batch's tensors through them, so
that targets that are made in the loss, such as the numbers of the rows in a contrastive loss, are not taken for data.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stabletrain.beside.preflight.loop import Loop
from stabletrain.beside.preflight.recording import users_line

BY_CLASS = {"cross_entropy", "nll_loss", "multi_margin_loss"}
"""Losses whose targets are numbers of classes; the input has one column for each."""

BINARY = {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
"""Losses whose targets are shares: 0 to 1. Below and above, the loss has no minimum."""

SHARES = {"cross_entropy", "kl_div"}
"""Losses whose targets, if they are no numbers of classes, are shares that have the sum 1."""

OF_PAIRS = {"margin_ranking_loss", "cosine_embedding_loss", "hinge_embedding_loss"}
"""Losses whose targets are 1 and -1; all may be 1, if there are only pairs of one kind."""

LOSSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(sorted(BY_CLASS | BINARY | SHARES), ("input", "target")),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"), ("input", "target")),
    **dict.fromkeys(("poisson_nll_loss", "gaussian_nll_loss", "hinge_embedding_loss"), ("input", "target")),
    **dict.fromkeys(("multilabel_margin_loss", "multilabel_soft_margin_loss"), ("input", "target")),
    **dict.fromkeys(("margin_ranking_loss", "cosine_embedding_loss"), ("input1", "input2", "target")),
    "linear_cross_entropy": ("input", "linear_weight", "target"),
    "ctc_loss": ("log_probs", "targets", "input_lengths", "target_lengths", "blank"),
}
"""Loss functions that have targets, with the names of their first arguments."""

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "matmul", "__matmul__", "mm", "gru", "lstm", "rnn_tanh"}
"""Functions that multiply an input with weights; a layer's weight is the first tensor that has a gradient."""

SAME_VALUES = {
    *("float", "half", "bfloat16", "double", "to", "type", "contiguous", "flatten", "view", "reshape", "squeeze"),
    *("unsqueeze", "transpose", "permute", "__getitem__", "__get__", "log_softmax", "softmax", "sigmoid"),
}
"""Functions after which a layer's output is still a prediction; not so a difference from something, or a derivative."""

PICKS = {"__getitem__", "gather", "take_along_dim", "index_select", "embedding", "one_hot"}
"""Functions that take numbers for places in a dimension."""

JOINS = {"cat", "concat", "concatenate", "stack"}
CASTS = {"float", "half", "bfloat16", "double", "to", "type", "contiguous"}
"""Functions after which columns are still where they were."""

NO_VALUES = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
"""Functions of which the result has only the shape of what they are given, as has that of `new_zeros` and the like."""


@dataclass(frozen=True)
class Use:
    """A call of a loss function.

    Attributes:
        function: its name.
        target: what it was given as targets.
        sources: names of the batch's tensors that the targets come from; empty if they are made in the loss.
        raw: whether they are one of these tensors, with nothing done to its values.
        predicts: whether the input is the output of a layer, and not a difference from something, or a derivative.
        classes: number of classes, if the targets are numbers of classes or shares of them; else 0.
        ignored: the class number that is left out; None if the targets are no class numbers. For a CTC loss it is the
            blank, which stands where a row has no more letters.
        line: of the user's code.
    """

    function: str
    target: Tensor
    sources: tuple[str, ...]
    raw: bool
    predicts: bool
    classes: int
    ignored: int | None
    line: str


@dataclass(frozen=True)
class Input:
    """What a layer with weights is given, if it comes from the batch alone.

    Attributes:
        value: the layer's input.
        weight: of the layer.
        by_column: whether columns of the weight belong to those of the input's last dimension; else to its second one.
        sources: names of the batch's tensors that it comes from.
        module: name of the module; empty if that is the model.
        line: of the user's code.
        part: whether these are only some columns of what the layer gets; the others come from weights.
    """

    value: Tensor
    weight: Tensor
    by_column: bool
    sources: tuple[str, ...]
    module: str
    line: str
    part: bool = False


@dataclass
class Pick:
    """A call that takes numbers of the batch for places, such as `log_probs[rows, labels]`.

    Attributes:
        function: its name.
        index: the numbers.
        size: number of places.
        source: name of the batch's tensor that they come from.
        raw: whether they are that tensor, with nothing done to its values.
        line: of the user's code.
        among_classes: whether the places are classes: the dimension of a softmax.
    """

    function: str
    index: Tensor
    size: int
    source: str
    raw: bool
    line: str
    among_classes: bool = False


@dataclass
class Traced:
    """What was seen of a call of the loss.

    Attributes:
        uses: calls of loss functions.
        inputs: of the first layers.
        picks: calls that take numbers of the batch for places.
        error: that the loss has raised.
        loss: its value; NaN if it raised an error.
    """

    uses: list[Use]
    inputs: list[Input]
    picks: list[Pick]
    error: Exception | None = None
    loss: float = float("nan")


@dataclass(frozen=True)
class _Part:
    """A tensor of the batch that is a part of another one: in this dimension, from this place on."""

    tensor: Tensor
    sources: tuple[str, ...]
    dim: int
    start: int


def trace(loop: Loop, batch: Any, *, moved: bool = False, bounded: bool = False) -> Traced:
    """Calls the loss with a batch; an error that it raises is returned.

    Args:
        loop: whose loss is called.
        batch: of the loop.
        moved: whether numbers that are no place, such as -1, pick another place than they do; else nothing is changed.
        bounded: whether targets of a binary cross-entropy are moved to the nearest number in 0..1.
    """
    tracing = Tracing(loop.model, batch, moved=moved, bounded=bounded)
    with running(loop.model) as tracing.modules, without_compiler(), ExitStack() as stack:
        stack.callback(loop.model.register_forward_hook(tracing.predicted).remove)
        stack.enter_context(tracing)
        try:
            tracing.traced.loss = float(loop.loss(batch).detach())
        except Exception as error:  # such as of a label that is out of range, which has been seen by now
            tracing.traced.error = error
    return tracing.traced


@contextmanager
def without_compiler() -> Generator[None, None, None]:
    """Runs compiled functions as they were before they were compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def running(model: nn.Module) -> Generator[list[str], None, None]:
    """Gives a list of the names of the modules that are running, the innermost one last."""
    names: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: names.append(name)

    def leave(*_: Any) -> None:
        names.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name), prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield names


class Named(dict[str, Tensor]):
    """A batch whose tensors have names of their own."""


def tensors_of(batch: Any, name: str = "batch") -> dict[str, Tensor]:
    """Returns the tensors of a batch by their place: `batch[1]`, `batch['labels']`."""
    if isinstance(batch, Tensor):
        return {name: batch}
    if isinstance(batch, Named):
        return dict(batch)
    if isinstance(batch, Mapping):
        parts = {f"{name}[{key!r}]": value for key, value in batch.items()}
    elif isinstance(batch, (list, tuple)):
        parts = {f"{name}[{index}]": value for index, value in enumerate(batch)}
    else:
        return {}
    return {place: each for part, value in parts.items() for place, each in tensors_of(value, part).items()}


class Tracing(TorchFunctionMode):
    """Follows the batch, the weights, and the layers' outputs through the functions that the loss calls.

    Args:
        model: whose weights are followed.
        batch: its tensors are followed.
        outside: the source of tensors that come from elsewhere; empty if these are not followed.
        moved: see `trace`.
        bounded: see `trace`.
    """

    def __init__(
        self, model: nn.Module, batch: Any, outside: str = "", *, moved: bool = False, bounded: bool = False
    ) -> None:
        super().__init__()
        self.batch, self._outside, self.moved, self.bounded = tensors_of(batch), outside, moved, bounded
        self.modules: list[str] = []
        self.traced = Traced([], [], [])
        # By id.
        self._kept: dict[int, Tensor] = {}
        self._sources: dict[int, tuple[str, ...]] = {}
        self._of_weights: set[int] = set()
        self._predictions: set[int] = set()
        self._parts: dict[int, list[_Part]] = {}
        self._class_dims: set[tuple[int, int]] = set()  # of a tensor, and which
        self._picked: dict[tuple[int, int], list[Pick]] = {}
        self.add(model, self.batch)

    def add(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        """Follows the weights of a model and tensors of a batch, by name."""
        self.batch |= batch
        self._keep([*batch.values(), *model.parameters()])
        self._of_weights |= {id(each) for each in model.parameters()}
        self._sources = {id(each): (name,) for name, each in batch.items()} | self._sources

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        """Keeps tensors, so that no other one gets the same id."""
        self._kept |= {id(each): each for each in tensors}

    def predicted(self, _module: nn.Module, _given: Any, out: Any) -> None:
        """Notes the model's output as a prediction."""
        self._predictions |= {id(each) for each in tensors_of(out).values()}
        self._keep(tensors_of(out).values())

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Runs the function unchanged."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [*tensors_of([*args, *kwargs.values()]).values()]
        if self._outside:
            self._add_outside(given)
        if name in LOSSES and len(given) > 1:
            self._add_use(name, args, kwargs)
        if self.bounded and name in BINARY:
            target = arguments(name, args, kwargs)["target"]
            inside = {id(target): target.clamp(0, 1)}
            args, kwargs = _exchanged(args, inside), _exchanged(kwargs, inside)
        if name in LAYERS and len(given) > 1:
            self._add_input(name, given)
        if name in PICKS:
            args, kwargs = self._add_picks(name, args, kwargs)
        out = func(*args, **kwargs)
        self._follow(name, given, out)
        if name in JOINS and isinstance(out, Tensor):
            self._join(name, args, kwargs, out)
        if isinstance(out, Tensor) and given:
            self._follow_dims(name, args, kwargs, out)
        return out

    def _add_outside(self, given: list[Tensor]) -> None:
        """Notes tensors that have not been seen before."""
        new = [each for each in given if id(each) not in self._kept]
        self._keep(new)
        self._sources |= {id(each): (self._outside,) for each in new}

    def _follow(self, name: str, given: list[Tensor], out: Any) -> None:
        """Notes what the result of a function comes from."""
        results = [*tensors_of(out).values()]
        if name == "__setitem__":
            results = given[:1]
        of_weights = any(id(each) in self._of_weights for each in given)
        sources = tuple(dict.fromkeys(source for each in given for source in self._sources.get(id(each), ())))
        same = name in SAME_VALUES and bool(given) and id(given[0]) in self._predictions
        self._keep(results)
        for each in results:
            if of_weights or each.requires_grad:
                self._of_weights.add(id(each))
                self._sources.pop(id(each), None)
            elif sources and name not in NO_VALUES and not name.startswith("new_"):
                self._sources[id(each)] = sources
            if same or (name in LAYERS and of_weights):
                self._predictions.add(id(each))

    def _add_use(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        known = arguments(name, args, kwargs)
        predicted, target = known[LOSSES[name][0]], target_of(name, args, kwargs)
        if not isinstance(target, Tensor):
            return
        given = [known[each] for each in ("target", "targets", "target_lengths") if each in known]
        sources = tuple(dict.fromkeys(source for each in given for source in self._sources.get(id(each), ())))
        classes, ignored = 0, None
        if name in BY_CLASS:
            classes = predicted.shape[1] if predicted.ndim > 1 else len(predicted)
        elif name == "linear_cross_entropy":
            classes = len(known["linear_weight"])
        if name == "ctc_loss":
            classes, ignored = predicted.shape[-1], int(known.get("blank", 0))
        elif classes and name != "multi_margin_loss" and not target.is_floating_point():
            ignored = int(kwargs.get("ignore_index", -100))
        raw = name != "ctc_loss" and len(sources) == 1 and sources[0] in self.batch
        use = Use(
            name,
            target.detach(),
            sources,
            raw and _same(target, self.batch[sources[0]]),
            name not in OF_PAIRS and (id(predicted) in self._predictions or name == "linear_cross_entropy"),
            classes,
            ignored,
            users_line(),
        )
        self.traced.uses.append(use)

    def _join(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
        """Notes which parts of a concatenation come from the batch alone."""
        tensors = args[0] if args else kwargs["tensors"]
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
        if id(out) not in self._of_weights:
            return
        start, parts = 0, []
        for each in tensors:
            if sources := self._sources.get(id(each)):
                parts.append(_Part(each.unsqueeze(dim) if name == "stack" else each, sources, dim, start))
            parts += [_Part(p.tensor, p.sources, dim, start + p.start) for p in self._parts_of(each) if p.dim == dim]
            start += 1 if name == "stack" else each.shape[dim]
        if parts:
            self._parts[id(out)] = parts

    def _parts_of(self, tensor: Tensor) -> list[_Part]:
        return self._parts.get(id(tensor), [])

    def _follow_dims(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
        """Notes in which dimension a result has classes, and where it has columns of the batch."""
        first = args[0] if args else kwargs.get("input")
        if not isinstance(first, Tensor):
            return
        if name in CASTS and self._parts_of(first):
            self._parts[id(out)] = self._parts_of(first)
        if name in ("softmax", "log_softmax", "logsumexp") and first.ndim:
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if isinstance(dim, int):
                self._class_dims |= {(id(first), dim % first.ndim)}
                self._class_dims |= {(id(out), dim % first.ndim)} if out.shape == first.shape else set()
        elif first.ndim and out.shape == first.shape:
            self._class_dims |= {(id(out), dim) for dim in range(out.ndim) if (id(first), dim) in self._class_dims}
        elif first.ndim and out.ndim and (id(first), first.ndim - 1) in self._class_dims:
            same = name in SAME_VALUES and out.shape[-1] == first.shape[-1]
            self._class_dims |= {(id(out), out.ndim - 1)} if same else set()
        for key in self._class_dims & self._picked.keys():
            for pick in self._picked[key]:
                pick.among_classes = True

    def _add_picks(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Notes the places that numbers of the batch pick; returns the arguments, moved if that is wanted."""
        moved: dict[int, Tensor] = {}
        for owner, dim, index, size in _picked(name, args, kwargs):
            sources = self._sources.get(id(index), ())
            of_weights = owner is None or id(owner) in self._of_weights
            if index.dtype in (torch.bool, torch.uint8) or not index.numel() or len(sources) != 1 or not of_weights:
                continue
            pick = Pick(
                name, index.detach().clone(), size, sources[0], _same(index, self.batch[sources[0]]), users_line()
            )
            self.traced.picks.append(pick)
            if owner is not None:
                self._picked.setdefault((id(owner), dim), []).append(pick)
                pick.among_classes = (id(owner), dim) in self._class_dims
            moved[id(index)] = torch.where((index < 0) | (index >= size), (index + 1) % size, index)
        if not self.moved:
            return args, kwargs
        return _exchanged(args, moved), _exchanged(kwargs, moved)

    def _add_input(self, name: str, given: list[Tensor]) -> None:
        value, weights = given[0], [each for each in given[1:] if id(each) in self._of_weights and each.ndim > 1]
        sources = self._sources.get(id(value), ())
        by_column = not name.startswith("conv")
        for part in self._parts_of(value) if weights else []:
            dim = value.ndim - 1 if by_column else 1
            transposed = name in ("matmul", "__matmul__", "mm")
            weight = weights[0].detach()
            weight = weight.T if transposed and weight.ndim == 2 else weight
            columns = slice(part.start, part.start + part.tensor.shape[part.dim])
            whole = weight.ndim > 1 and weight.shape[1] == value.shape[dim]  # not a convolution in groups
            if part.dim == dim and whole and part.tensor.is_floating_point() and part.tensor.numel():
                module, line = self.modules[-1] if self.modules else "", users_line()
                found = Input(part.tensor.detach(), weight[:, columns], by_column, part.sources, module, line, True)
                self.traced.inputs.append(found)
        if weights and sources and value.is_floating_point() and value.numel():
            module, line = self.modules[-1] if self.modules else "", users_line()
            if any((each.module, each.line) == (module, line) for each in self.traced.inputs):
                return  # a recurrent layer is given one input after the other
            weight = weights[0].detach()
            weight = weight.T if name in ("matmul", "__matmul__", "mm") and weight.ndim == 2 else weight
            self.traced.inputs.append(Input(value.detach(), weight, by_column, sources, module, line))


def arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a loss function by their names; without those that come last and are not looked at."""
    return {**dict(zip(LOSSES[name], args, strict=False)), **kwargs}


def target_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what a loss function is given as targets; for a CTC loss its letters, `[rows, letters]`."""
    known = arguments(name, args, kwargs)
    return _letters(known) if name == "ctc_loss" else known.get("target")


def _letters(known: Mapping[str, Any]) -> Tensor:
    """Returns the letters of each row of a CTC loss; the blank stands where a row has no more."""
    targets, lengths = known["targets"], torch.as_tensor(known["target_lengths"]).reshape(-1).tolist()
    if targets.ndim == 2:
        rows = [row[:length] for row, length in zip(targets, lengths, strict=False)]
    else:  # one row after the other
        rows = [targets[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
    letters = targets.new_full((len(rows), max(1, *map(len, rows)) if rows else 1), int(known.get("blank", 0)))
    for out, row in zip(letters, rows, strict=True):
        out[: len(row)] = row
    return letters


def _same(target: Tensor, given: Tensor) -> bool:
    """Whether targets have the values of a batch's tensor, in its order."""
    return target.numel() == given.numel() and bool(torch.equal(target.reshape(-1), given.reshape(-1).to(target.dtype)))


def _picked(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Tensor | None, int, Tensor, int]]:
    """Returns what a call picks from: the tensor, its dimension, the numbers of the places, and how many there are."""
    if name == "__getitem__":
        owner, key = args
        found, dim = [], 0
        keys = list(key) if isinstance(key, tuple) else [key]
        for place, each in enumerate(keys):
            if each is Ellipsis:
                dim = owner.ndim - sum(map(_width, keys[place + 1 :]))
            elif isinstance(each, Tensor) and each.dtype not in (torch.bool, torch.uint8) and dim < owner.ndim:
                found.append((owner, dim, each, owner.shape[dim]))
            dim += _width(each)
        return found
    parameters = {
        "gather": ("input", "dim", "index"),
        "index_select": ("input", "dim", "index"),
        "take_along_dim": ("input", "indices", "dim"),
        "embedding": ("input", "weight"),
        "one_hot": ("tensor", "num_classes"),
    }[name]
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    if name == "embedding":
        return [(given["weight"], 0, given["input"], len(given["weight"]))]
    if name == "one_hot":
        size = given.get("num_classes", -1)
        return [(None, 0, given["tensor"], size)] if size > 0 else []
    owner, dim, index = given["input"], given.get("dim"), given.get("index", given.get("indices"))
    if not isinstance(dim, int) or not isinstance(index, Tensor):
        return []
    return [(owner, dim % owner.ndim, index, owner.shape[dim])]


def _width(key: Any) -> int:
    """Returns how many dimensions a part of an index is for."""
    if key is None or key is Ellipsis or isinstance(key, bool):
        return 0
    return key.ndim if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) else 1


def _exchanged(values: Any, by: Mapping[int, Tensor]) -> Any:
    """Replaces tensors in arguments, by their id."""
    if isinstance(values, Mapping):
        return {name: _exchanged(each, by) for name, each in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(_exchanged(each, by) for each in values)
    return by.get(id(values), values)
