"""Weights & Biases as a spectator: it is told what happens, never asks for an account, and can never stop training.

`offline` needs no account: everything is kept in `<run folder>/wandb`, and `wandb sync` uploads it later. Whatever goes
wrong inside the library is one warning; `metrics.jsonl` holds the same numbers anyway.
"""

import netrc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stabletrain.errors import ConfigError

FINISH_TIMEOUT = 120.0
"""Seconds that the end of an online run waits for its upload; what is left stays on the disk for `wandb sync`."""


class NoWandb:
    """Tells nobody."""

    def start(self, folder: Path, run_id: str | None, config: Mapping[str, Any]) -> str:
        """Nothing is started; returns the id it was given."""
        del folder, config
        return run_id or ""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Nothing is logged."""

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
        project, entity, group, name, tags: where the run is filed; None leaves the choice to the library.
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

    def start(self, folder: Path, run_id: str | None, config: Mapping[str, Any]) -> str:
        """Begins the run, or goes on with it.

        Args:
            folder: the run folder; files go to its `wandb/`.
            run_id: of this run; None lets the library choose. An interrupted run that is continued under its id stays
                one run online; offline each stretch has a file of its own, of which `wandb sync` makes one run.
            config: the whole configuration, plain values.

        Returns:
            the run's id, to be kept with the checkpoint; `run_id` or "" if the library would not start.
        """
        so = "this run is kept offline" if self.mode == "online" else "this run is not recorded there"
        self._run = self._try(lambda: self._begin(self.mode, folder, run_id, config), so)
        if self._run is None and self.mode == "online":
            self._run = self._try(lambda: self._begin("offline", folder, run_id, config))
        if self._run is None:
            return run_id or ""
        self._try(lambda: (self._run.define_metric("step"), self._run.define_metric("*", step_metric="step")))
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds a point at `step`. The step is a metric of its own: after a rollback it may go back, which the
        library's own step counter answers by dropping the point."""
        if self._run is not None:
            self._try(lambda: self._run.log({"step": step, **metrics}))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Sets the run's final values."""
        if self._run is not None:
            self._try(lambda: self._run.summary.update(dict(values)))

    def alert(self, title: str, text: str) -> None:
        """Sends a message to the run's owner, as far as their account is set up for it."""
        if self._run is not None:
            self._try(lambda: self._run.alert(title=title[:60], text=text))

    def finish(self, exit_code: int) -> None:
        """Ends the run with its own exit code, so that runs of one process are not told apart by the last one's."""
        run, self._run = self._run, None
        if run is not None:
            self._try(lambda: run.finish(exit_code=exit_code))

    def _begin(self, mode: str, folder: Path, run_id: str | None, config: Mapping[str, Any]) -> Any:
        import wandb

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
            config=dict(config),
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(**settings),
            project=self.project,
            entity=self.entity,
            group=self.group,
            name=self.name,
            tags=self.tags,
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


def has_key(wandb: Any) -> bool:
    """Whether the library will find credentials without asking for them: environment, its settings, or ~/.netrc."""
    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    if os.environ.get("WANDB_API_KEY") or settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    hosts = {urlsplit(settings.base_url).netloc}
    if settings.base_url == type(settings).model_fields["base_url"].default:
        hosts.add("api.wandb.ai")  # under which `wandb login` has always filed the key
    for path in [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if path and hosts & netrc.netrc(os.path.expanduser(path)).hosts.keys():
                return True
    return False
