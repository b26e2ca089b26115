"""A step of a user's loop on disk, and its replay in another process.

The batch is always saved. The step can be replayed if its closures can be imported, and find the model in a global
variable of their module. Then the weights are saved as well. Otherwise `why_not_replayable` gives the reason.

    step.json            names of closures and model, generators, the step's reading
    batch.safetensors     the tensors of the batches, and the generators' states
    state.safetensors     parameters and buffers from before the step
"""

import importlib.machinery
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.buffers import buffers_of
from stabletrain.checkpoint.tree import flatten, map_tensors, unflatten
from stabletrain.checkpoint.writer import DTYPES
from stabletrain.errors import ConfigError
from stabletrain.forensics import saved_step as files
from stabletrain.forensics.facts import Outcome, compared
from stabletrain.forensics.rerun import outcome_of
from stabletrain.forensics.user_code import hash_of
from stabletrain.guard.micro_batch import MicroBatch, named_tensors
from stabletrain.guard.rerun import BegunStep, Generators, Rerun
from stabletrain.parallel.loop import innermost
from stabletrain.records import Reading
from stabletrain.stability.precision.loop import GivenScale, precision_of_loop
from stabletrain.stored import trusted
from stabletrain.stored.json_files import DamagedFile, check_type
from stabletrain.stored.run_files import RUN


def why_not_replayable(rerun: Rerun, *, sharded: bool, keep_state: bool) -> str:
    """Returns why a step cannot be replayed from its folder; empty if it can."""
    if sharded:
        return "the weights are sharded across ranks"
    if not keep_state:
        return "Guard(keep_state=False) does not save the weights"
    for closure in (each.closure for each in rerun.begun.micro_batches):
        if why := getattr(closure, "not_replayable", "") or why_not_importable(closure):
            return why
        if not name_of_model(closure, rerun.model):
            return f"the model is not a global variable of the module '{closure.__module__}', where the closure is"
    try:
        flatten([each.batch for each in rerun.begun.micro_batches])
    except TypeError as error:
        return f"the batch cannot be saved: {error}"
    odd = [tensor for each in rerun.begun.micro_batches for _, tensor in named_tensors(each.batch) if not fits(tensor)]
    return f"the batch cannot be saved: it holds a tensor of {odd[0].layout} and {odd[0].dtype}" if odd else ""


def fits(tensor: Tensor) -> bool:
    """Returns whether a safetensors file can hold a tensor: it is dense, and its dtype is known there."""
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.dtype in DTYPES


def why_not_importable(closure: Callable[..., Any]) -> str:
    """Returns why another process cannot import a closure; empty if it can."""
    name, module = getattr(closure, "__qualname__", ""), getattr(closure, "__module__", "")
    if module == "__main__":
        return "the closure is defined in the script itself (__main__): move it to a module that can be imported"
    if not name or "<" in name:
        return "the closure is a lambda or a function inside a function: define it at the top level of a module"
    if getattr(sys.modules.get(module), name, None) is not closure:
        return f"'{name}' of the module '{module}' is not the closure"
    return "" if getattr(sys.modules[module], "__file__", None) else f"the module '{module}' has no file"


def name_of_model(closure: Callable[..., Any], model: nn.Module) -> str:
    """Returns the global variable of the closure's module that holds the model; empty if there is none."""
    values = getattr(closure, "__globals__", {})
    return next((name for name, v in values.items() if isinstance(v, nn.Module) and innermost(v) is model), "")


def save_loop_step(folder: Path, rerun: Rerun, reading: Reading, *, whole: bool, comparable: bool) -> None:
    """Writes a step into its incident's folder.

    Args:
        whole: whether to write all that a replay needs, or only those tensors of the batch that `fits` accepts.
        comparable: whether a replay must give the step's bits.

    Raises:
        OSError: the disk is full or gone.
    """
    begun = rerun.begun
    if not whole:
        numbered = enumerate(begun.micro_batches)
        named = [(f"{i}/{name}", tensor) for i, each in numbered for name, tensor in named_tensors(each.batch)]
        files.write_batch(folder, {name: tensor for name, tensor in named if fits(tensor)})
        return
    generators = begun.generators
    version, keys, *numpy = generators.numpy
    drawn = {
        "cpu": generators.cpu,
        "card": generators.card,
        "numpy": [version, torch.from_numpy(keys.astype("int64")), *numpy],
        "python": generators.python,
    }
    trained = set(map(id, rerun.parameters))
    closures = [closure_record(each.closure, rerun.model) for each in begun.micro_batches]
    trusted.remember(closures)
    about = {
        "format": files.FORMAT,
        "closures": closures,
        "step": reading.step - 1,
        "loss_scale": rerun.loss_scale,
        "precision": "" if isinstance(rerun.precision, GivenScale) else rerun.precision.name,
        "reading": reading._asdict(),
        "comparable": comparable,
        "device": str(generators.device),
        "trained": [name for name, each in rerun.model.named_parameters() if id(each) in trained],
        "threads": torch.get_num_threads(),
    }
    batch = {"batches": [each.batch for each in begun.micro_batches], "generators": drawn}
    files.write_step(folder, about, batch, rerun.model, begun.buffers.tensors())


def closure_record(closure: Callable[..., Any], model: nn.Module) -> dict[str, Any]:
    """Returns how another process imports a closure and finds its model."""
    module = sys.modules[closure.__module__]
    file = str(module.__file__)
    depth = closure.__module__.count(".") + (Path(file).name == "__init__.py")
    return {
        "module": closure.__module__,
        "name": getattr(closure, "__qualname__", ""),
        "model": name_of_model(closure, model),
        "path": str(Path(file).resolve().parents[depth]),
        "file": file,
        "sha256": hash_of(file),
    }


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was replayed from its folder.

    Attributes:
        changed: the files of the closures that have changed since.
    """

    reading: Reading
    outcome: Outcome
    changed: list[str]


def replay_loop_step(folder: Path) -> ReplayedStep:
    """Replays a step of a user's loop from its folder: imports the closures, and loads weights and generators.

    Raises:
        ConfigError: a file is missing or damaged, or a closure or its model is not there any more.
    """
    saved = files.read(folder)
    kept = files.tensors_of(folder, files.BATCH, saved)
    try:
        reading = files.checked_reading(unflatten(saved["reading"], {}))
        batches, _ = kept["batches"], generators_of(kept["generators"], torch.device(saved["device"]))
        check_type(saved["closures"], list[files.ClosureRecord], "closures")
        if not len(saved["closures"]) == len(batches) > 0:
            raise ValueError(f"{len(batches)} batches of {len(saved['closures'])} closures")
        _ = [saved[key] for key in ("loss_scale", "precision", "comparable")]
        torch.set_num_threads(saved["threads"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedFile(f"{folder / files.STEP} is damaged ({type(error).__name__}: {error})") from error
    records = saved["closures"]
    trusted.check_trusted(records, f"the module {records[0]['module']}", folder / files.STEP)
    closures = [import_closure(record, folder) for record in records]
    outer = closures[0][1]
    model, device = innermost(outer), torch.device(saved["device"])
    state = files.tensors_of(folder, files.STATE, saved)
    files.put_(dict(model.named_parameters()), state["parameters"], folder, True)
    files.put_(dict(model.named_buffers()), state["buffers"], folder, True)
    home = next(model.parameters()).device
    batches = map_tensors(lambda tensor: tensor.to(home), kept["batches"])
    micro_batches = [MicroBatch(closure, batch) for (closure, _), batch in zip(closures, batches, strict=True)]
    begun = BegunStep(generators_of(kept["generators"], device), buffers_of(model).save(), micro_batches)
    # The gradient norm is that of the optimizer's parameters. An incident of an earlier version does not name them.
    trained = saved.get("trained") or [name for name, each in model.named_parameters() if each.requires_grad]
    parameters: list[Tensor] = [parameter for name, parameter in model.named_parameters() if name in trained]
    chosen = precision_of_loop(saved["precision"] or None, device)
    rerun = Rerun(model, outer, parameters, chosen, begun, saved["loss_scale"])
    outcome = compared(outcome_of(rerun.run, math.inf), reading, None, saved["comparable"])
    known = {record["file"]: record["sha256"] for record in records}
    return ReplayedStep(reading, outcome, [file for file, digest in known.items() if hash_of(file) != digest])


def import_closure(record: Mapping[str, Any], folder: Path) -> tuple[Callable[..., Any], nn.Module]:
    """Imports a closure and its model.

    Raises:
        ConfigError: they are not there any more, or lie inside the run's own folder, where no code belongs.
    """
    first = record["module"].partition(".")[0]
    # the path itself too: it stays on `sys.path`, and would be searched for every later import
    spec = importlib.machinery.PathFinder.find_spec(first, [record["path"], *sys.path])  # imports nothing
    places = [record["path"], *([] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())])]
    for place in places:
        if place is not None and Path(os.path.realpath(place)).is_relative_to(folder_of_run(folder)):
            raise ConfigError(f"{folder} holds the module '{first}' itself ({place}): no code is run from an incident")
    if record["path"] not in sys.path:
        sys.path.insert(0, record["path"])
    try:
        module = importlib.import_module(record["module"])
        return getattr(module, record["name"]), getattr(module, record["model"])
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{folder}: '{record['name']}' and the model '{record['model']}' of the module '{record['module']}' cannot "
            f"be imported ({error}): set PYTHONPATH to the folder of {Path(record['file']).name}"
        ) from error


def folder_of_run(incident: Path) -> Path:
    """Returns the run folder around an incident; the incident's own folder if it lies in none."""
    here = incident.resolve()
    return next((place for place in here.parents if (place / RUN).exists()), here)


def generators_of(kept: Mapping[str, Any], device: torch.device) -> Generators:
    """Rebuilds the states of the random generators."""
    version, keys, *numpy = kept["numpy"]
    python: Sequence[Any] = kept["python"]
    return Generators(
        kept["cpu"],
        kept["card"],
        (version, keys.numpy().astype("uint32"), *numpy),
        (python[0], tuple(python[1]), python[2]),
        device,
    )
