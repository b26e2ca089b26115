"""W&B out of reach: from a tick on, every call into the library raises what a lost network raises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.faults.planned import Planned, say


class Unreachable:
    """What the library is from then on: whatever is asked of it raises.

    Args:
        run: the library's run, which is ended quietly when the training run ends.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"wandb is unreachable ({name})")

    def finish(self, exit_code: int) -> None:
        """Ends the library's run, so that its files are whole, and raises as all else does."""
        self._run.finish(exit_code=exit_code)
        raise ConnectionError("wandb is unreachable (finish)")


@dataclass(frozen=True)
class LostWandb(Planned):
    """W&B is out of reach from the first of the ticks `at` on; at 0 it cannot even be started."""

    def wandb(self, wandb: Any) -> Any:
        """The same object, behind which the library gets lost.

        Raises:
            ConfigError: W&B is not used.
        """
        if not hasattr(wandb, "mode"):
            raise ConfigError("faults=wandb does nothing with wandb=disabled: use wandb=offline")
        first, log = min(self.at), wandb.log
        if first == 0:
            wandb._begin = refuse

        def log_or_lose(step: int, metrics: Mapping[str, Any]) -> None:
            tick = metrics.get("tick", step)
            if tick >= first and wandb._run is not None and not isinstance(wandb._run, Unreachable):
                say(f"wandb is out of reach from tick {tick} on")
                wandb._run = Unreachable(wandb._run)
            log(step, metrics)

        wandb.log = log_or_lose
        return wandb


def refuse(*_: Any) -> Any:
    """What the library answers to a new run."""
    raise ConnectionError("wandb is unreachable (init)")
