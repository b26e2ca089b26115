"""A table of moved import paths, so that the configurations of older runs still work.

Run folders, incidents and users' YAML files name the `_target_` of every option. When a target moves, its old path is
added to `MOVED`.
"""

from typing import Any

MOVED: dict[str, str] = {
    "stabletrain.faults": "stabletrain.beside.faults",
    "stabletrain.faults.NoFaults": "stabletrain.extension.NoFaults",
    "stabletrain.forecast.forecast.Forecast": "stabletrain.extension.forecast",
    "stabletrain.forecast.forecast.NoForecast": "stabletrain.extension.NoForecast",
    "stabletrain.forensics.desk.Forensics": "stabletrain.forensics.handler.IncidentHandler",
    "stabletrain.forensics.desk.NoForensics": "stabletrain.forensics.handler.NoIncidentHandler",
    "stabletrain.stability.guard.NoGuard": "stabletrain.guard.NoGuard",
    "stabletrain.stability.guard.RollbackGuard": "stabletrain.guard.RollbackGuard",
    "stabletrain.stability.guard.SkipGuard": "stabletrain.guard.SkipGuard",
    "stabletrain.parallel.auto": "stabletrain.parallel.options.auto",
    "stabletrain.parallel.ddp": "stabletrain.parallel.options.ddp",
    "stabletrain.parallel.fsdp": "stabletrain.parallel.options.fsdp",
    "stabletrain.stability.clipping.adagc": "stabletrain.stability.clipping.adaptive",
    "stabletrain.stability.clipping.agc": "stabletrain.stability.clipping.adaptive",
    "stabletrain.stability.clipping.none": "stabletrain.stability.clipping.fixed",
    "stabletrain.stability.clipping.norm": "stabletrain.stability.clipping.fixed",
    "stabletrain.stability.clipping.per_module": "stabletrain.stability.clipping.fixed",
    "stabletrain.stability.clipping.value": "stabletrain.stability.clipping.fixed",
    "stabletrain.stability.clipping.zclip": "stabletrain.stability.clipping.adaptive",
    "stabletrain.stability.optimizers.spam": "stabletrain.stability.optimizers.adamw",
    "stabletrain.stability.optimizers.stable_adamw": "stabletrain.stability.optimizers.adamw",
    "stabletrain.state.checkpoint": "stabletrain.checkpoint.checkpoints",
    "stabletrain.watch.monitors": "stabletrain.monitors.monitors",
}
"""Old dotted path of a package (with everything below it), a module or a class -> new path."""


def now(path: str) -> str:
    """Returns today's path: replaces the longest prefix of `path` that has moved."""
    head, tail = path, ""
    while head:
        if head in MOVED:
            return MOVED[head] + tail
        head, dot, last = head.rpartition(".")
        tail = dot + last + tail
    return path


def updated(tree: Any) -> Any:
    """Returns a copy of a configuration (plain values) with every `_target_` replaced by today's path."""
    if isinstance(tree, dict):
        return {
            key: now(value) if key == "_target_" and isinstance(value, str) else updated(value)
            for key, value in tree.items()
        }
    return [updated(each) for each in tree] if isinstance(tree, list) else tree
