"""CUDA graphs: the first half of a step, forward and backward, is captured once and then launched by one call.

A step of small kernels waits for the host, which launches them one by one. A graph launches all of `compute` at once.
It reads static inputs, into which each batch is copied, and writes static results: losses, norms and gradients.

| what differs between steps | how |
|---|---|
| batch | copied into the static inputs |
| random numbers | the card's generator is seeded before each launch; a graph takes its seed from there |
| buffers before the forward pass | saved before each launch: the loop needs the last step's until it is judged |
| learning rate, limits of the guard, checksums | belong to `commit`, which is not captured |

Steps that a graph does not fit run as without it: the first ones, those of other shapes, and those that are computed
twice. So does everything else that runs the model: evaluations, monitors, replays. If parameters or buffers have moved
in memory, the next step is captured anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stabletrain.buffers import Buffers, buffers_of, memory_of
from stabletrain.errors import ConfigError
from stabletrain.machine.determinism import Generators
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch, TrainState
from stabletrain.step import Computed, compute
from stabletrain.tools import Tools

WARM_UP = 3
"""Steps of one shape before the capture, in which libraries choose kernels and allocate their workspaces."""

PRECISIONS = ("fp32", "tf32", "bf16", "bf16_params")
"""Those without a loss scale and without scales of single tensors, which a restored state may replace."""


class LaunchedSteps:
    """Computes each step by launching its kernels one by one."""

    def __call__(self, state: TrainState, batches: Sequence[Batch], tools: Tools) -> Computed:
        """Runs forward and backward of a step, see `step.compute`."""
        return compute(state, batches, tools)


class CudaGraph:
    """A captured function without arguments."""

    def capture(self, run: Callable[[], Any]) -> Any:
        """Captures `run`, whose kernels are not executed; returns its static results.

        Raises:
            ConfigError: `run` reads values on the host, or draws random numbers there.
        """
        self._graph = torch.cuda.CUDAGraph()
        before = Generators.now(torch.device("cpu"))
        try:
            # Other threads may allocate meanwhile: the data's, which copies batches.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                found = run()
        except RuntimeError as error:
            why = " ".join(str(error).split())[:160]
            raise ConfigError(f"compile=graph: the step cannot be captured ({why}); fix: compile=true") from error
        if not same_draws(before, Generators.now(torch.device("cpu"))):
            raise ConfigError(
                "compile=graph: forward or backward draws random numbers on the host, and a graph would repeat those "
                "of one step; fix: draw them on the model's device, or compile=true"
            )
        return found

    def launch(self) -> None:
        """Launches the captured kernels."""
        self._graph.replay()


@dataclass(frozen=True)
class Captured:
    """A captured step.

    Attributes:
        graph: launches it.
        inputs: the static micro-batches.
        results: the static results.
        gradients: the static gradients of the parameters that have one.
        buffers, memory: of the model when it was captured; see `fits`.
    """

    graph: Any
    inputs: Sequence[Batch]
    results: Computed
    gradients: Sequence[tuple[Tensor, Tensor]]
    buffers: Buffers
    memory: Sequence[int]

    def fits(self, state: TrainState) -> bool:
        """Returns whether parameters and buffers are where they were."""
        return buffers_of(state.model) is self.buffers and memory_of(trained(state)) == self.memory


class GraphedSteps(LaunchedSteps):
    """Computes steps by launching a graph where one fits.

    Args:
        new_graph: makes what captures; another class takes its place in tests.
    """

    def __init__(self, new_graph: Callable[[], Any] = CudaGraph) -> None:
        self._new_graph = new_graph
        self._captured: Captured | None = None
        self._form: Any = None
        self._seen = 0

    def __call__(self, state: TrainState, batches: Sequence[Batch], tools: Tools) -> Computed:
        """Runs forward and backward of a step, see `step.compute`."""
        if not self._ready(state, batches, tools):
            return super().__call__(state, batches, tools)
        saved = buffers_of(state.model).save()
        captured = self._captured
        if captured is None or not captured.fits(state):
            self._captured = None  # frees its memory before the next capture takes more
            captured = self._captured = self._capture(state, batches, tools)
        for static, batch in zip(captured.inputs, batches, strict=True):
            static.inputs.copy_(batch.inputs)
            static.targets.copy_(batch.targets)
        # Other passes have left their own gradients, or none.
        state.optimizer.zero_grad(set_to_none=True)
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        tools.determinism.seed_step(tools.seed, state.step)
        captured.graph.launch()
        return replace(captured.results, saved_buffers=saved)

    def _ready(self, state: TrainState, batches: Sequence[Batch], tools: Tools) -> bool:
        """Returns whether this step may be launched as a graph: enough steps of its form have run without one."""
        form = [(each.inputs.shape, each.inputs.dtype, each.targets.shape, each.targets.dtype) for each in batches]
        if form != self._form or not all(each.targets.numel() for each in batches):
            self._form, self._seen, self._captured = form, 0, None
        self._seen += 1
        return self._seen > WARM_UP and state.model.training and not tools.guard.recheck.repeats(state.step)

    def _capture(self, state: TrainState, batches: Sequence[Batch], tools: Tools) -> Captured:
        """Captures a step of this form."""
        # The card counts targets and looks for bad values: what the host knows of them differs between batches.
        unknown = {"counted": None, "input_range": None, "target_range": None}
        inputs = [
            replace(each, inputs=each.inputs.clone(), targets=each.targets.clone(), **unknown) for each in batches
        ]
        graph = self._new_graph()
        tools.determinism.seed_step(tools.seed, state.step)  # here, because a capture refuses another seed than is set
        results = graph.capture(lambda: compute(state, inputs, tools))
        gradients = [(each, each.grad) for each in trained(state) if each.grad is not None]
        return Captured(graph, inputs, results, gradients, buffers_of(state.model), memory_of(trained(state)))


def chosen(compile: bool | str, device: torch.device, tools: Tools, parallel: SingleProcess) -> LaunchedSteps:
    """Returns how a run's steps are computed: as graphs with `compile=graph`.

    Raises:
        ConfigError: this run's steps cannot be captured.
    """
    if compile != "graph":
        return LaunchedSteps()
    if device.type != "cuda":
        raise ConfigError(f"compile=graph needs a card, and this run's device is {device}; fix: compile=auto")
    if tools.precision.name not in PRECISIONS:
        raise ConfigError(
            f"compile=graph does not capture the scales of precision={tools.precision.name}; "
            f"fix: precision={' or '.join(PRECISIONS)}, or compile=true"
        )
    if parallel.ranks.world_size > 1:
        raise ConfigError(
            f"compile=graph captures one process, and there are {parallel.ranks.world_size} ranks; fix: compile=true"
        )
    return GraphedSteps()


def trained(state: TrainState) -> list[Tensor]:
    """Returns the parameters of the optimizer."""
    return [parameter for group in state.optimizer.param_groups for parameter in group["params"]]


def same_draws(before: Generators, after: Generators) -> bool:
    """Returns whether no random number was drawn on the host between two states of its generators."""
    numpy = before.numpy[2] == after.numpy[2] and bool((before.numpy[1] == after.numpy[1]).all())
    return numpy and before.python == after.python and torch.equal(before.cpu, after.cpu)
