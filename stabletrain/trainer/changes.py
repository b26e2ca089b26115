"""Settings that a resume changes: fits the checkpoint's state to them, records them, and shows what they do.

`config/resuming.py` holds the table of what may change. Each checkpoint carries the settings it was trained with, so
that a rollback of the resumed run fits an older checkpoint in the same way.
"""

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.checkpoint.refit import fresh_optimizer, missing, refit
from stabletrain.checkpoint.tree import Tree, is_sharded, map_tensors
from stabletrain.config import trust
from stabletrain.config.make import Choice
from stabletrain.config.resuming import (
    NEW_STATE,
    Settings,
    acting,
    changed_keys,
    override_of,
    recorded_settings,
    row_of,
    settings,
    steps_of_changes,
    values_before,
)
from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks, run_on_main
from stabletrain.records import Batch, TrainState
from stabletrain.tracking.run_folder import NoRunFolder, RunFolder, check_same_data
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.before_after import (
    Subject,
    as_trained,
    fixed_batch,
    largest_logits,
    loss_on,
    near_identity,
)
from stabletrain.trainer.options import ForwardOptions, Options, read

PARTS = ("qknorm", "softmax")
"""Groups that give a model parts with weights, which a resume can add or drop."""

MOVES_LOSS = ("precision", "zloss", "softcap", "label_smoothing")
"""Groups and keys, besides those with new state, whose change may move the loss of the same weights."""


def option_fingerprint(choice: Choice[Any]) -> dict[str, Any]:
    """Returns the data option and its keys: the fingerprint of a user's data set that has no `fingerprint()`."""
    return {"name": choice.option, "keys": choice.node}


def check_data_of_checkpoint(resume: str, fingerprint: Mapping[str, Any]) -> None:
    """Checks that a checkpoint from another run folder was trained on the same data.

    Raises:
        ConfigError: the run that wrote it recorded another fingerprint.
    """
    if resume not in ("auto", "none"):
        other = Path(resume).absolute().parent.parent
        check_same_data(RunFolder(other).read().get("data", {}), fingerprint, other)


@dataclass
class Changed:
    """What a resume has changed.

    Attributes:
        keys: groups and keys, each as `[before, now]`.
        known: those of them that the settings before had too.
        new: one line for each part of the state that starts anew.
        dropped: names of the parameters and buffers that the model no longer has.
        loss: of one fixed batch, before and after the change, in nats; None if it was not measured.
        about: further lines for the user.
    """

    keys: dict[str, list[Any]]
    known: list[str]
    new: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    loss: tuple[float, float] | None = None
    about: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Returns what to show on the terminal."""
        shown = ", ".join(f"{key} {self.keys[key][0]} -> {self.keys[key][1]}" for key in self.known)
        longer = "; the learning-rate schedule now ends at the new last step" if "steps" in self.keys else ""
        lines = [f"changed  {shown}{longer}"]
        lines += [f"new      {line}" for line in self.new]
        lines += [f"dropped  {grouped(self.dropped)}"] if self.dropped else []
        if self.loss is not None:
            before, after = self.loss
            lines.append(
                f"loss     {before:.4f} -> {after:.4f} ({after - before:+.4f}) on one batch, by the change alone"
            )
        return [*lines, *self.about]


def grouped(names: list[str]) -> str:
    """Writes names in short: those of all blocks as one, `blocks.*.attention.query_norm.weight`."""
    general = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return ", ".join(general)


class NoResumption:
    """Restores states as they were saved, and stores no settings with them."""

    def info(self) -> dict[str, Any]:
        """Returns what to store in each checkpoint: nothing."""
        return {}

    def fit(self, checkpoint: Checkpoint, tree: Tree) -> Tree:
        """Returns the tree unchanged."""
        return tree

    def resume(self, checkpoint: Checkpoint, tree: Tree) -> Tree:
        """Returns the tree unchanged."""
        return tree

    def replayable(self, checkpoint: Checkpoint, target: int) -> bool:
        """Returns True."""
        return True

    def went_back(self, step: int) -> None:
        """Does nothing."""


class Resumption(NoResumption):
    """Fits checkpoints to the settings of this process.

    Args:
        options: those settings.
        folder: the run folder.
        state: the live state, before its first step.
        data: the data set.
        precision: in which the run computes; attached to the model already.
        sanitizer: the run's.
        ranks: this process among those of the run.
    """

    def __init__(
        self,
        options: Options,
        folder: Path,
        state: TrainState,
        data: Any,
        precision: Any,
        sanitizer: Any,
        ranks: Ranks,
    ) -> None:
        self._objective, self._batch_size = options.objective, options.batch_size
        self._folder, self._state, self._data, self._ranks = folder, state, data, ranks
        self._precision, self._sanitizer = precision, sanitizer
        self._settings = settings(options.config, options.choices)
        # A rollback of a resumed run may have to fit an older state again, when the optimizer is no longer fresh.
        self._fresh = fresh_optimizer(state) if options.resume != "none" else None
        self._resumed: Checkpoint | None = None
        self._run_folder: NoRunFolder | None = None
        self._pending: tuple[Checkpoint, Tree, Changed] | None = None

    def info(self) -> dict[str, Any]:
        """Returns what to store in each checkpoint: the settings it is trained with."""
        return {"settings": copy.deepcopy(self._settings._asdict())}

    def before(self, checkpoint: Checkpoint) -> Settings | None:
        """Returns the settings that a checkpoint was trained with; None if neither it nor its run folder has them."""
        stored = checkpoint.info.get("settings")
        if isinstance(stored, dict) and {"choices", "values"} <= set(stored):
            return Settings(stored["choices"], stored["values"])
        return recorded_settings(checkpoint.path.parent.parent, checkpoint.step)  # of an older version

    def changes(self, checkpoint: Checkpoint) -> dict[str, list[Any]]:
        """Returns the groups and keys that differ from a checkpoint's, each as `[before, now]`."""
        before = self.before(checkpoint)
        return {} if before is None else changed_keys(before, self._settings)

    def replayable(self, checkpoint: Checkpoint, target: int) -> bool:
        """Whether the steps from a checkpoint to `target` give the same bits now as when they first ran."""
        return self._on_main(lambda: self._same_steps(checkpoint, target))

    def _same_steps(self, checkpoint: Checkpoint, target: int) -> bool:
        run = checkpoint.path.parent.parent
        starts = {checkpoint.step, *(step for step in steps_of_changes(run) if checkpoint.step < step < target)}
        # Those before step N + 1 have the change that was recorded after step N.
        found = [recorded_settings(run, step + 1) or self.before(checkpoint) for step in starts]
        return not any(acting(changed_keys(each, self._settings)) for each in found if each is not None)

    def went_back(self, step: int) -> None:
        """Records that the steps after `step` are run again with the present settings."""
        if self._run_folder is not None:
            self._run_folder.went_back(step)

    def fit(self, checkpoint: Checkpoint, tree: Tree) -> Tree:
        """Returns a checkpoint's state as these settings need it; unchanged if the settings are the same."""
        return self._fit(checkpoint, tree)[0] if self.changes(checkpoint) else tree

    def _fit(self, checkpoint: Checkpoint, tree: Tree) -> tuple[Tree, Changed]:
        before, keys = self.before(checkpoint), self.changes(checkpoint)
        assert before is not None
        assert self._fresh is not None
        had = values_before(before, self._settings)
        changed = Changed(keys, [key for key in keys if key in had])
        names = missing(tree, self._state)
        options = {key for key, (old, now) in keys.items() if row_of(key, old, now).kind == NEW_STATE}
        parts = options & {*PARTS}
        if (names or tree["model"].keys() - self._state.model.state_dict().keys()) and not parts:
            return tree, changed  # not by one of the table's changes: `restore` names the difference
        if parts and self._is_sharded:
            part = min(parts)
            raise ConfigError(
                f"{part}={self._settings.choices[part]}: a run with sharded weights cannot add or drop parts with "
                "weights when it is resumed: resume with parallel=ddp or in one process until the next checkpoint"
            )
        new = self._on_main(lambda: self._new_weights(names, parts, before, tree)) if names else {}
        found = refit(tree, self._state, new, self._fresh)
        changed.dropped = found.dropped
        for key in sorted(options):
            row = row_of(key, *keys[key])
            made = f" ({grouped(found.made)})" if key in parts and found.made else ""
            changed.new.append(f"{key}={keys[key][1]}: {row.text}{made}")
        if found.moments_anew and "optimizer" not in options:  # such as another optimizer._target_
            changed.new.append("optimizer: moments and step counters start at 0")
        return found.tree, changed

    def resume(self, checkpoint: Checkpoint, tree: Tree) -> Tree:
        """Does what `fit` does for the checkpoint that the run continues from; `announce` then says what changed."""
        self._resumed = checkpoint
        if not self.changes(checkpoint):
            return tree
        fitted, changed = self._fit(checkpoint, tree)
        self._pending = checkpoint, tree, changed
        return fitted

    def announce(self, run_folder: NoRunFolder, tracker: NoTracker) -> Changed | None:
        """Records and shows what the resume has changed; call it once the state is restored.

        Returns:
            what changed, the same on every rank; None if nothing did.
        """
        self._run_folder = run_folder
        if self._resumed is None:
            return None
        step = self._state.step
        there, before = recorded_settings(self._folder, step + 1), self.before(self._resumed)
        on_top = there is not None and before is not None and not changed_keys(there, before)
        if self._pending is None:
            run_folder.change(step, {}, on_top=on_top)
            return None
        (checkpoint, tree, changed), self._pending = self._pending, None
        if self._is_measured(changed.keys):
            changed.loss, changed.about = self._on_main(lambda: self._measure(checkpoint, tree, changed.keys))
        for key, (_, now) in changed.keys.items():
            trust.remember_arguments([], [override_of(key, now)])
        run_folder.change(step, changed.keys, on_top=on_top)
        loss = {} if changed.loss is None else dict(zip(("loss_before", "loss_after"), changed.loss, strict=True))
        tracker.event("changed", step, keys=changed.keys, new=changed.new, dropped=changed.dropped, **loss)
        for line in changed.lines():
            tracker.note(line)
        return changed

    def _is_measured(self, keys: Mapping[str, list[Any]]) -> bool:
        moved = [key for key, (old, now) in keys.items() if row_of(key, old, now).kind == NEW_STATE]
        moved += [key for key in keys if key.partition(".")[0] in MOVES_LOSS]
        return bool(moved) and not self._is_sharded

    @property
    def _is_sharded(self) -> bool:
        return any(map(is_sharded, self._state.model.state_dict().values()))

    def _on_main(self, work: Any) -> Any:
        return run_on_main(self._ranks, work)

    def _earlier(self, before: Settings, tree: Tree) -> tuple[Subject, Batch]:
        """Returns the checkpoint's model, built again, and the batch on which it is compared with the present one."""
        device = next(self._state.model.parameters()).device
        weights = map_tensors(lambda tensor: tensor.detach(), tree["model"])
        earlier = as_trained(read(ForwardOptions, before.values, before.choices), self._data, weights, device)
        return earlier, fixed_batch(self._data, self._batch_size, tree["step"], device)

    def _new_weights(self, names: list[str], parts: Iterable[str], before: Settings, tree: Tree) -> dict[str, Tensor]:
        try:
            return near_identity(names, self._state.model, *self._earlier(before, tree))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the checkpoint's model cannot be built again, from which the new parts would start ({error!r}): "
                f"resume without the change of {' and '.join(sorted(parts))}"
            ) from error

    def _measure(
        self, checkpoint: Checkpoint, tree: Tree, keys: Mapping[str, Any]
    ) -> tuple[tuple[float, float] | None, list[str]]:
        """Returns the loss before and after the change, and further lines; None if it cannot be measured."""
        before, about = self.before(checkpoint), []
        assert before is not None
        # A user's model or data may be built only once, or not from these settings any more: then nothing is measured.
        with suppress(Exception):
            try:
                earlier, batch = self._earlier(before, tree)
                earlier.precision.prepare()
                old = loss_on(earlier, batch)
                if "softcap" in keys:
                    about = caps(self._settings, largest_logits(earlier, batch))
            finally:
                self._precision.prepare()
            now = Subject(self._state.model, self._precision, self._objective, self._sanitizer)
            return (old, loss_on(now, batch)), about
        return None, []


def caps(now: Settings, largest: Mapping[str, float]) -> list[str]:
    """Returns a line that compares the caps of `softcap` with the largest logits there are; none without caps."""
    names = {"attention_cap": "attention", "final_cap": "output"}
    wanted = {key: now.values["softcap"].get(key) for key in names}
    said = [
        f"the largest {names[key]} logit is {size:.3g}, its cap {wanted[key]:g}"
        for key, size in sorted(largest.items())
        if isinstance(wanted[key], int | float)
    ]
    return [f"softcap  {'; '.join(said)}"] if said else []
