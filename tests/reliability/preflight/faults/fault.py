"""A planted fault: what is wrong in a loop, as a class that overrides one of the loop's methods."""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tests.reliability.preflight.loop import Loop
from tests.reliability.preflight.loops import LOOPS


class Fault:
    """One variant of a kind; it comes before the loop's class in the order of inheritance.

    Attributes:
        kind: of the fault; a kind has three variants.
        loops: names of the loops that it is planted in.
        says: what a check should say.
        points_at: what a check should name, at least one of them, by the beginning of the name: parameters, modules,
            parts of the state (`optimizers.0`, `optimizers.0.param_groups[1].weight_decay`, `position`), or names
            of code, where it is the user's own (an optimizer, an autograd function).
        options: of the loop.
        warns: whether PyTorch itself warns.
    """

    kind: ClassVar[str] = ""
    loops: ClassVar[tuple[str, ...]] = ()
    says: ClassVar[str] = ""
    points_at: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[dict[str, Any]] = {}
    warns: ClassVar[bool] = False


@dataclass(frozen=True)
class Program:
    """A loop with a fault, or without one.

    Attributes:
        name: of the program.
        loop: the loop's class.
        options: of the loop.
        fault: the fault; None if the program is clean.
    """

    name: str
    loop: type[Loop]
    options: dict[str, Any]
    fault: type[Fault] | None = None

    def make(self) -> Loop:
        """Returns a fresh loop, as the script makes it when it starts."""
        kind = self.loop if self.fault is None else type(self.loop.__name__, (self.fault, self.loop), {})
        loop = kind(**self.options)
        torch.manual_seed(1)  # a fault that draws numbers while it is built shall not differ by that alone
        random.seed(1)
        return loop

    @property
    def clean(self) -> "Program":
        """The same program without the fault."""
        return Program(self.name, self.loop, self.options)


def planted(fault: type[Fault]) -> list[Program]:
    """Returns the programs with this fault, one for each of its loops."""
    return [Program(f"{fault.kind}/{fault.__name__}/{name}", LOOPS[name], fault.options, fault) for name in fault.loops]


def become(module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Gives a module another class, with the same weights; copies of the module have it too."""
    module.__class__ = kind
