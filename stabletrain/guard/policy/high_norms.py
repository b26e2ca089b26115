"""High gradient norms in a user's loop that are no spikes: those that persist, and those of coupled guards.

**A norm that persists.** If `PERSISTENT` steps in a row are skipped for their gradient norm alone, and the norms agree,
they are the new level: the batches differed and the weights did not change, so these weights have such gradients. The
norms enter the window, and updates are applied again. A rollback is not tried first, because the loss shows no damage.

**Coupled guards.** Guards whose steps alternate, such as those of a GAN's two networks, are coupled. If one network is
held, the other one trains against a network that stands still, and the gradients grow further. A finite spike of a
coupled guard is therefore applied, with an alarm. It is skipped only above `COUPLED` times the recent level.
"""

from stabletrain.guard.policy.limits import LARGEST_NORM, Limits
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Reading

PERSISTENT = 5
"""Number of skips in a row after which a high gradient norm is accepted."""

AGREEMENT = 2.0
"""Norms agree if the largest is at most this multiple of the smallest."""

COUPLED = 1000.0
"""Multiple of the recent gradient norms above which a coupled guard skips a spike."""


class NoHighNorms:
    """Accepts none, as in a run of `train.py`.

    Attributes:
        coupled: whether steps of another guard alternate with this one's.
    """

    coupled = False

    def limit(self, limits: Limits) -> float:
        """Returns the largest gradient norm that opens the gate."""
        return limits.norm.value

    def note_applied(self, reading: Reading, limits: Limits, is_spike: bool) -> None:
        """Notes an applied step, before it enters the windows; `is_spike` is whether it was a spike by the limits."""

    def accept(self, kind: str, reading: Reading, limits: Limits) -> int:
        """Returns how many of the newest skips were no trouble, because their norm is the new level; usually 0."""
        return 0

    def new_alarms(self) -> list[Alarm]:
        """Returns the alarms since the last call."""
        return []

    def reset(self) -> None:
        """Forgets the newest steps."""


class HighNorms(NoHighNorms):
    """Accepts a gradient norm that persists, and spikes of coupled guards."""

    def __init__(self) -> None:
        self._skipped: list[float] = []  # norms of the newest steps in a row that were skipped for them alone
        self._alarms: list[Alarm] = []
        self._in_spike = False

    def limit(self, limits: Limits) -> float:
        """See `NoHighNorms`."""
        return limits.norm.widened(COUPLED) if self.coupled else limits.norm.value

    def note_applied(self, reading: Reading, limits: Limits, is_spike: bool) -> None:
        """Raises an alarm at the first of several spikes in a row that a coupled guard applies."""
        self._skipped.clear()
        spike = self.coupled and is_spike
        if spike and not self._in_spike:
            text = (
                f"{limits.exceeded(reading)}: applied, because another guard's steps alternate with these, and skips "
                "would drive the two networks apart. fix: if it goes on, lower both learning rates"
            )
            self._alarms.append(Alarm("coupled_spike", text))
        self._in_spike = spike

    def accept(self, kind: str, reading: Reading, limits: Limits) -> int:
        """Adds the norms of the newest skips to the window if they persist; raises an alarm then."""
        norm, skipped = reading.grad_norm, self._skipped
        if kind == "overflow":  # says nothing about the norm
            return 0
        if kind != "spike" or reading.loss > limits.loss.value or norm > LARGEST_NORM:
            skipped.clear()
            return 0
        skipped[:] = [*skipped, norm][-PERSISTENT:]
        if len(skipped) < PERSISTENT or max(skipped) > AGREEMENT * min(skipped):
            return 0
        text = (
            f"gradient norms above {limits.norm.value:.4g} in {PERSISTENT} steps in a row, the last one {norm:.4g}, "
            "while the loss is within its limit: accepted as the new level, and updates are applied again. fix: if the "
            "loss rises now, lower the learning rate"
        )
        self._alarms.append(Alarm("norm_level", text))
        for each in skipped:
            limits.norm.add(each)
        skipped.clear()
        return PERSISTENT

    def new_alarms(self) -> list[Alarm]:
        """See `NoHighNorms`."""
        found, self._alarms = self._alarms, []
        return found

    def reset(self) -> None:
        """See `NoHighNorms`."""
        self._skipped, self._alarms, self._in_spike = [], [], False
