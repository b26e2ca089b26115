"""The step's tools, as objectives and guards see them; `Tools` itself (`tools.py`) lies above this room."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from stabletrain.parallel.single import SingleProcess
from stabletrain.stability.after_update import AfterUpdate
from stabletrain.stability.clipping import NoClip
from stabletrain.stability.precision.base import FullPrecision


@runtime_checkable
class StepTools(Protocol):
    """What an objective and a guard use of a step's tools."""

    @property
    def precision(self) -> FullPrecision: ...
    @property
    def clipping(self) -> NoClip: ...
    @property
    def after_update(self) -> AfterUpdate: ...
    @property
    def parallel(self) -> SingleProcess: ...
    def scale(self, loss: Tensor) -> Tensor: ...
