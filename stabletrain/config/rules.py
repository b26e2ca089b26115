"""The table of what is refused before anything is built: the keys of a rule, its condition, its message and its fix.

`config/checks.py` walks the rows in order; `docs/reference/refused.md` shows them. What an option accepts for its own
keys is checked in that option's class, and has no row here. Imports no torch.

The type of a key is the type of its default in the YAML, so a plug-in's YAML needs no schema. pydantic (2.14) was
tried: it imports fast enough (0.08 s), but every key would have to be declared a second time. Its errors know neither
the default nor the fix (`steps=1e3 is not a whole number; fix: steps=1000`), so the messages would still be written
here.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stabletrain.config.arguments import key_of, show
from stabletrain.config.composed import Composed, without_preset
from stabletrain.errors import ConfigError, closest

ANY_KEY, ANY_TYPED = "any key", "any group"
"""The keys of a rule about every key, and about every override as it was typed."""

CHOSEN_PARTS = {"qknorm": "none", "softcap": "none", "qkclip": "none", "softmax": "plain", "attention_gate": "none"}
CHOSEN_PARTS |= {"norm_placement": "pre"}
"""Groups that act only if the model's YAML refers to them (`qknorm: ${qknorm}`), each with its option that does not."""

CROSS_ENTROPY = "stabletrain.stability.objective.CrossEntropy"
"""The objective to which z-loss, label smoothing and chunks of logits belong."""

FP32 = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
"""The smallest and the largest normal number of fp32. Numbers nearer to 0 lose digits there, and most become 0."""

SHOW_UPDATES = {f"stabletrain.stability.optimizers.adamw.{name}" for name in ("AdamW", "StableAdamW", "SPAM")}
SHOW_UPDATES |= {"stabletrain.stability.optimizers.muon.Muon"}
"""Optimizers that show their update before it is applied; PyTorch's kernels do not."""

SMALLEST_HEAD = 16
"""The smallest head dimension that FlexAttention's kernel takes."""

LARGEST_INT = 2**63 - 1
"""The largest whole number that PyTorch takes."""

WRONG_ON_PURPOSE = ("faults.value", "faults.faults")
"""Keys that take any number."""

MAX_SECONDS = 10**6
"""PyTorch's clocks overflow far above a million seconds, which is 11 days."""

Condition = Callable[[Composed, str], Any]


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        keys: what it is about: keys and groups, with blanks between them, or `ANY_KEY`, or `ANY_TYPED`.
        broken: takes the configuration and one of the keys; returns whether this is refused.
        message: what is wrong, with the value and the bound. `{name}` is one of `PLACEHOLDERS`, the value of a
            key, or for the option of a group.
        fix: what to type instead, with the same names.
    """

    keys: str
    broken: Condition
    message: str
    fix: str

    def check(self, run: Composed) -> None:
        """Checks a configuration.

        Raises:
            ConfigError: the rule is broken.
        """
        some = {ANY_KEY: run.keys, ANY_TYPED: [*map(key_of, run.typed)]}
        for key in some[self.keys] if self.keys in some else self.keys.split():
            if self.broken(run, key):
                raise self.refusal(run, key)

    def refusal(self, run: Composed, key: str) -> ConfigError:
        """Returns the error about one of the keys."""

        def word(found: re.Match) -> str:
            name = found[1]
            return str(PLACEHOLDERS[name](run, key)) if name in PLACEHOLDERS else show(run[name])

        return ConfigError(re.sub(r"\{([\w.]+)\}", word, f"{self.message}; fix: {self.fix}"))


def below(lowest: int) -> Condition:
    """Returns the condition that a number is below a bound; null is not."""
    return lambda run, key: run[key] is not None and run[key] < lowest


def fails(test: Callable[[Any], bool]) -> Condition:
    """Returns the condition that a key's value fails a test."""
    return lambda run, key: key in run.values and not test(run[key])


def is_mistyped(run: Composed, key: str) -> bool:
    """Whether a value has another type than its default."""
    default = run.defaults.get(key)
    has_row = key in ("compile", "loss_chunk")  # they take values of several types
    return default is not None and not has_row and key in run.values and not fits(run[key], default)


def is_not_null_or(example: Any) -> Condition:
    """Returns the condition that a key with default null has a value that is neither null nor of the example's type."""
    return lambda run, key: (
        key in run.defaults and run.defaults[key] is None and run[key] is not None and not fits(run[key], example)
    )


def fits(value: Any, default: Any) -> bool:
    """Returns whether `value` has the type of `default`. An int is accepted as a float; a bool is never a number."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, list) and isinstance(value, list):
        return not default or all(fits(each, default[0]) for each in value)
    return isinstance(value, type(default))


def has_number(kind: type, wrong: Callable[[Any], bool]) -> Condition:
    """Returns the condition that a value is a wrong number of a type, or a list with one.

    Options of the user's own take any number.
    """

    def broken(run: Composed, key: str) -> bool:
        target = run[f"{key.partition('.')[0]}._target_"]
        own = "." in key and not str(target or "stabletrain.").startswith("stabletrain.")
        numbers = run[key] if isinstance(run[key], list) else [run[key]]
        return not own and key not in WRONG_ON_PURPOSE and any(isinstance(n, kind) and wrong(n) for n in numbers)

    return broken


def has_other_objective(run: Composed) -> bool:
    """Whether the objective has no logits of a softmax."""
    return run["objective._target_"] != CROSS_ENTROPY


def is_for_other_data(run: Composed, key: str) -> bool:
    """Whether a group's option is for another kind of data than the model reads."""
    gives, reads = run[f"{key}.modality"], run["model.modality"]
    return bool(gives and reads and gives != reads)


def has_small_heads(run: Composed) -> bool:
    """Whether the heads are smaller than FlexAttention takes; a plug-in model may name their sizes otherwise."""
    width, heads = run["model.n_embd"], run["model.n_head"]
    return bool(width and heads) and width / heads < SMALLEST_HEAD


REMOVED = Rule(
    ANY_KEY,
    lambda run, key: key not in run.values and not key.startswith(run.retargeted),
    "{key} was removed",
    "leave out ~{key}; to turn a group off, use its option that does nothing, such as none or off",
)
"""Also refused before the rest, because the code reads the keys of the top level first."""

# fmt: off
# A table: a row's keys and condition stand on one line, its message and its fix below.
TYPES = [
    Rule(ANY_KEY, lambda run, key: key not in run.defaults and not key.startswith(run.retargeted),
         "{override}: there is no such key", "{nearest}"),
    REMOVED,
    Rule("compile", fails(lambda value: value in ("auto", "graph") or isinstance(value, bool)),
         "{override} is not auto, graph, true or false", "{default}"),
    Rule("loss_chunk", fails(lambda value: value in ("auto", "none") or (type(value) is int and value >= 1)),
         "{override} is not auto, none, or a number of tokens of at least 1", "{default}"),
    Rule("eval_batches warmup.steps model.vocab_size model.block_size model.num_classes model.in_channels "
         "model.n_kv_head faults.rank data.workers guard.checksum_every parallel.shard parallel.replicate",
         is_not_null_or(1),
         "{override} is not a whole number", "{corrected}"),
    Rule("model.swiglu_limit", is_not_null_or(1.0), "{override} is not a number", "{corrected}"),
    Rule("data.path faults.module faults.parameter wandb.entity wandb.group wandb.name", is_not_null_or(""),
         "{override} is not a string", "{corrected}"),
    Rule(ANY_KEY, is_mistyped, "{override} is not {kind}", "{corrected}"),
    Rule("wandb.tags precision.fp32_modules precision.bf16_modules", fails(lambda value: fits(value, [""])),
         "{override} is not a list of strings", "{corrected}"),
]
"""Unknown keys (`+typo=1`), removed keys (`~guard`), and values of another type than the default's."""

RANKS = [
    Rule("device", lambda run, key: run.ranks.distributed and run[key].startswith("cuda:"),
         "{override} with {ranks} ranks: all ranks of a machine would use the same GPU",
         "device=cuda, with which each rank uses its own (CUDA_VISIBLE_DEVICES selects them)"),
    Rule("batch_size", lambda run, key: run[key] % (run.ranks.world_size * run["grad_accum_steps"]),
         "{override} does not divide among {ranks} ranks x grad_accum_steps={grad_accum_steps}",
         "batch_size={sizes}, or another number of ranks"),
    Rule("parallel.shard", lambda run, key: has_other_copies(run, key),
         "{override} parallel.replicate={parallel.replicate}: {copies} is not the number of ranks, {ranks}",
         "parallel.shard={sharing} parallel.replicate=null, or another number of ranks"),
    Rule("guard.recheck_across", lambda run, key: run[key] == "ranks" and not run.ranks.distributed,
         "{override} compares the arithmetic of ranks, and here is one process",
         "torchrun with several, or guard.recheck_across=none"),
]
"""What several ranks cannot share."""

RULES = [
    *TYPES,
    Rule(ANY_TYPED, lambda run, key: run.typed_value(key).startswith("[") and key not in run.values and run.has(key),
         "{typed}: a run has one option of {key}", "{key}={option}"),
    Rule(ANY_TYPED, lambda run, key: run.typed_value(key).replace(" ", "") == "{}" and key in run.choices,
         "{typed} changes nothing", "name an option of {key}, or set its keys one by one"),
    Rule(ANY_KEY, has_number(int, lambda number: abs(number) > LARGEST_INT),
         f"{{override}} is outside of [-{LARGEST_INT}, {LARGEST_INT}], the whole numbers of 64 bits", "{default}"),
    Rule(ANY_KEY, has_number(float, math.isnan), "{override} is not a number", "{default}"),
    Rule(ANY_KEY, has_number(float, lambda number: 0 < abs(number) < FP32[0]),
         f"{{override}} is nearer to 0 than {FP32[0]:.3g}, the smallest normal number of fp32", "{default}"),
    Rule(ANY_KEY, has_number(float, lambda number: FP32[1] < abs(number) < math.inf),
         f"{{override}} is beyond {FP32[1]:.3g}, the largest number of fp32", "{default}"),
    Rule("steps batch_size grad_accum_steps eval_every eval_batches log_every parallel.start_timeout "
         "parallel.timeout parallel.shard parallel.replicate", below(1),
         "{override} is below 1", "{key}=1 or more"),
    Rule("data.length_warmup", below(0), "{override} is below 0", "{key}=0, which is off, or more"),
    Rule("parallel.start_timeout parallel.timeout", lambda run, key: (run[key] or 0) > MAX_SECONDS,
         f"{{override}} is above {MAX_SECONDS}", f"{{key}}={MAX_SECONDS} or less"),
    Rule("seed", lambda run, key: not 0 <= run[key] < 2**63, "{override} is outside [0, 2^63)", "seed=0 or more"),
    Rule("batch_size", lambda run, key: run[key] % run["grad_accum_steps"],
         "{override} does not divide into grad_accum_steps={grad_accum_steps} micro-batches",
         "batch_size={sizes_in_one}"),
    Rule("data.length_warmup", lambda run, key: run[key] and run[key] >= run["steps"],
         "{override} >= steps={steps}: samples never reach their full length",
         "lower data.length_warmup or raise steps"),
    Rule("guard.recheck_across", lambda run, key: run[key] == "ranks" and run["guard.recheck_every"] == 0,
         "{override} compares nothing with guard.recheck_every=0", "guard.recheck_every=250, or {key}=none"),
    *RANKS,
    Rule("init_strict", lambda run, key: run["init_from"] == "none" and not run[key],
         "{override} does nothing without init_from", "name weights, or leave it out"),
    Rule(" ".join(CHOSEN_PARTS), lambda run, key: run[key] != CHOSEN_PARTS[key] and not run.has(f"model.{key}"),
         "{chosen} does nothing with model={model}, because {lacking}",
         "{instead}, or a model whose YAML has `{reference}`"),
    Rule("clipping", lambda run, key: run[key] == "update_norm" and run["optimizer._target_"] not in SHOW_UPDATES,
         "{override} scales an update before it is applied, which {optimizer._target_} does not show",
         "clipping=zclip, or optimizer=adamw"),
    Rule("monitors.hessian_iterations", lambda run, key: run[key] and run["parallel"] in ("fsdp", "hsdp"),
         "{override} differentiates a gradient, which FSDP does not support",
         "monitors.hessian_iterations=0, or parallel=ddp"),
    Rule("precision", lambda run, key: run[key] == "bf16_params" and run["parallel"] == "hsdp",
         "{override} rounds with other random numbers on each rank, so the copies of parallel=hsdp would differ",
         "precision=bf16, which has the same weights without the noise, or parallel=fsdp"),
    Rule("zloss loss_chunk", lambda run, key: run[key] not in ("none", "auto") and has_other_objective(run),
         "{chosen} does nothing with objective={objective}, which has no logits of a softmax",
         "{key}=none, or objective=cross_entropy"),
    Rule("label_smoothing", lambda run, key: run[key] and has_other_objective(run),
         "{override} does nothing with objective={objective}, which has no logits of a softmax",
         "label_smoothing=0, or objective=cross_entropy"),
    Rule("qknorm", lambda run, key: "none" not in (run[key], run["qkclip"]),
         "{chosen} removes the scale of the projections that qkclip={qkclip} clips, so qkclip has no effect",
         "qkclip=none, or qknorm=none"),
    Rule("norm_placement", lambda run, key: run[key] in ("sandwich", "reordered") and run["init"] == "zero_residual",
         "{chosen} divides what a branch writes by its size, and init=zero_residual starts it at 0: its gradient would "
         "be divided by the root of model.norm_eps, and its first update would bring it to full size",
         "init=gpt2, or norm_placement=pre"),
    Rule("faults qkclip", lambda run, key: run[key] != "none" and run["compile"] == "graph",
         "{chosen} needs Python in every step, and compile=graph repeats only what the card did in one step",
         "{key}=none, or compile=true"),
    Rule("schedule.weight_decay", lambda run, key: run[key] == "with_lr" and run["optimizer.decay"] == "corrected",
         "{override} multiplies weight decay by the factor of the learning rate, as optimizer.decay=corrected does",
         "schedule.weight_decay=constant, or optimizer.decay=coupled"),
    Rule("softcap.attention", lambda run, key: run[key] == "flex" and run["compile"] is False,
         "{override} does nothing with compile=false, because FlexAttention is fused only in compiled steps",
         "compile=auto, or softcap.attention=math"),
    Rule("softcap.attention", lambda run, key: run[key] == "flex" and run["model.dropout"],
         "{override} has no dropout, and model.dropout={model.dropout}",
         "model.dropout=0, or softcap.attention=math"),
    Rule("softcap.attention", lambda run, key: run[key] == "flex" and has_small_heads(run),
         f"{{override}} takes heads of {SMALLEST_HEAD} or more, and model.n_embd={{model.n_embd}} has "
         "model.n_head={model.n_head}", "fewer heads, or softcap.attention=math"),
    Rule("softcap.attention", lambda run, key: run[key] == "flex" and run["softmax"] != "plain",
         "{override} has no sink, and softmax={softmax} has one", "softmax=plain, or softcap.attention=math"),
    Rule("data init", is_for_other_data,
         "{override} is for {modality}, model={model} reads {model.modality}",
         "{fitting}, or a model for {modality} such as {example_model}"),
    Rule("forecast", lambda run, key: run[key] != "off" and run["monitors"] == "none" and any(run.overrides_of(key)),
         "{typed} does nothing with monitors=none, because a forecast reads what the monitors measure",
         "monitors=default, or leave it out"),
    Rule("forecast.action", lambda run, key: run[key] == "checkpoint" and run["checkpoint"] == "off",
         "{override} keeps no state with checkpoint=off", "checkpoint=default, or forecast.action=alarm"),
    Rule("guard.escalate", lambda run, key: run[key] == "whatif" and run["checkpoint"] == "off",
         "{override} goes on from a checkpoint, and checkpoint=off writes none",
         "checkpoint=default, or guard.escalate=halt"),
]
"""All rules, in the order in which they are checked."""

# fmt: on


def chosen(run: Composed, key: str) -> str:
    """Returns `qknorm=layernorm`, preceded by the preset that set it if the user did not type it."""
    preset = f"stability={run['stability']} sets " if run.is_by_preset(key) else ""
    return f"{preset}{key}={run[key]}{', which' if preset else ''}"


def instead(run: Composed, key: str) -> str:
    """Returns what to type instead of a part that the model does not have, or of the preset that chose it."""
    if not run.is_by_preset(key):
        return f"{key}={CHOSEN_PARTS[key]}"
    unfit = [part for part in CHOSEN_PARTS if not run.has(f"model.{part}")]
    return without_preset(run.choices, [*unfit, *(["zloss"] if has_other_objective(run) else [])])


def lacking(run: Composed, key: str) -> str:
    """Returns why a model cannot take a part: whether a model of the user's own has attention is not known."""
    own = not str(run["model._target_"]).startswith("stabletrain.")
    return f"its YAML takes no {key}" if own else "the model has no attention"


def kind_of(default: Any) -> str:
    """Names the type of a default."""
    if isinstance(default, list):
        return f"a list of {'strings' if not default or isinstance(default[0], str) else 'numbers'}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    return words.get(type(default), f"of type {type(default).__name__}")


def nearest(run: Composed, key: str) -> str:
    """Returns the override that an unknown key may stand for."""
    known = closest(key, run.defaults, cutoff=0.75)
    return f"{known}={show(run[key])}" if known else "leave it out"


def corrected(run: Composed, key: str) -> str:
    """Returns a mistyped value as it should be typed, or else the default."""
    value = run[key]
    if isinstance(value, float) and value.is_integer():
        return f"{key}={int(value)}"
    if run.defaults[key] == [] and not isinstance(value, list):
        return f"{key}=[{show(value)}]"
    return default_override(run, key)


def default_override(run: Composed, key: str) -> str:
    """Returns the override that sets a key to its default."""
    return f"{key}={show(run.defaults.get(key))}, the default"


def sizes(size: int, parts: int) -> str:
    """Returns the multiples of `parts` on both sides of a batch size, the nearest first: `8 or 4`."""
    below = size // parts * parts
    found = sorted((below, below + parts), key=lambda multiple: abs(multiple - size))
    return " or ".join(str(multiple) for multiple in found if multiple)


def copies(run: Composed) -> tuple[int, int]:
    """Returns how many ranks share a copy of the weights with `parallel=hsdp`, and the number of copies."""
    shards = run.ranks.sharing(run["parallel.shard"], run["parallel.replicate"])
    return shards, run["parallel.replicate"] or run.ranks.world_size // max(shards, 1)


def has_other_copies(run: Composed, key: str) -> bool:
    """Whether the copies of `parallel=hsdp` fit another number of ranks, which is known once they are started."""
    known = run.ranks.launched or run.ranks.distributed
    return known and run.has(key) and math.prod(copies(run)) != run.ranks.world_size


def sharing(run: Composed, key: str) -> int:
    """Returns the largest divisor of the number of ranks up to what was asked for."""
    most = min(max(copies(run)[0], 1), run.ranks.world_size)
    return next(size for size in range(most, 0, -1) if run.ranks.world_size % size == 0)


def fitting(run: Composed, key: str) -> str:
    """Returns the options of a group that fit what the model reads."""
    return {
        ("data", "tokens"): "data=stdlib or data=text",
        ("data", "images"): "data=digits or data=cifar10",
        ("init", "images"): "init=torch",
        ("init", "tokens"): "init=gpt2",
    }.get((key, run["model.modality"]), f"another {key}")


PLACEHOLDERS: dict[str, Callable[[Composed, str], Any]] = {
    "key": lambda run, key: key,
    "override": lambda run, key: f"{key}={show(run[key])}",
    "typed": lambda run, key: [*(each for each in run.typed if key_of(each) == key), *run.overrides_of(key)][0],
    "option": lambda run, key: run.typed_value(key).strip("[ ]"),
    "chosen": chosen,
    "instead": instead,
    "lacking": lacking,
    "kind": lambda run, key: kind_of(run.defaults[key]),
    "nearest": nearest,
    "corrected": corrected,
    "default": default_override,
    "ranks": lambda run, key: run.ranks.world_size,
    "sizes": lambda run, key: sizes(run[key], run.ranks.world_size * run["grad_accum_steps"]),
    "copies": lambda run, key: " x ".join(map(str, copies(run))),
    "sharing": sharing,
    "sizes_in_one": lambda run, key: sizes(run[key], run["grad_accum_steps"]),
    "reference": lambda run, key: f"{key}: ${{{key}}}",
    "modality": lambda run, key: run[f"{key}.modality"],
    "fitting": fitting,
    "example_model": lambda run, key: "model=gpt_nano" if run[f"{key}.modality"] == "tokens" else "model=resnet20",
}
"""The names in messages and fixes that stand for neither a key's value nor a group's option."""
