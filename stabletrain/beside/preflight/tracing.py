"""What the loss makes of its batch: what reaches the loss functions as targets, and what reaches the first layers.

A `TorchFunctionMode` sees each PyTorch function that the loss calls. It follows the batch's tensors through them, so
that targets that are made in the loss, such as the numbers of the rows in a contrastive loss, are not taken for data.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stabletrain.beside.preflight.loop import Loop
from stabletrain.beside.preflight.recording import users_line

BY_CLASS = {"cross_entropy", "nll_loss"}
LOSSES = BY_CLASS | {
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss", "gaussian_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
}
"""Functions whose second argument is `target`."""

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "matmul", "__matmul__", "mm", "gru", "lstm", "rnn_tanh"}
"""Functions that multiply an input with weights; a layer's weight is the first tensor that has a gradient."""

SAME_VALUES = {
    *("float", "half", "bfloat16", "double", "to", "type", "contiguous", "flatten", "view", "reshape", "squeeze"),
    *("unsqueeze", "transpose", "permute", "__getitem__", "__get__", "log_softmax", "softmax", "sigmoid"),
}
"""Functions after which a layer's output is still a prediction; not so a difference from something, or a derivative."""

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
        ignored: the class number that is left out; None if the targets are no class numbers.
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
    """

    value: Tensor
    weight: Tensor
    by_column: bool
    sources: tuple[str, ...]
    module: str
    line: str


@dataclass
class Traced:
    """What was seen of a call of the loss: the calls of loss functions, and the inputs of the first layers."""

    uses: list[Use]
    inputs: list[Input]
    error: Exception | None = None


def trace(loop: Loop, batch: Any) -> Traced:
    """Calls the loss with a batch; an error that it raises is returned."""
    tracing = Tracing(loop.model, batch)
    with running(loop.model) as tracing.modules, without_compiler(), ExitStack() as stack:
        stack.callback(loop.model.register_forward_hook(tracing.predicted).remove)
        stack.enter_context(tracing)
        try:
            loop.loss(batch)
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
    """

    def __init__(self, model: nn.Module, batch: Any, outside: str = "") -> None:
        super().__init__()
        self.batch, self._outside = tensors_of(batch), outside
        self.modules: list[str] = []
        self.traced = Traced([], [])
        # By id.
        self._kept: dict[int, Tensor] = {}
        self._sources: dict[int, tuple[str, ...]] = {}
        self._of_weights: set[int] = set()
        self._predictions: set[int] = set()
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
        if name in LAYERS and len(given) > 1:
            self._add_input(name, given)
        out = func(*args, **kwargs)
        self._follow(name, given, out)
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
        predicted = args[0] if args else kwargs["input"]
        target = args[1] if len(args) > 1 else kwargs["target"]
        sources = self._sources.get(id(target), ())
        classes = (predicted.shape[1] if predicted.ndim > 1 else len(predicted)) if name in BY_CLASS else 0
        numbers = name in BY_CLASS and not target.is_floating_point()
        use = Use(
            name,
            target.detach(),
            sources,
            len(sources) == 1 and sources[0] in self.batch and _same(target, self.batch[sources[0]]),
            id(predicted) in self._predictions,
            classes,
            int(kwargs.get("ignore_index", -100)) if numbers else None,
            users_line(),
        )
        self.traced.uses.append(use)

    def _add_input(self, name: str, given: list[Tensor]) -> None:
        value, weights = given[0], [each for each in given[1:] if id(each) in self._of_weights and each.ndim > 1]
        sources = self._sources.get(id(value), ())
        if weights and sources and value.is_floating_point() and value.numel():
            module, line = self.modules[-1] if self.modules else "", users_line()
            if any((each.module, each.line) == (module, line) for each in self.traced.inputs):
                return  # a recurrent layer is given one input after the other
            by_column = not name.startswith("conv")
            weight = weights[0].detach()
            weight = weight.T if name in ("matmul", "__matmul__", "mm") and weight.ndim == 2 else weight
            self.traced.inputs.append(Input(value.detach(), weight, by_column, sources, module, line))


def _same(target: Tensor, given: Tensor) -> bool:
    """Whether targets have the values of a batch's tensor, in its order."""
    return target.numel() == given.numel() and bool(torch.equal(target.reshape(-1), given.reshape(-1).to(target.dtype)))
