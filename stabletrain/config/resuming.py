"""The table of what a resume may change, and the check that refuses the rest before anything is built.

| kind | meaning |
|---|---|
| free | the next step computes the same from the same state |
| recorded | steps compute something else from here on |
| new state | the same, and a part of the state cannot be restored: it starts anew, in a way that the row says |
| refused | the checkpoint means something else under the new value |

A group's row judges another option of the group. A key inside a group that keeps its option is refused or free where
its group is, and otherwise recorded. `docs/reference/resume.md` shows the table. Imports no torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from stabletrain.config.arguments import show
from stabletrain.config.make import leaves, load_yaml, plain
from stabletrain.errors import ConfigError
from stabletrain.stored.run_files import read_run_record, run_record_or_empty

FREE, RECORDED, NEW_STATE, REFUSED = "free", "recorded", "new state", "refused"

NEW_RUN = "start a new run without resume"

FORK = "init_from=<run> takes its weights into a new run"


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        kind: `FREE`, `RECORDED`, `NEW_STATE` or `REFUSED`.
        text: what happens, or why it is refused.
        fix: what to type instead, if it is refused.
    """

    kind: str
    text: str
    fix: str = ""


GROUPS: dict[str, Row] = {
    "model": Row(REFUSED, "the checkpoint's weights have the sizes of its own model", FORK),
    "data": Row(REFUSED, "a step's batch is looked up by its number, so the state would belong to other batches", FORK),
    "objective": Row(REFUSED, "the weights, the guard's window and the best loss are those of the other loss", FORK),
    "init": Row(REFUSED, "initial weights are drawn once, before the first step", NEW_RUN),
    "optimizer": Row(NEW_STATE, "moments and step counters start at 0"),
    "precision": Row(RECORDED, "the weights are cast; nothing else is stored in a precision"),
    "clipping": Row(RECORDED, "it has no state"),
    "warmup": Row(RECORDED, "the learning rate of the next step is the new warmup's at that step"),
    "schedule": Row(RECORDED, "the learning rate of the next step is the new schedule's at that step"),
    "zloss": Row(RECORDED, "adds its term to the loss; the logits stay as they are"),
    "qknorm": Row(NEW_STATE, "gains start at each channel's mean norm of q and k on a batch; their moments at 0"),
    "softcap": Row(RECORDED, "has no weights; changes little if the cap is far above the largest logits"),
    "qkclip": Row(RECORDED, "has no weights; bounds them after the next update"),
    "softmax": Row(NEW_STATE, "sinks start at 0, which leaves most weight with the keys; their moments at 0"),
    "attention_gate": Row(REFUSED, "a new gate is 1/2, so it would halve what trained heads give", FORK),
    "norm_placement": Row(REFUSED, "the weights were trained with the norms in another place", NEW_RUN),
    "averaging": Row(NEW_STATE, "the average starts anew, with the next weights"),
    "determinism": Row(RECORDED, "other kernels may round differently"),
    "guard": Row(FREE, "judges the next step"),
    "forensics": Row(FREE, "explains later incidents"),
    "faults": Row(RECORDED, "injects its faults into later steps"),
    "monitors": Row(FREE, "only watches"),
    "forecast": Row(FREE, "only watches"),
    "check": Row(FREE, "only watches"),
    "checkpoint": Row(FREE, "writes later checkpoints"),
    "activation_checkpointing": Row(FREE, "the same step, computed in part twice; compiled, it may round differently"),
    "parallel": Row(FREE, "the same step on other ranks; sums may round differently"),
    "wandb": Row(FREE, "only logs"),
    "stability": Row(FREE, "a preset: each group that it sets has its own row"),
    "experiment": Row(REFUSED, "an experiment is a whole run", "type those of its options that are to change"),
}
"""What another option of a group does to a resumed run."""

CHANGED_TO: dict[tuple[str, str], Row] = {
    ("checkpoint", "off"): Row(REFUSED, "it reads none either", "raise checkpoint.every to write fewer"),
    ("precision", "fp16"): Row(NEW_STATE, "the loss scale starts at precision.init_scale"),
    ("precision", "bf16_params"): Row(RECORDED, "matrices and kernels are rounded to bf16"),
    ("clipping", "zclip"): Row(NEW_STATE, "mean and deviation of the norms are collected anew"),
    ("clipping", "adagc"): Row(NEW_STATE, "each tensor's average norm is collected anew, from its warm-up on"),
    ("clipping", "update_norm"): Row(NEW_STATE, "mean and deviation of the updates are collected anew"),
    ("qknorm", "none"): Row(NEW_STATE, "the gains and their moments are dropped"),
    ("softmax", "plain"): Row(NEW_STATE, "the sinks and their moments are dropped"),
    ("attention_gate", "none"): Row(REFUSED, "without its gates, what trained heads give would about double", FORK),
    ("zloss", "mu_centering"): Row(RECORDED, "subtracts the head's mean row after the next update"),
    ("averaging", "none"): Row(NEW_STATE, "the average is dropped"),
}
"""Options that differ from their group's row, as the new option."""

CHANGED_FROM: dict[tuple[str, str], Row] = {
    ("precision", "fp16"): Row(NEW_STATE, "the loss scale is dropped"),
    ("clipping", "zclip"): Row(NEW_STATE, "mean and deviation of the norms are dropped"),
    ("clipping", "adagc"): Row(NEW_STATE, "the tensors' average norms are dropped"),
    ("clipping", "update_norm"): Row(NEW_STATE, "mean and deviation of the updates are dropped"),
}
"""The same as the old option, if the new one has no row."""

CHANGED_BETWEEN: dict[tuple[str, frozenset[str]], Row] = {
    ("optimizer", frozenset({"adamw", "stable_adamw"})): Row(RECORDED, "both have the same state, which is kept"),
    ("qknorm", frozenset({"layernorm", "rmsnorm"})): Row(RECORDED, "both have the same gains, which are kept"),
}
"""Pairs of options that differ from both rows above, in either direction."""

KEYS: dict[str, Row] = {
    "steps": Row(FREE, "a schedule that depends on the last step ends at the new one"),
    "batch_size": Row(RECORDED, "step n reads samples n batch_size and on: some are read twice, or not in this epoch"),
    "grad_accum_steps": Row(RECORDED, "the same mean, summed in other parts"),
    "seed": Row(RECORDED, "later steps read another order of the data and draw other random numbers"),
    "label_smoothing": Row(RECORDED, "changes the loss; the logits stay as they are"),
    "loss_chunk": Row(RECORDED, "the same loss, summed in other parts"),
    "eval_every": Row(FREE, "only measures"),
    "eval_batches": Row(FREE, "only measures; later validation losses are of other batches"),
    "log_every": Row(FREE, "only logs"),
    "device": Row(FREE, "another device may round differently"),
    "compile": Row(RECORDED, "compiled kernels may round differently"),
    "report": Row(FREE, "only writes"),
    "resume": Row(FREE, "names the run"),
    "init_from": Row(REFUSED, "a resume restores the checkpoint's weights", "leave out resume for a new run"),
    "init_strict": Row(REFUSED, "a resume restores the checkpoint's weights", "leave out resume for a new run"),
    "guard.escalate": Row(FREE, "acts only after a halt, or on a run that has diverged"),
    "guard.keep": Row(RECORDED, "later steps with bad samples are skipped, or applied without these"),
    "guard.whatif_steps": Row(FREE, "acts only after a halt"),
    "model.swiglu_limit": Row(RECORDED, "has no weights; changes nothing while gate and up are within it"),
    "model.dropout": Row(RECORDED, "later steps drop another share"),
    "model.embedding_gradient": Row(RECORDED, "scales later gradients"),
    "data.path": Row(FREE, "the data may be moved: its content is compared"),
    "data.root": Row(FREE, "the data may be moved: its content is compared"),
    "data.download": Row(FREE, "the content is compared"),
    "data.workers": Row(FREE, "the same batches"),
    "data.cache_mb": Row(FREE, "the same batches"),
    "data.seed": Row(RECORDED, "follows `seed`"),
}
"""Keys at the top level, and keys whose row is not their group's."""

AUTO, AUTO_MODES = "stabletrain.stability.precision.auto", ("bf16", "fp16", "fp32")
"""The target of `precision=auto`, and what it chooses from."""

UNRECORDED_KEYS = ("resume", "device", "report")
"""Keys that a resume does not even record as changed."""

WATCHING_GROUPS = ("forensics", "monitors", "forecast", "check", "checkpoint", "parallel", "wandb", "stability")
WATCHING_GROUPS += ("activation_checkpointing",)
"""Groups that leave every step's result as it is, so that steps from before a change can be replayed after it."""

FAULTS_OUTSIDE_STEPS = ("none", "kill", "disk_full", "wandb")
"""Faults of the process, the disk and the network: they change no step either."""

HALT_KEYS = ("guard.escalate", "guard.whatif_steps")

WATCHING_KEYS = ("eval_every", "eval_batches", "log_every", *HALT_KEYS, *UNRECORDED_KEYS)
"""Keys that leave every step's result as it is."""

ADDED_GROUPS = {"softmax": "plain", "attention_gate": "none", "norm_placement": "pre", "averaging": "none"}
ADDED_GROUPS |= {"activation_checkpointing": "none"}
"""Groups that older runs do not have, and the option that computes what they computed."""

ADDED_KEYS: dict[str, Any] = {
    "model.swiglu_limit": None,
    "model.n_kv_head": None,
    "optimizer.no_decay": ["norms", "biases", "scalars", "embeddings"],
    "optimizer.cautious_decay": False,
    "optimizer.scale": "match_rms",
    "optimizer.per_head": False,
    "optimizer.momentum_low": 0.85,
    "optimizer.momentum_warmup": 0,
    "optimizer.momentum_cooldown": 0,
    "schedule.weight_decay": "constant",
    "schedule.weight_decay_final_ratio": 0.0,
}
"""Keys that the options of older runs do not have, and the value with which they compute the same."""

RENAMED_PARTS = (
    *("model.qknorm.", "model.softcap.", "model.qkclip.", "model.softmax."),
    *("model.attention_gate.", "model.norm_placement."),
)
"""Copies of other groups in the model's configuration."""


class Settings(NamedTuple):
    """The settings of a part of a run.

    Attributes:
        choices: the option of each config group.
        values: the whole configuration, resolved, as nested dicts.
    """

    choices: dict[str, str]
    values: dict[str, Any]

    def flat(self) -> dict[str, Any]:
        """Returns the value of every dotted key."""
        return dict(leaves(self.values))

    def options(self) -> dict[str, str]:
        """Returns the option of each group, also of those that are newer than the run."""
        return ADDED_GROUPS | self.choices


def settings(config: Mapping[str, Any], choices: Mapping[str, str]) -> Settings:
    """Returns the settings of a configuration, which may be OmegaConf's or plain."""
    own = {group: option for group, option in choices.items() if "hydra" not in group}
    return Settings(own, {key: value for key, value in plain(config).items() if key not in UNRECORDED_KEYS})


def row_of_option(group: str, before: str, now: str) -> Row:
    """Returns the row of a group whose option changes; a group that the table does not have is recorded."""
    both = CHANGED_BETWEEN.get((group, frozenset({before, now})))
    one = CHANGED_TO.get((group, now)) or CHANGED_FROM.get((group, before))
    return both or one or GROUPS.get(group) or Row(RECORDED, "")


def row_of_key(key: str) -> Row:
    """Returns the row of a changed key of a group that keeps its option, or of a key at the top level."""
    if key in KEYS:
        return KEYS[key]
    row = GROUPS.get(key.partition(".")[0])
    return row if row is not None and row.kind in (FREE, REFUSED) else Row(RECORDED, "")


def row_of(key: str, before: Any, now: Any) -> Row:
    """Returns the row of a change, whose key is a group's name or a dotted key."""
    return row_of_option(key, str(before), str(now)) if key in GROUPS else row_of_key(key)


def values_before(before: Settings, now: Settings) -> dict[str, Any]:
    """Returns each group's option and each key's value in `before`, also of those that are newer than the run."""
    options = before.options()
    same = {group for group, option in now.choices.items() if options.get(group) == option}
    added = {key: value for key, value in ADDED_KEYS.items() if key.partition(".")[0] in same}
    return added | before.flat() | options


def changed_keys(before: Settings, now: Settings) -> dict[str, list[Any]]:
    """Returns the groups and keys that differ, each as `[before, now]`; None where an option did not have the key.

    Leaves out `_target_` and keys that only one of both has, which differ between versions of stabletrain. But if an
    option was changed, all its keys are there, because each option has its own.
    """
    old = values_before(before, now)
    new = now.flat() | now.options()
    options = {group for group, option in now.choices.items() if old.get(group, option) != option}
    return {
        key: [old.get(key), value]
        for key, value in sorted(new.items())
        if (old[key] != value if key in old else key.partition(".")[0] in options)
        and key not in UNRECORDED_KEYS
        and not key.endswith("_target_")
        and not key.startswith(RENAMED_PARTS)
    }


def acting(keys: Mapping[str, Any]) -> list[str]:
    """Returns those of the changed keys that change what a step computes, so that older steps cannot be replayed.

    Args:
        keys: the old and the new value of each changed key.
    """
    outside = "faults" in keys and set(keys["faults"]) <= {*FAULTS_OUTSIDE_STEPS}
    ignored = (*WATCHING_GROUPS, "faults") if outside else WATCHING_GROUPS
    return [key for key in keys if key not in WATCHING_KEYS and key.partition(".")[0] not in ignored]


def recorded_settings(folder: Path, step: float) -> Settings | None:
    """Returns the settings with which the run in `folder` reached `step`, from its record; None if there is none."""
    try:
        file = folder / ".hydra" / "config.yaml"
        first = load_yaml(file.with_name("hydra.yaml")).hydra.runtime.choices
        values = OmegaConf.to_container(load_yaml(file), resolve=True)
        record = read_run_record(folder)
        choices = {str(group): str(option) for group, option in first.items() if "hydra" not in str(group)}
        assert isinstance(values, dict)
        for change in record.get("changes", []):
            for key, (_, value) in change["keys"].items() if change["step"] < step else ():
                if key in choices or key in ADDED_GROUPS:
                    choices[key] = value
                else:
                    set_value(values, key.split("."), value)
    except Exception:  # a record may be damaged in any way; a checkpoint that does not fit is still refused later
        return None
    return Settings(choices, {str(key): value for key, value in values.items() if key not in UNRECORDED_KEYS})


def steps_of_changes(folder: Path) -> list[int]:
    """Returns after how many steps the run in `folder` was resumed with changed settings, by its record."""
    return [change["step"] for change in run_record_or_empty(folder).get("changes", [])]


def set_value(tree: dict[Any, Any], path: list[str], value: Any) -> None:
    """Sets the value at a path of a nested dict."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def resumed_folder(resume: str, folder: Path) -> Path | None:
    """Returns the folder of the run that a configuration resumes; None if it resumes none.

    Args:
        resume: the key's value: `none`, `auto` or a checkpoint.
        folder: the run's own folder.
    """
    if resume == "none":
        return None
    return folder if resume == "auto" else Path(resume).absolute().parent.parent


def kept_precision(resume: str, target: str, choices: Mapping[str, str], folder: Path) -> str:
    """Returns the mode that `precision=auto` has chosen for the run that is resumed; empty if there is none.

    Args:
        resume: the key's value.
        target: what the precision's `_target_` names.
        choices: the option of each config group.
        folder: the run's own folder.
    """
    other = resumed_folder(resume, folder)
    if other is None or choices.get("precision") != "auto" or target != AUTO:
        return ""
    record = run_record_or_empty(other)
    found = record.get("hardware", {}).get("precision")
    return found if found in AUTO_MODES and record.get("choices", {}).get("precision") == "auto" else ""


def check_resume(
    resume: str, now: Settings, folder: Path, *, unfinished: bool = True, before: Settings | None = None
) -> None:
    """Checks a resume against the table. Call it before anything is built; it does nothing without a resume.

    Args:
        resume: the key's value.
        now: the run's new settings.
        folder: the run folder.
        unfinished: whether to refuse changes of a run that has finished all its steps.
        before: the settings with which the resumed run ended; read from its record by default.

    Raises:
        ConfigError: the resume changes what it cannot, or it resumes a finished run without more steps.
    """
    other = resumed_folder(resume, folder)
    if other is not None:
        before = before or recorded_settings(other, float("inf"))
    if other is None or before is None:
        return
    changes = changed_keys(before, now)
    # If the option of a group is refused, its keys say nothing more.
    for key in sorted(changes, key=lambda each: each not in GROUPS):
        then, wanted = changes[key]
        if (row := row_of(key, then, wanted)).kind == REFUSED:
            raise ConfigError(
                f"{key}={show(wanted)}: the run in {other} has {key}={show(then)}, which a resume cannot change: "
                f"{row.text}; resume without it, or: {row.fix.replace('<run>', str(other))}"
            )
    if resume == "auto" and changes and unfinished:
        check_unfinished(other, now.values["steps"], changes)


def check_unfinished(folder: Path, steps: int, changes: Mapping[str, Any]) -> None:
    """Checks that a resume with changes has steps left to train.

    Raises:
        ConfigError: the run has finished its steps.
    """
    record = run_record_or_empty(folder)
    finished = record.get("status") == "finished" and not record.get("reason")
    done: Any = record.get("final", {}).get("steps", -1) if finished else -1
    if done >= max(steps, 1):
        raise ConfigError(
            f"steps={steps}: the run in {folder} has finished its {done} steps, so a resume with another "
            f"{' and '.join([*changes][:2])} would train nothing: raise steps, such as steps={2 * done}"
        )


def override_of(key: str, value: Any) -> str:
    """Returns the override that sets a key; lists without blanks."""
    return f"{key}={without_blanks(value)}"


def without_blanks(value: Any) -> str:
    """Formats a value as it is typed as one word."""
    return f"[{','.join(map(without_blanks, value))}]" if isinstance(value, list) else show(value)
