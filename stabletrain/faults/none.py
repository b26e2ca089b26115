"""No faults: every object stays the one that was built."""

from typing import Any

from stabletrain.records import TrainState


class NoFaults:
    """Nothing is injected: what is given comes back, identically, and the state is left alone."""

    def data(self, data: Any) -> Any:
        """The data set a run reads: an object with `batch(step, size, split)`."""
        return data

    def checkpoints(self, checkpoints: Any) -> Any:
        """The run's checkpoints; see `state/checkpoint.py`."""
        return checkpoints

    def wandb(self, wandb: Any) -> Any:
        """The run's W&B; see `tracking/wandb.py`."""
        return wandb

    def state(self, state: TrainState, precision: Any) -> None:
        """The state a run trains and the precision it trains in, once both are on their device."""
        del state, precision
