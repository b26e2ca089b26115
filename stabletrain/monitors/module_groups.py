"""Module groups: the names under which monitors report, for any model.

A *block* is an outermost element of an `nn.ModuleList` or `nn.Sequential` that has submodules (GPT's `blocks.0`,
CifarResNet's `stages.0.1`, torchvision's `layer1.0`). In a model without such elements the direct children are the
blocks. The *place* of a parameter is its block, or else its top-level module ("embedding", "head").
"""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

STACKS = (nn.ModuleList, nn.Sequential)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the model's blocks by name, in the order of `model.named_children()`."""
    return dict(_blocks(model, "", stacked=False)) or dict(model.named_children())


def _blocks(module: nn.Module, prefix: str, *, stacked: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yields the blocks in `module`; `stacked` is True if its parent is a stack."""
    stack = isinstance(module, STACKS)
    below = any(True for _ in module.children())
    of_leaves = stack and not any(any(True for _ in child.children()) for child in module.children())
    if stacked and below and (not stack or of_leaves):  # a stack of layers is a block; a stack of blocks is not
        yield prefix.removesuffix("."), module
        return
    for name, child in module.named_children():
        yield from _blocks(child, f"{prefix}{name}.", stacked=stack)


def place(name: str, among: dict[str, nn.Module]) -> str:
    """Returns the place of the module or parameter `name`: its block in `among`, or else the first part of its name."""
    for block in among:
        if name == block or name.startswith(block + "."):
            return block
    return name.partition(".")[0]


def by_place(names: Iterable[str], among: dict[str, nn.Module]) -> dict[str, list[str]]:
    """Groups names by place; keeps their order."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(place(name, among), []).append(name)
    return found


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Returns the non-empty parameters that have a gradient, by name; a shared one once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.grad is not None and p.numel()}
