"""A held-out program, and how one is registered."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Fault:
    """What is wrong in a program.

    Attributes:
        kind: of the fault, as in the proof set.
        says: what a check should say.
        points_at: what a check should name, at least one of them, by the beginning of the name.
        warns: whether PyTorch itself warns.
    """

    kind: str
    says: str
    points_at: tuple[str, ...]
    warns: bool = False


@dataclass(frozen=True)
class Program:
    """A loop with a fault, or without one.

    Attributes:
        name: of the program.
        loop: makes the loop; a class.
        fault: None if the program is clean.
    """

    name: str
    loop: type
    fault: Fault | None = None

    def make(self) -> Any:
        """Returns a fresh loop, as the script makes it when it starts."""
        loop = self.loop()
        seed(1)  # a fault that draws numbers while it is built shall not differ by that alone
        return loop.parts() if hasattr(loop, "parts") else loop

    @property
    def clean(self) -> "Program":
        """The same program without the fault: the class that the faulty one derives from."""
        return Program(self.name, self.loop.__bases__[0])


FAULTY: list[Program] = []
CLEAN: list[Program] = []


def planted(kind: str, says: str, *points_at: str, warns: bool = False) -> Callable[[type], type]:
    """Registers a class as its base class with a fault."""

    def register(loop: type) -> type:
        FAULTY.append(Program(named(loop, f"{kind}/{loop.__name__}"), loop, Fault(kind, says, points_at, warns)))
        return loop

    return register


def clean(loop: type) -> type:
    """Registers a class as a clean program."""
    CLEAN.append(Program(named(loop, loop.__name__), loop))
    return loop


def named(loop: type, name: str) -> str:
    """Returns the name of a program: those of the second set begin with `second/`."""
    return f"second/{name}" if ".second." in loop.__module__ else name


def seed(number: int) -> None:
    """Seeds Python's and PyTorch's random numbers."""
    random.seed(number)
    torch.manual_seed(number)
