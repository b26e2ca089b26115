"""Logs a run to Weights & Biases (W&B).

The default mode `offline` needs no account. It writes to `<run folder>/wandb`, and `stabletrain sync` uploads that
later. W&B never prompts the user and never stops training. The first error in the library prints a warning;
`metrics.jsonl` has the same numbers.

Metrics have the same names as in `metrics.jsonl`, so W&B's sections are the config groups. They are plotted against
`step`. Counters and the metrics of single module groups, `monitors/<metric>/<group>`, have no automatic plots, because
there would be hundreds. The user can add such plots in W&B.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.importing import uncollected
from stabletrain.printable import say
from stabletrain.tracking.metrics import plain, read_jsonl
from stabletrain.tracking.wandb_setup import cache_folder, card_of, has_key, name_of, sweep_of, tags_of

FINISH_TIMEOUT = 120.0
"""Seconds that an online run waits for its upload to finish. `wandb sync` can upload the rest from disk."""

INCIDENT_COLUMNS = ("step", "kind", "cause", "verdict", "fix", "path")
"""Columns of the W&B table `incidents`."""

WITHOUT_PLOT = ("step", "tick", "guard/applied")
"""Counters without automatic plots."""


class NoWandb:
    """Logs nothing. Base class of all kinds, and what each must offer; no method may raise or wait for a network."""

    def start(
        self,
        folder: Path,
        run_id: str | None,
        config: Mapping[str, Any],
        typed: Sequence[str] = (),
        sweeping: bool = False,
    ) -> str:
        """Starts the run, or continues it. Does nothing.

        Args:
            folder: the run folder; files go to its `wandb/`.
            run_id: the id of the run; None lets W&B choose.
            config: the whole configuration in plain values; `groups` has the chosen options, `hardware` the machine.
            typed: the command-line overrides.
            sweeping: whether the run is part of a sweep.

        Returns:
            the id of the run, to be stored in the checkpoint; `run_id` or "" if nothing was started.
        """
        return run_id or ""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the metrics of a step. Does nothing."""

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """Logs an event, such as an incident. Does nothing."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Sets summary values of the run. Does nothing."""

    def alert(self, title: str, text: str) -> None:
        """Sends an alert to the owner of the run. Does nothing."""

    def finish(self, exit_code: int) -> None:
        """Ends the run with its exit code. Does nothing."""


class Wandb(NoWandb):
    """One run of Weights & Biases.

    Attributes:
        mode: `offline` or `online`. Without an API key or a network, `online` warns and continues offline.
        project, entity, group, name: where W&B stores the run. None uses environment variables such as
            `WANDB_RUN_GROUP`, then the defaults of `wandb_setup.py`, then those of the library.
        tags: tags in addition to the options of the config groups.
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
        """Starts the run, or continues it.

        A resumed run keeps its id. Online it stays one run. Offline each start writes its own piece, and `stabletrain
        sync` joins them.
        """
        consequence = "this run is logged offline" if self.mode == "online" else "this run is not logged to W&B"
        card, sweep = card_of(config.get("hardware", {})), sweep_of(folder, sweeping)
        placement = {
            "group": self.group or (None if os.environ.get("WANDB_RUN_GROUP") else sweep),
            "name": self.name or (name_of(folder, typed) if sweep and not os.environ.get("WANDB_NAME") else None),
            "job_type": None if os.environ.get("WANDB_JOB_TYPE") else card,
            "tags": tags_of(config.get("groups", {}), self.tags),
        }
        with cache_folder(folder / "wandb" / "cache"):
            self._run = self._try(lambda: self._begin(self.mode, folder, run_id, config, placement), consequence)
            if self._run is None and self.mode == "online":
                self._run = self._try(lambda: self._begin("offline", folder, run_id, config, placement))
        if self._run is None:
            return run_id or ""
        self._defined.clear()
        # A killed run that meets the same step again records its incident again.
        lines = [line for line in read_jsonl(folder / "events.jsonl") if line.get("event") == "incident"]
        self._incidents = [
            row(line) for line in {(line.get("step"), line.get("tick")): line for line in lines}.values()
        ]
        self._shown = 0
        self.summary({"card": card, **self._incident_summary()})
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the metrics of a step, against `step`."""
        if self._run is not None:
            # `step` is a metric, not W&B's own step: W&B drops points whose step goes back, as after a rollback.
            point = {"step": step, **metrics}
            self._try(lambda: self._define(point))
            self._try(lambda: self._run.log(point))

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """Adds an incident to the table `incidents`. Other events are only in `events.jsonl`."""
        if self._run is not None and kind == "incident":
            new = row({"step": step, **fields})
            if fields.get("path") is None or new not in self._incidents:
                self._incidents.append(new)
                self._show_incidents()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Sets summary values of the run. NaN and infinities become words, because W&B would store null."""
        if self._run is not None:
            self._try(lambda: self._run.summary.update(plain(values)))

    def alert(self, title: str, text: str) -> None:
        """Sends an alert to the owner of the run, if their W&B account allows alerts."""
        if self._run is not None:
            self._try(lambda: self._run.alert(title=title[:60], text=text))

    def finish(self, exit_code: int) -> None:
        """Ends the run with its exit code."""
        if self._run is not None and len(self._incidents) > self._shown:  # incidents from before a resume
            self._show_incidents()
        run, self._run = self._run, None
        if run is not None:
            self._try(lambda: run.finish(exit_code=exit_code))

    def _define(self, names: Iterable[str]) -> None:
        """Defines each new metric: plotted against `step`, with or without an automatic plot."""
        # One by one: in an uploaded offline run, a pattern such as `*` covers only what the server expands it to.
        # No metric gets the summary `min`: in W&B it stays NaN after the first NaN.
        for name in names:
            if name not in self._defined:
                self._defined.add(name)
                hidden = name in WITHOUT_PLOT or name.count("/") > 1
                self._run.define_metric(name, step_metric=None if name == "step" else "step", hidden=hidden)

    def _show_incidents(self) -> None:
        def show() -> None:
            import wandb

            self._define(["step"])
            # The whole table is logged again with each incident.
            table = wandb.Table(columns=[*INCIDENT_COLUMNS], data=[*self._incidents])
            self._run.log({"step": self._incidents[-1][0], "incidents": table})

        self._shown = len(self._incidents)
        self._try(show)
        self.summary(self._incident_summary())

    def _incident_summary(self) -> dict[str, Any]:
        found = {"incident/count": len(self._incidents)}
        return found | (
            {"incident/cause": self._incidents[0][INCIDENT_COLUMNS.index("cause")]} if self._incidents else {}
        )

    def _begin(
        self, mode: str, folder: Path, run_id: str | None, config: Mapping[str, Any], placement: Mapping[str, Any]
    ) -> Any:
        with uncollected(for_good=False):
            import wandb
            from wandb.sdk.wandb_run import Run

        # Disable the search for inputs of W&B Launch, which loads many modules: starting a run took 1.1 to 1.8 s with
        # it, and 0.5 s without it (W&B 0.31).
        if hasattr(Run, "_detect_and_apply_job_inputs"):
            Run._detect_and_apply_job_inputs = lambda self: None
        if mode == "online" and not has_key(wandb):
            raise RuntimeError("no API key was found; log in with `wandb login`")
        settings: dict[str, Any] = {"mode": mode, "silent": True, "console": "off", "reinit": "create_new"}
        settings |= {"disable_code": True, "init_timeout": 30.0}
        if "finish_timeout" in wandb.Settings.model_fields:
            settings["finish_timeout"] = FINISH_TIMEOUT
        folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            id=run_id,
            dir=str(folder),
            config=plain(config),  # W&B would store NaN and infinities as null
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(**settings),
            project=self.project,
            entity=self.entity,
            **placement,
        )
        if mode == "online":  # a resumed run starts with the configuration that the server has
            run.config.update(plain(config), allow_val_change=True)
        return run

    def _try(self, call: Callable[[], Any], consequence: str = "W&B may miss parts of this run") -> Any:
        """Returns the value of the call. If it raises, returns None, and prints a warning the first time."""
        try:
            return call()
        except Exception as error:
            if not self._warned:
                self._warned = True
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                say(f"stabletrain: wandb: {reason}: {consequence}; metrics.jsonl has everything", file=sys.stderr)
            return None


def row(incident: Mapping[str, Any]) -> list[Any]:
    """Converts an incident to a row of the table `incidents`. Missing text is an empty string, never null."""
    fixes = "; ".join(map(str, incident.get("fix") or ()))
    texts = {"fix": fixes, "step": int(incident.get("step", 0))}
    return [texts[name] if name in texts else str(incident.get(name) or "") for name in INCIDENT_COLUMNS]
