"""The numbers of a step on their way from the device to the host, so that no step waits for its own.

They are copied in the background when the update is committed, and read when the next step has been launched.
"""

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from stabletrain.records import DeviceReading, OwnNumbers, Reading


class InFlight:
    """A reading on its way from the device to the host.

    Attributes:
        own: this rank's own numbers of the step, on the device; None in a single process.
        undone: whether the update was applied and then undone, because it was not finite.
        recomputed: whether the step was computed again since, so that `.grad` holds its own gradients, not the next
            step's.
    """

    def __init__(
        self,
        numbers: DeviceReading,
        own: OwnNumbers | None = None,
        undone: bool = False,
        wait_for: Callable[[Any], None] = methodcaller("synchronize"),
    ) -> None:
        """Starts copying the numbers to the host.

        Args:
            own, undone: see above.
            wait_for: waits for a CUDA event.
        """
        self._wait_for = wait_for
        self.own, self.undone, self.recomputed = own, undone, False
        self._known: dict[str, Any] = dict(vars(numbers))
        self._terms = {f"terms/{name}": name for name in numbers.terms}  # no field has a slash in its name
        self._known |= {key: numbers.terms[name] for key, name in self._terms.items()}
        # All numbers travel in one copy: a copy of each would cost the host as much as launching a layer.
        on_device = {name: value for name, value in self._known.items() if isinstance(value, Tensor)}
        self._names = [*on_device]
        self._values = torch.stack(
            [each if each.dtype == torch.float32 else each.float() for each in on_device.values()]
        )
        self._arrived = None
        if self._values.is_cuda:
            values, self._values = self._values, torch.empty(len(self._names), pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Reading:
        """Returns the reading. On CUDA this waits for the copy only, not for work launched after it.

        Raises:
            RankLost: another rank has ended, so the step never will.
        """
        if self._arrived is not None:
            self._wait_for(self._arrived)
        numbers = self._known | dict(zip(self._names, self._values.tolist(), strict=True))
        numbers["terms"] = {name: numbers.pop(key) for key, name in self._terms.items()}
        numbers["applied"] = not (numbers.pop("withheld") or numbers["bad_update"])
        if numbers["clip_active"] is None:  # the gradient was clipped as a whole
            numbers["clip_active"] = float(numbers["clip_coef"] < 1)
        flags = {name: bool(numbers[name]) for name in ("bad_data", "overflow", "state_changed", "bad_update", "stop")}
        numbers |= {**flags, "rank": int(numbers["rank"])}
        return Reading(**numbers)
