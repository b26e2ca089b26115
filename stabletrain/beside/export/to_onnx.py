"""Export as ONNX, with any batch size; a GPT with any length up to its block size, a ResNet with any image size.

Uses PyTorch's exporter that traces with `torch.export`, which needs the packages onnx and onnxscript.
"""

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from stabletrain.beside.export.trained import Format, Trained, Written, compare, output_of, pictures, tokens
from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.models.gpt import GPT
from stabletrain.models.nf_resnet import NFResNet
from stabletrain.models.resnet import CifarResNet, TorchvisionResNet

TOLERANCE = 1e-4
"""Largest difference of logits: another program computes them, with sums in another order."""

FILE, LARGEST_FILE = "model.onnx", 1 << 30
"""Weights of more bytes than this are written to a separate file: one file holds at most 2 GiB."""

Shape = dict[int, Any]
"""The dimensions of the input that may vary."""


@dataclass(frozen=True)
class Onnx(Format):
    """`model.onnx`, for any model that `torch.export` can trace."""

    def refuse(self, trained: Trained) -> None:
        """Raises ConfigError if a package is missing."""
        for name in ("onnx", "onnxscript"):
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(f"--to onnx needs {name} ({error}): pip install 'stabletrain[export]'") from None

    def write(self, trained: Trained, folder: Path) -> Written:
        """Writes the file; compares the outputs if onnxruntime is installed."""
        model = OneOutput(trained.model).eval()
        inputs, shapes = inputs_of(trained)
        with torch.no_grad():
            output = model(inputs)
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"{trained.name}: its output is a {type(output).__name__}, and an ONNX export needs a tensor, an "
                "object with .logits, or a tuple that begins with a tensor: use --to safetensors"
            )
        program, lost = traced(model, inputs, shapes)
        large = sum(tensor.nbytes for tensor in model.state_dict().values()) > LARGEST_FILE
        program.model.metadata_props.update(trained.origin)
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # lines and paths of this machine's code
        program.save(folder / FILE, external_data=large)
        load = [
            "import onnxruntime",
            f"session = onnxruntime.InferenceSession('{{folder}}/{FILE}')",
            "logits = session.run(None, {'inputs': inputs})[0]   # inputs: " + described(program, inputs),
        ]
        notes = [note for note in (lost, trained.reads) if note]
        return Written(check(trained.model, folder / FILE, inputs), load, notes)


class OneOutput(nn.Module):
    """Returns the logits of a model whose output may hold more."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Any:
        """Returns the logits."""
        return output_of(self.model(inputs))


def inputs_of(trained: Trained) -> tuple[Tensor, list[Shape]]:
    """Returns two samples, and the dimensions that may vary: at best, and if that cannot be traced."""
    model, batch = trained.model, Dim("batch")
    if type(model) is GPT:
        length = Dim("time", max=model.block_size) if model.block_size > 1 else None
        sample = tokens(model.embedding.num_embeddings, min(model.block_size, 64))
        return sample, [{0: batch, 1: length} if length else {0: batch}]
    if type(model) in (CifarResNet, TorchvisionResNet, NFResNet):
        channels = next(module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d))
        return pictures(channels, 64), [{0: batch, 2: Dim("height"), 3: Dim("width")}, {0: batch}]
    sample = trained.samples()
    text = sample.ndim == 2 and not sample.is_floating_point()
    return sample, [*([{0: batch, 1: Dim("time", max=sample.shape[1])}] if text else []), {0: batch}, {}]


def traced(model: nn.Module, inputs: Tensor, shapes: list[Shape]) -> tuple[Any, str]:
    """Returns the program of the first shapes with which the model can be traced, and a line on what was lost.

    Raises:
        StabletrainError: it cannot be traced at all.
    """
    errors: list[Exception] = []
    for shape in shapes:
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")  # the exporter warns about itself, and prints what it optimized
                program = torch.onnx.export(
                    model,
                    (inputs,),
                    input_names=["inputs"],
                    output_names=["logits"],
                    dynamic_shapes=(shape,),
                    dynamo=True,
                    verbose=False,
                )
        except Exception as error:  # the exporter may raise anything, and so may a user's model
            errors.append(error)
            continue
        fixed = [str(dim.__name__) for i, dim in shapes[0].items() if i not in shape]
        note = f"{' and '.join(fixed)} cannot vary: {reason(errors[0])}" if fixed else ""
        return program, note
    raise StabletrainError(
        f"torch.export cannot trace the model: {reason(errors[-1])}; use --to safetensors, or avoid Python control "
        "flow that depends on the values of tensors in its forward"
    ) from errors[-1]


def reason(error: BaseException) -> str:
    """Returns the first line of the first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def described(program: Any, inputs: Tensor) -> str:
    """Returns dtype and shape of the program's input: `int64 [batch, time]`."""
    shape = ", ".join(str(dim) for dim in program.model.graph.inputs[0].shape)
    return f"{str(inputs.dtype).removeprefix('torch.')} [{shape}]"


def check(model: nn.Module, file: Path, inputs: Tensor) -> str:
    """Compares the outputs with those of onnxruntime; returns the line for the user, empty without onnxruntime."""
    try:
        onnxruntime: Any = importlib.import_module("onnxruntime")
    except ImportError:
        return ""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    run: Callable[[Tensor], Tensor] = lambda x: torch.from_numpy(session.run(None, {"inputs": x.numpy()})[0])  # noqa: E731
    return compare(model, run, inputs, TOLERANCE, f"onnxruntime {onnxruntime.__version__}")
