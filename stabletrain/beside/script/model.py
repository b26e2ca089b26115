"""The model of an optimizer, if the module that the script calls does not hold all parameters of the optimizer.

A script may train several networks with one optimizer, call the parts of a model one by one, or train bare tensors.
"""

import gc
from collections.abc import Sequence

from torch import Tensor, nn

from stabletrain.guard.gradients import BareTensors


def model_of(parameters: Sequence[Tensor]) -> nn.Module:
    """Returns a module that holds all parameters.

    It is the smallest one that the script has; else one that is made of those that hold most of them, by the names of
    their classes, and of the tensors that are in none.
    """
    left = {id(parameter): parameter for parameter in parameters}
    held = [(module, {id(each) for each in module.parameters()}) for module in living_modules()]
    held = [(module, ids) for module, ids in held if not ids.isdisjoint(left)]
    parts: list[nn.Module] = []
    while left:
        # Most of the parameters, and few others; of modules with the same, such as DDP and its module, the outermost.
        ranked = [(len(ids & left.keys()), -len(ids), depth(module)) for module, ids in held]
        best = max(range(len(held)), key=ranked.__getitem__, default=None)
        if best is None or not ranked[best][0]:
            parts.append(BareTensors(left.values()))
            break
        module, ids = held[best]
        parts.append(module)
        left = {key: parameter for key, parameter in left.items() if key not in ids}
    if len(parts) == 1:
        return parts[0]
    names = [type(part).__name__ for part in parts]
    numbered = [name if names.count(name) == 1 else f"{name}{at}" for at, name in enumerate(names)]
    return nn.ModuleDict(dict(zip(numbered, parts, strict=True)))


def living_modules() -> list[nn.Module]:
    """Returns all modules of this process. Asks for types only: objects that load libraries when used stay unused."""
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_parameters" in vars(each)]


def depth(module: nn.Module) -> int:
    """Returns the number of modules in a module."""
    return sum(1 for _ in module.modules())
