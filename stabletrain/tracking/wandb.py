"""Weights & Biases as a spectator: it is told what happens, never asks for an account, and can never stop training.

`offline` needs no account: everything is kept in `<run folder>/wandb`, and `stabletrain sync` uploads it later.
Whatever goes wrong inside the library is one warning; `metrics.jsonl` holds the same numbers anyway.

The names are those of `metrics.jsonl`, so that W&B's sections are the config groups. Each is drawn against `step`.
Hidden from the automatic plots, though they can be added by hand, are counters, and what the monitors measure at single
places, `monitors/<what>/<place>`: these would be hundreds.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import plain, read_jsonl
from stabletrain.tracking.wandb_setup import card_of, has_key, name_of, sweep_of, tags_of

FINISH_TIMEOUT = 120.0
"""Seconds that the end of an online run waits for its upload; what is left stays on the disk for `wandb sync`."""

INCIDENT = ("step", "kind", "cause", "verdict", "fix", "path")
"""Columns of the table `incidents`."""

HIDDEN = ("step", "tick", "guard/applied")
"""Counters that nobody plots."""


class NoWandb:
    """Tells nobody."""

    def start(
        self,
        folder: Path,
        run_id: str | None,
        config: Mapping[str, Any],
        typed: Sequence[str] = (),
        sweeping: bool = False,
    ) -> str:
        """Nothing is started; returns the id it was given."""
        return run_id or ""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Nothing is logged."""

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """Nothing is kept."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def alert(self, title: str, text: str) -> None:
        """Nobody is alerted."""

    def finish(self, exit_code: int) -> None:
        """Nothing is finished."""


class Wandb(NoWandb):
    """One run of Weights & Biases.

    Attributes:
        mode: `offline`, or `online`, which warns and goes on offline where there is no API key or no network.
        project, entity, group, name: where the run is filed; None leaves the choice to `WANDB_RUN_GROUP` and the like,
            then to `filing`, then to the library.
        tags: beside the options of the config groups.
    """

    def __init__(
        self,
        mode: str,
        project: str,
        entity: str | None = None,
        group: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        if mode not in ("offline", "online"):
            raise ConfigError(f"wandb.mode={mode} is neither offline nor online: choose one, or wandb=disabled")
        self.mode = mode
        self.project, self.entity, self.group, self.name, self.tags = project, entity, group, name, list(tags)
        self._run: Any = None
        self._warned = False
        self._defined: set[str] = set()
        self._incidents: list[Sequence[Any]] = []
        self._shown = 0

    def start(
        self,
        folder: Path,
        run_id: str | None,
        config: Mapping[str, Any],
        typed: Sequence[str] = (),
        sweeping: bool = False,
    ) -> str:
        """Begins the run, or goes on with it.

        Args:
            folder: the run folder; files go to its `wandb/`.
            run_id: of this run; None lets the library choose. An interrupted run that is continued under its id stays
                one run online; offline each stretch has a file of its own with the same id, for `stabletrain sync`.
            config: the whole configuration, plain values; `groups` are the options chosen, `hardware` what it runs on.
            typed: the run's overrides.
            sweeping: whether it is one of a sweep.

        Returns:
            the run's id, to be kept with the checkpoint; `run_id` or "" if the library would not start.
        """
        so = "this run is kept offline" if self.mode == "online" else "this run is not recorded there"
        card, sweep = card_of(config.get("hardware", {})), sweep_of(folder, sweeping)
        filed = {
            "group": self.group or (None if os.environ.get("WANDB_RUN_GROUP") else sweep),
            "name": self.name or (name_of(folder, typed) if sweep and not os.environ.get("WANDB_NAME") else None),
            "job_type": None if os.environ.get("WANDB_JOB_TYPE") else card,
            "tags": tags_of(config.get("groups", {}), self.tags),
        }
        self._run = self._try(lambda: self._begin(self.mode, folder, run_id, config, filed), so)
        if self._run is None and self.mode == "online":
            self._run = self._try(lambda: self._begin("offline", folder, run_id, config, filed))
        if self._run is None:
            return run_id or ""
        self._defined.clear()
        self._incidents = [row(line) for line in read_jsonl(folder / "events.jsonl") if line.get("event") == "incident"]
        self._shown = 0
        self.summary({"card": card, **self._of_incidents()})
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds a point at `step`. The step is a metric of its own: after a rollback it may go back, which the
        library's own step counter answers by dropping the point."""
        if self._run is not None:
            point = {"step": step, **metrics}
            self._try(lambda: self._define(point))
            self._try(lambda: self._run.log(point))

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """Adds an incident to the table of them, which is logged whole again; other events stay in `events.jsonl`."""
        if self._run is not None and kind == "incident":
            self._incidents.append(row({"step": step, **fields}))
            self._show_incidents()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Sets values of the run's line in W&B's table; NaN and infinities as words, where the library has null."""
        if self._run is not None:
            self._try(lambda: self._run.summary.update(plain(values)))

    def alert(self, title: str, text: str) -> None:
        """Sends a message to the run's owner, as far as their account is set up for it."""
        if self._run is not None:
            self._try(lambda: self._run.alert(title=title[:60], text=text))

    def finish(self, exit_code: int) -> None:
        """Ends the run with its own exit code, so that runs of one process are not told apart by the last one's."""
        if self._run is not None and len(self._incidents) > self._shown:  # of a run that is continued
            self._show_incidents()
        run, self._run = self._run, None
        if run is not None:
            self._try(lambda: run.finish(exit_code=exit_code))

    def _define(self, names: Iterable[str]) -> None:
        """Says of each new name that it is drawn against the step, and whether it is drawn unasked.

        One by one: of a pattern, `*`, an uploaded offline run keeps only what the server makes of it. No name gets the
        summary `min`: once it has met a NaN, the library's stays NaN for ever.
        """
        for name in names:
            if name not in self._defined:
                self._defined.add(name)
                hidden = name in HIDDEN or name.count("/") > 1
                self._run.define_metric(name, step_metric=None if name == "step" else "step", hidden=hidden)

    def _show_incidents(self) -> None:
        def show() -> None:
            import wandb

            self._define(["step"])
            table = wandb.Table(columns=[*INCIDENT], data=[*self._incidents])
            self._run.log({"step": self._incidents[-1][0], "incidents": table})

        self._shown = len(self._incidents)
        self._try(show)
        self.summary(self._of_incidents())

    def _of_incidents(self) -> dict[str, Any]:
        found = {"incident/count": len(self._incidents)}
        return found | ({"incident/cause": self._incidents[0][INCIDENT.index("cause")]} if self._incidents else {})

    def _begin(
        self, mode: str, folder: Path, run_id: str | None, config: Mapping[str, Any], filed: Mapping[str, Any]
    ) -> Any:
        import wandb
        from wandb.sdk.wandb_run import Run

        # W&B Launch's inputs: who looks for them, and finds none, loads modules for a second; to begin a run took 1.1
        # to 1.8 s with that, and 0.5 s without (W&B 0.31).
        if hasattr(Run, "_detect_and_apply_job_inputs"):
            Run._detect_and_apply_job_inputs = lambda self: None
        if mode == "online" and not has_key(wandb):
            raise RuntimeError("no API key was found, and none is asked for: log in with `wandb login`")
        settings: dict[str, Any] = {"mode": mode, "silent": True, "console": "off", "reinit": "create_new"}
        settings |= {"disable_code": True, "init_timeout": 30.0}
        if "finish_timeout" in wandb.Settings.model_fields:
            settings["finish_timeout"] = FINISH_TIMEOUT
        folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            id=run_id,
            dir=str(folder),
            config=plain(config),  # its NaN and infinities would be null
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(**settings),
            project=self.project,
            entity=self.entity,
            **filed,
        )

    def _try(self, call: Callable[[], Any], so: str = "some of this run may be missing there") -> Any:
        """The call's value; None and, the first time, a warning if it raises anything at all."""
        try:
            return call()
        except Exception as error:
            if not self._warned:
                self._warned = True
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                print(f"stabletrain: wandb: {reason}: {so}, metrics.jsonl has everything", file=sys.stderr)
            return None


def row(incident: Mapping[str, Any]) -> list[Any]:
    """A line of the table `incidents`: plain values, of which text is never null, in the order of `INCIDENT`."""
    fixes = "; ".join(map(str, incident.get("fix") or ()))
    texts = {"fix": fixes, "step": int(incident.get("step", 0))}
    return [texts[name] if name in texts else str(incident.get(name) or "") for name in INCIDENT]
