"""Runs as if on a CUDA device, on a machine without one: PyTorch's fake tensors have a device, but no values.

    with as_if_on_a_card((9, 0)) as card, composed("device=cuda", ...) as cfg:
        train(build(cfg, folder))
    assert card.foreign == []

A real CUDA device would run the same operations in the same order. An operation whose tensors are on different devices
raises an error. Reading a value on the host, or waiting for the device, raises `HostRead`, except in `READERS` and
`WAITERS`. Writing to a tensor that another stream may still be copying raises a `RuntimeError`. `card.foreign` lists
operations on host tensors outside `HOST`, and `card.count` counts all operations. The values are made up: `reading`
tells what a step measured, forensics reads every value as `number`, and everything else that may read a value reads 1.

What PyTorch cannot do with fake tensors is replaced: the autograd engine (`fake_autograd.py`), CUDA's events, streams,
generators and memory statistics, `nn.Module.to`, and the reading of a step. Compiled code, several processes, and
timing are not covered.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import stabletrain
from stabletrain.config.make import Choice
from stabletrain.data.batches import Prefetch
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.in_flight import InFlight
from stabletrain.machine import hardware
from stabletrain.records import Batch, Reading
from stabletrain.stability.init import TorchInit
from stabletrain.trainer import parts, stages
from tests.tools.fake_autograd import Walk, backward, grad

CARD = torch.device("cuda", 0)
PACKAGE = f"{Path(stabletrain.__file__).parent}/"

READERS = {
    "buffers.py:is_huge": "looks at each buffer once, when it is first seen: is it a mask?",
    "guard/checks/written.py:state_is_sound": "looks at the state after a skipped step: is it damaged?",
    "guard/checks/written.py:update_is_finite": "looks at an update that was run again after a skipped step",
    "guard/checks/written.py:note_start": "looks at the state once, before the first step",
    "guard/checks/update_check.py:judge": "with copies, an update that is not proven is undone before the next step",
    "records.py:count_targets": "counts targets that are still on the host",
    "records.py:examined": "reads the values of a batch that is still on the host",
    "records.py:range_of": "reads the values of a batch that is still on the host",
    "monitors/probe.py": "a look returns its metrics as numbers, and the loop has just read the step's",
    "monitors/curvature.py:loss_at": "each loss of the search decides which one is computed next",
    "trainer/evaluate.py:evaluate": "reads the result of an evaluation once, at its end",
    "guard/checks/state_check.py:holds": "checks the state once more before it is evaluated or saved",
    "guard/checks/state_check.py:restored": "checks a state that was put back",
    "forensics/": "explains a step after it has failed",
    "beside/preflight/": "looks at the run once, before its first step",
}
"""Functions, files and folders of the package that may read values on the host, and why."""

WAITERS = {
    "checkpoint/": "copies a state to the host and back",
    "data/": "makes batches, before they are moved",
    "beside/faults/": "injects a fault",
    "forensics/": "explains a step after it has failed",
    "beside/preflight/": "looks at the run once, before its first step",
    "stability/precision/loss_scale.py:load_state_dict": "a replay sets the loss scale of its step",
}
"""Functions, files and folders that may wait for the device, or for a copy to or from it, and why."""

HOST = {
    "records.py:moved": "moves a batch to the device",
    "records.py:transformed": "moves what a batch on the device still needs to be complete",
    "records.py:pin_memory": "copies a batch to page-locked memory",
    "records.py:count_targets": "counts targets that are still on the host",
    "records.py:examined": "reads the values of a batch that is still on the host",
    "records.py:range_of": "reads the values of a batch that is still on the host",
    "records.py:rows": "splits the ids of the samples, which stay on the host",
    "in_flight.py:__init__": "the reading of a step, copied to the host",
    "checkpoint/": "copies a state to the host and back",
    "data/": "makes batches",
    "beside/faults/": "injects a fault, in data that are on the host too",
    "forensics/": "an incident's batch is on the host",
    "beside/preflight/": "looks at the first batches, which are on the host",
    "stability/precision/loss_scale.py:load_state_dict": "a replay sets the loss scale of its step",
}
"""Functions, files and folders that may compute on host tensors, and why."""

READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal")
"""Operations whose result the host needs before it can continue."""

PRODUCTS = ("mm", "bmm", "addmm", "convolution")
"""Matrix products and convolutions, which autocast runs in its dtype."""

HEALTHY = Reading(1, 2.5, {}, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, True, False, False, 1e-3)


class HostRead(BaseException):
    """The host waited for the device where it may not. Not an Exception, so that nothing in the package handles it."""


class Recorder(TorchDispatchMode):
    """Counts operations, and notices those that a step on a CUDA device must not run.

    Attributes:
        count: operations that were run.
        foreign: `operation (file:line)` for each operation with a tensor on the host, outside `HOST`.
        products: how many matrix products and convolutions gave a result of each dtype.
        number: what forensics reads as any value; 1 elsewhere.
        beside: the stream that is chosen instead of the one that computes; None if there is none.
        copied: tensors that another stream may still be copying, by their memory, and that stream.
        arriving: tensors that another stream may still be writing, by their memory, and that stream.
    """

    def __init__(self, number: float = 1.0) -> None:
        super().__init__()
        self.number = number
        self.foreign: list[str] = []
        self.beside: FakeStream | None = None
        self.copied: dict[int, tuple[Tensor, FakeStream]] = {}
        self.arriving: dict[int, tuple[Tensor, FakeStream]] = {}
        self.restart()
        self._running = False

    def restart(self) -> None:
        """Forgets what was recorded, such as the operations that build a run. From now on, waiting is refused."""
        self.count, self._running = 0, True
        self.products: Counter[torch.dtype] = Counter()
        self.foreign.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation on fake tensors, without values."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a fake tensor asks for its own device
            return func(*args, **kwargs)
        self.count += 1
        name = func.__name__.split(".")[0]
        if self.copied or self.arriving or self.beside:
            self.check_streams(name, func, args, kwargs)
        if name in READS or (name == "index" and any(map(is_mask, args[1]))):
            if not isinstance(args[0], FakeTensor):  # a tensor with values, on the host
                return with_values(func)(*args, **kwargs)
            return self.read(name, *args)
        if name.startswith("index_put") and any(map(is_mask, args[1])) and args[2].device.type != "cpu":
            self.wait(name)  # to write one number from the host, it need not count the mask
        out = None
        if name != "_fused_sgd_":  # it writes in place, and PyTorch has no fake kernel for it
            out = func(*args, **kwargs)
        if self.beside and name == "_to_copy" and isinstance(out, Tensor) and out.is_cuda:
            if not getattr(args[0], "is_page_locked", False):
                raise RuntimeError(f"{package_frame()[0]} copies from pageable memory: the host waits for it")
            self.arriving[memory(out)] = out, self.beside
        self.check(name, args, kwargs, out)
        return out

    def read(self, name: str, tensor: Tensor, *rest: Any) -> Any:
        """Returns a made-up result for an operation that reads values on the host.

        Raises:
            HostRead: the code is not in `READERS`.
        """
        line, place = package_frame()
        if not place.startswith(tuple(READERS)):
            raise HostRead(f"{line} reads a value on the host ({name})")
        number = self.number if place.startswith("forensics/") else 1.0
        known = number == number and number != 0
        if name == "nonzero":
            return tensor.new_zeros(int(known), tensor.dim(), dtype=torch.int64)
        if name == "index":
            return tensor.new_zeros(int(known), *tensor.shape[sum(mask.dim() for mask in rest[0]) :])
        if name == "equal" or tensor.dtype == torch.bool:
            return known
        return number if tensor.is_floating_point() else int(known)

    def wait(self, what: str) -> None:
        """Notices that the host waits for the device.

        Raises:
            HostRead: the code is not in `WAITERS`.
        """
        line, place = package_frame()
        if self._running and not place.startswith(tuple(WAITERS)):
            raise HostRead(f"{line} waits for the device ({what})")

    def check_streams(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Remembers what another stream copies, and notices what is written meanwhile, or read too early.

        Raises:
            RuntimeError: the current stream writes to a tensor before it waits for the stream that copies it, or uses
                one before it waits for the stream that writes it.
        """
        if self.beside:
            if name == "copy_":
                self.copied[memory(args[1])] = args[1], self.beside
            return
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, FakeTensor) and memory(tensor) in self.arriving:
                raise RuntimeError(f"{package_frame()[0]} uses a tensor that another stream is writing ({name})")
        given = [*args, *kwargs.values()]
        names = [*(argument.name for argument in func._schema.arguments[: len(args)]), *kwargs]
        written = {argument.name for argument in func._schema.arguments if argument.is_write}
        for tensor in tree_leaves([value for value, name in zip(given, names, strict=True) if name in written]):
            if isinstance(tensor, FakeTensor) and memory(tensor) in self.copied:
                raise RuntimeError(f"{package_frame()[0]} writes to a tensor that another stream is copying ({name})")

    def check(self, name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Notices tensors and generators on the host, copies that wait, and the dtypes of products."""
        used = tree_leaves((args, kwargs, out))
        devices = {tensor.device.type for tensor in used if isinstance(tensor, Tensor)} - {"meta"}
        if name in PRODUCTS and isinstance(out, Tensor):
            self.products[out.dtype] += 1
        if len(devices) > 1 and name in ("copy_", "_to_copy"):
            asynchronous = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
            if not asynchronous:
                self.wait(name)
        for generator in used:
            if isinstance(generator, FakeGenerator) and generator.kind not in devices:
                raise RuntimeError(f"{name}: a generator on {generator.kind} for a tensor on {devices}")
        if "cpu" in devices:
            line, place = package_frame()
            if not place.startswith(tuple(HOST)):
                self.foreign.append(f"{name} ({line})")


class FakeGenerator(torch.Generator):
    """A generator of the host that remembers the device it was made for."""

    def __new__(cls, device: Any = "cpu") -> "FakeGenerator":
        """Makes it for `device`."""
        made = super().__new__(cls)
        made.kind = torch.device(device).type
        return made


def memory(tensor: Tensor) -> int:
    """Returns a number that tensors with the same memory share."""
    return tensor.untyped_storage()._cdata


def is_mask(index: Any) -> bool:
    """Returns whether an index is a tensor of bools: the shape of the result then depends on values."""
    return isinstance(index, Tensor) and index.dtype == torch.bool


def package_frame() -> tuple[str, str]:
    """Returns `file:line` and `file:function` of the innermost frame in the package; both are empty if there is none.

    The file is relative to the package. Comprehensions count as the function around them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            file = code.co_filename.removeprefix(PACKAGE)
            return f"{file}:{frame.f_lineno}", f"{file}:{code.co_name}"
        frame = frame.f_back
    return "outside the package", ""


# ---- what needs a real device


class Direct(Prefetch):
    """Stands in for `Prefetch`, whose thread would not know the fake tensors: loads each batch when it is wanted."""

    def __init__(self, load: Callable[[int], Batch], **_: Any) -> None:
        self._load = load

    def get(self, step: int) -> Batch:
        """Returns batch number `step`, on the host."""
        return self._load(step)

    def forget(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def move(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Stands in for `nn.Module.to`: makes new parameters, because a fake tensor cannot take a real one's place."""
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    moved: dict[int, Tensor] = {}

    def new(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            kind = dtype if tensor.is_floating_point() else None
            shape = {"memory_format": layout} if layout is not None and tensor.dim() == 4 else {}
            there = tensor.detach().to(device or tensor.device, kind or tensor.dtype, **shape)
            parameter = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if parameter else there
            kept.append(tensor)
        return moved[id(tensor)]

    kept: list[Tensor] = []
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = new(tensor)
    return module


def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Stands in for `Tensor.__deepcopy__`, which looks at a tensor's memory."""
    if id(tensor) not in memo:
        with torch.no_grad():
            clone = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone
    return memo[id(tensor)]


def without_devices(record: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a mode's `__torch_dispatch__` that leaves out a fake tensor's question for its own device."""

    def dispatch(mode: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        return record(mode, func, types, args, kwargs)

    return dispatch


def if_fake(tensor: Tensor, stand_in: Callable[..., Any], method: Callable[..., Any], *args: Any) -> Any:
    """Calls the stand-in for a fake tensor, and PyTorch's own method for any other."""
    return (stand_in if isinstance(tensor, FakeTensor) else method)(tensor, *args)


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, run on real tensors on the host."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


class OnHost(TorchInit):
    """An initialization that computes real values, on the host."""

    def __init__(self, init: TorchInit) -> None:
        self._init = init

    def __call__(self, model: nn.Module) -> None:
        with_values(self._init)(model)


def made(build: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `Choice.build` that makes data and initial weights with real values, on the host."""

    def on_host(choice: Choice[Any], **arguments: Any) -> Any:
        if choice.group not in ("data", "init"):
            return build(choice, **arguments)
        built = with_values(build)(choice, **arguments)
        if choice.group == "init":
            return OnHost(built)
        if hasattr(built, "fingerprint"):
            known = with_values(built.fingerprint)()
            built.fingerprint = lambda: known
        return built

    return on_host


class FakeStream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def synchronize(self) -> None:
        """Notices that the host waits."""
        self._recorder.wait("a stream")

    def wait_stream(self, stream: Any) -> None:
        """Does nothing: operations run in the order of the program."""

    def record_event(self) -> Any:
        """Returns an event of this stream."""
        return SimpleNamespace(stream=self)

    def wait_event(self, event: Any) -> None:
        """Ends what the event's stream did."""
        for pending in (self._recorder.copied, self._recorder.arriving):
            for key in [key for key, (_, stream) in pending.items() if stream is event.stream]:
                del pending[key]


@contextmanager
def chosen_stream(recorder: Recorder, stream: FakeStream) -> Iterator[None]:
    """Stands in for `torch.cuda.stream`."""
    recorder.beside = stream
    try:
        yield
    finally:
        recorder.beside = None


def page_locked(tensor: Tensor) -> Tensor:
    """Stands in for `Tensor.pin_memory`."""
    pinned = tensor.detach()
    pinned.is_page_locked = True  # ty: ignore[unresolved-attribute]
    return pinned


def cuda_functions(capability: tuple[int, int], recorder: Recorder) -> dict[str, Any]:
    """Returns replacements for functions of `torch.cuda`. They tell `recorder` where the host waits for the device."""
    name = {7: "Tesla V100-SXM2-32GB", 8: "NVIDIA A100-SXM4-80GB", 9: "NVIDIA H100 80GB HBM3"}[capability[0]]
    about = SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=80 * 2**30)
    wait, no_state = recorder.wait, torch.empty(0)

    def synchronize(*_: Any) -> None:
        wait("synchronize")
        recorder.copied.clear()
        recorder.arriving.clear()

    return {
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: name,
        "get_device_properties": lambda *_: about,
        "is_bf16_supported": lambda *_: capability >= (8, 0),
        "Event": lambda **_: SimpleNamespace(record=lambda *_: None, synchronize=lambda: None),
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: 0,
        "mem_get_info": lambda *_: (80 * 2**30, 80 * 2**30),
        "Stream": lambda *_: FakeStream(recorder),
        "stream": lambda stream: chosen_stream(recorder, stream),
        "current_stream": lambda *_: FakeStream(recorder),
        "synchronize": synchronize,
        "get_rng_state": lambda *_: no_state,
        "set_rng_state": lambda *_: None,
    }


@contextmanager
def as_if_on_a_card(
    capability: tuple[int, int] = (9, 0), reading: Callable[[int], Reading] | None = None, number: float = 1.0
) -> Iterator[Recorder]:
    """A context in which `device=cuda` is a card of this compute capability, without values.

    Args:
        capability: (9, 0) for an H100, (8, 0) for an A100, (7, 0) for a V100.
        reading: what a step measured, by its number; None for a healthy step.
        number: what forensics reads as any value.
    """

    def arrived(in_flight: InFlight) -> Reading:
        told = HEALTHY if reading is None else reading(in_flight._known["step"])
        return told._replace(step=in_flight._known["step"], lr=in_flight._known["lr"])

    recorder, deepcopy = Recorder(number), Tensor.__deepcopy__
    with ExitStack() as stack:
        replace = lambda *where: stack.enter_context(mock.patch.object(*where))  # noqa: E731
        for name, instead in cuda_functions(capability, recorder).items():
            replace(torch.cuda, name, instead)
        replace(torch, "Generator", FakeGenerator)
        replace(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        replace(torch._C, "_current_autograd_node", lambda: Walk.node)
        replace(torch.autograd, "grad", grad)
        replace(Tensor, "backward", backward)
        replace(Tensor, "__deepcopy__", lambda tensor, memo: if_fake(tensor, copied, deepcopy, memo))
        replace(Trace, "__torch_dispatch__", without_devices(Trace.__torch_dispatch__))
        replace(Tensor, "record_stream", lambda *_: None)
        replace(Tensor, "pin_memory", page_locked)
        replace(nn.Module, "to", move)
        replace(hardware, "choose_device", lambda *_: CARD)
        replace(Choice, "build", made(Choice.build))
        replace(stages, "make_model", with_values(stages.make_model))
        replace(parts, "Prefetch", Direct)
        replace(InFlight, "wait", arrived)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(recorder)
