"""Keeps the rest of a step: takes a held step again without the few samples that are at fault (`guard/guilty.py`).

With `keep=all_but_guilty`, a step that was held as `bad_data`, `nonfinite` or `spike` is taken again once, with the
same weights and learning rate. It is judged by the same limits. If it is held again, it is skipped, as without this
option. A step of which more than half of the samples are guilty is skipped too: then the weights or the data as a whole
are at fault.

A guard that leaves samples out may hide a mistake in the data. An alarm says so if more than 1 % of the samples of the
last `window` steps were left out.
"""

from dataclasses import dataclass, field
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.guard.policy.machine_faults import RetryingGuard
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Reading

KEEP = ("none", "all_but_guilty")

KEPT_KINDS = ("bad_data", "nonfinite", "spike")
"""Kinds of held steps of which samples may be guilty. The others are faults of the machine or of the precision."""

MOST = 0.5
"""Largest share of a step's samples that is left out."""

ALARMING = 0.01
"""Share of the samples of a window above which an alarm is raised."""

COUNTS = {"kept_steps": "kept_steps", "samples_left_out": "samples_left_out"}
"""Counts of the whole run that no rollback undoes, each with its key in checkpoints."""


@dataclass
class KeepingGuard(RetryingGuard):
    """Takes a held step again without its guilty samples.

    Attributes:
        keep: `all_but_guilty`, or `none`: the whole step is skipped.
        kept_steps: number of steps that were applied without some of their samples.
        samples_left_out: number of those samples, over all ranks.
        left_out: number of those samples in the step that was judged last.
        unfinished: folder of the incident whose step is taken again, so that its result is unknown.
    """

    keep: str = "none"
    kept_steps: int = 0
    samples_left_out: int = 0
    _retaken: tuple[int, int, int] = field(init=False, repr=False, default=(0, 0, 0))
    """The step that is taken again, how many of its samples were left out, and how many it had; 0 for none."""
    _second_try: bool = field(init=False, repr=False, default=False)
    _recent: list[tuple[int, float]] = field(init=False, repr=False, default_factory=list)
    """The kept steps of the last window, each with the share of its samples that was left out."""
    _alarmed: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        if self.keep not in KEEP:
            raise ConfigError(f"{self.option('keep')} is not one of {', '.join(KEEP)}")

    @property
    def keeps(self) -> bool:
        """Whether the rest of a held step is kept, without its guilty samples."""
        return self.keep != "none"

    @property
    def may_keep(self) -> bool:
        """Whether the step that was just held may be taken again without its guilty samples."""
        return self.keeps and self.kind in KEPT_KINDS and not self._second_try

    def take_without(self, step: int, left_out: int, samples: int) -> None:
        """Notes that a held step is taken again without some of its samples. It is not counted as skipped.

        Args:
            step: the step.
            left_out: how many of its samples are left out.
            samples: how many it had, over all ranks.
        """
        self._retaken = (step, left_out, samples)
        self._restore_counts()

    def _count_kept(self, reading: Reading, window: int) -> list[Alarm]:
        """Counts the samples that a step was applied without; returns an alarm if it is the one that makes them many.

        Args:
            reading: of a step that was just judged.
            window: number of steps in which they are counted.
        """
        (step, left_out, samples), self._retaken = self._retaken, (0, 0, 0)
        self._second_try = step == reading.step
        self.left_out = left_out if self._second_try and reading.applied else 0
        if not (self.left_out or self._recent):  # nearly every step
            return []
        self._recent = [each for each in self._recent if reading.step - window < each[0] <= reading.step]
        if self.left_out:
            self.kept_steps += 1
            self.samples_left_out += left_out
            self._recent.append((reading.step, left_out / samples))
        share = sum(each[1] for each in self._recent) / window
        before, self._alarmed = self._alarmed, share > ALARMING
        if before or not self._alarmed:
            return []
        text = (
            f"{share:.1%} of the samples of the last {window} steps were left out, more than {ALARMING:.0%}: this may "
            "hide a mistake in the data or in the code. fix: look at these samples, which events.jsonl names"
        )
        return [Alarm("left_out", text)]

    def state_dict(self) -> dict:
        """Counts, for the checkpoint."""
        counts = {key: getattr(self, name) for name, key in COUNTS.items()}
        recent = {"kept_recent": [[*each] for each in self._recent], "kept_alarmed": self._alarmed}
        return super().state_dict() | counts | recent

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them; older versions kept no part of a step."""
        super().load_state_dict(state)
        for name, key in COUNTS.items():
            setattr(self, name, state.get(key, 0))
        self._recent = [(int(step), float(share)) for step, share in state.get("kept_recent", [])]
        self._alarmed = bool(state.get("kept_alarmed", False))
        self._retaken, self._second_try, self.left_out = (0, 0, 0), False, 0
