"""The arms: each is a resume of one state with changed overrides, or from an edited copy of the state.

| arm | what it changes |
|---|---|
| nothing | nothing: many spikes do not come back |
| skip | the data of the trouble is never read (an edited copy of the state, see `edits.py`) |
| lr_half_brief, lr_fifth_brief | the learning rate x 0.5, x 0.2 until 50 steps past the trouble (an edited copy) |
| lr_half, lr_fifth | `optimizer.lr` x 0.5, x 0.2, until the end of the run |
| lr_usual | `optimizer.lr` as the option of `optimizer` has it, if the run's is higher |
| rewarmup | a warmup of twice the steps done: about half the rate at the start, the whole rate at its end |
| clip, zclip | `clipping.max_norm` x 0.3; clipping of outliers |
| qknorm, qkclip, zloss, softcap | the option of that group |
| beta2, stable_adamw | the second moment forgets within 20 steps; AdamW that clips updates |
| moments | moments and step counters start at 0 (an edited copy of the state) |
| mean | the mean of the weights of the last healthy states (an edited copy of the state) |
| fp32, bf16 | a precision with a larger range |

The fixes that the diagnosis or the forecast names come first, and `lr_usual` before them if one of them is a learning
rate: a lower rate that is still too high does not hold, and a budget may have no room for more. Whether an arm applies
is decided by the checks of a configuration and by the table of resumes (`plan.py`); here stands only what neither of
them can know.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stabletrain.errors import ConfigError, did_you_mean

NOTHING, SKIP, MOMENTS, BRIEF, MEAN = "nothing", "skip", "moments", "brief", "mean"

LR_USUAL = "lr_usual"

RECORDED = "diagnosis or forecast"
"""`Arm.named` of a fix that the run's record names."""

MAX_FIXES = 5
"""Number of named fixes that become arms: the best ones."""

CLIP_FACTOR = 0.3
"""Factor of `clipping.max_norm`."""

BETA2 = 0.95

BRIEF_STEPS = 50
"""Steps past the trouble for which a brief arm lowers the learning rate: the first round goes further by default."""

OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w@/.-]*=.+", re.DOTALL)

FIXED_KEYS = {
    "resume": "every arm resumes the same state",
    "init_from": "every arm resumes the same state",
    "steps": "the arms are compared over the steps of the run",
    "seed": "the arms read identical batches",
    "batch_size": "the arms read identical batches",
    "data": "the arms read identical batches",
}
"""Keys that an own arm cannot change, and why."""

SET_BY_WHATIF = ("log_every", "eval_every", "report", "wandb", "forensics", "checkpoint", "hydra")
"""Keys and groups that a what-if sets itself; none of them changes a step."""


@dataclass(frozen=True)
class Arm:
    """One thing to try.

    Attributes:
        name: of the arm; of a named fix and of an own arm its overrides, with commas between.
        overrides: what the resume changes.
        edit: what is edited in a copy of the state: `skip`, `moments`, `brief`, `mean`, or nothing.
        named: who named it: `diagnosis or forecast`, `you`; empty for neither.
        refused: why it does not apply; empty if it does.
        about: what happens to the state, by the table of resumes.
        factor: of the learning rate, for `brief`.
        states: the steps of the states whose weights are averaged, for `mean`.
    """

    name: str
    overrides: tuple[str, ...] = ()
    edit: str = ""
    named: str = ""
    refused: str = ""
    about: str = ""
    factor: float = 1.0
    states: tuple[int, ...] = ()

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.name).strip("-.")[:100]


def catalogue(
    choices: Mapping[str, str],
    values: Mapping[str, Any],
    precision: str,
    step: int,
    last: int = 0,
    states: tuple[int, ...] = (),
    usual: float | None = None,
) -> list[Arm]:
    """Returns the arms of the table above for a run, in its order.

    Args:
        choices, values: the run's options, and its configuration by dotted key.
        precision: in which it computes; `auto` has chosen one.
        step: of the state from which the arms start.
        last: the last step of the trouble.
        states: the steps of the last healthy states, see `edits.py`.
        usual: the learning rate that the option of `optimizer` has by itself; None if not known.
    """
    narrow = f"the run computes in {precision}, whose range is as large"
    return [
        Arm(NOTHING, about="many spikes do not come back"),
        Arm(SKIP, edit=SKIP, about="the batches of the trouble are never read"),
        brief_lr("lr_half_brief", choices, values, 0.5, max(step, last)),
        brief_lr("lr_fifth_brief", choices, values, 0.2, max(step, last)),
        lower_lr("lr_half", values, 0.5),
        lower_lr("lr_fifth", values, 0.2),
        usual_lr(values, usual),
        rewarmup(choices, values, step),
        tighter_clip(values),
        Arm("zclip", ("clipping=zclip",)),
        Arm("qknorm", ("qknorm=layernorm",)),
        Arm("qkclip", ("qkclip=kimi",)),
        Arm("zloss", ("zloss=palm",)),
        Arm("softcap", ("softcap=gemma2",)),
        lower_beta2(values),
        stable_adamw(choices),
        reset_moments(choices, values),
        mean_of_states(states),
        Arm("fp32", ("precision=fp32",), refused="" if precision in ("fp16", "fp8") else narrow),
        Arm("bf16", ("precision=bf16",), refused="" if precision in ("fp16", "fp8") else narrow),
    ]


def lower_lr(name: str, values: Mapping[str, Any], factor: float) -> Arm:
    """A lower learning rate until the end of the run."""
    value = values.get("optimizer.lr")
    if not isinstance(value, int | float):
        return Arm(name, refused="the optimizer has no key lr")
    return Arm(name, (f"optimizer.lr={value * factor:.4g}",))


def usual_lr(values: Mapping[str, Any], usual: float | None) -> Arm:
    """The learning rate of the option of `optimizer`: a rate may be so high that a fifth of it still is."""
    value = values.get("optimizer.lr")
    if not isinstance(value, int | float) or usual is None:
        return Arm(LR_USUAL, refused="the optimizer has no key lr, or its usual value is not known")
    if value <= usual:
        return Arm(LR_USUAL, refused=f"optimizer.lr={value:g} is not above the usual {usual:g}")
    return Arm(LR_USUAL, (f"optimizer.lr={usual:g}",))


def brief_lr(name: str, choices: Mapping[str, str], values: Mapping[str, Any], factor: float, last: int) -> Arm:
    """A lower learning rate for a while. No option of `schedule` has one, but the guard has one for its rollbacks."""
    end, total, kind = last + BRIEF_STEPS, values.get("steps", 0), choices.get("guard")
    if kind != "rollback":
        return Arm(name, refused=f"guard={kind}: only guard=rollback can lower the learning rate for a while")
    if end >= total:
        return Arm(name, refused=f"it would last to step {end}, and the run ends at step {total}")
    return Arm(name, edit=BRIEF, factor=factor, about=f"the learning rate x {factor:g} to step {end}, and then x 1")


def rewarmup(choices: Mapping[str, str], values: Mapping[str, Any], step: int) -> Arm:
    """A warmup that ends at twice the steps done. A warmup counts from step 0, so it begins at half the rate."""
    steps, total = values.get("warmup.steps"), values.get("steps", 0)
    length = 2 * max(step, steps if isinstance(steps, int) else total // 20, 1)
    kind = choices.get("warmup", "none")
    if kind not in ("none", "linear", "cosine"):
        return Arm("rewarmup", refused=f"warmup={kind} is your own, and its keys are not known")
    if length >= total:
        return Arm("rewarmup", refused=f"it would end at step {length}, and the run ends at step {total}")
    return Arm("rewarmup", (*(["warmup=linear"] if kind == "none" else []), f"warmup.steps={length}"))


def tighter_clip(values: Mapping[str, Any]) -> Arm:
    """A tighter bound on the gradient norm; clipping of the norm if the run has no such bound."""
    bound = values.get("clipping.max_norm")
    if isinstance(bound, int | float):
        return Arm("clip", (f"clipping.max_norm={bound * CLIP_FACTOR:.4g}",))
    return Arm("clip", ("clipping=norm", f"clipping.max_norm={CLIP_FACTOR}"))


def lower_beta2(values: Mapping[str, Any]) -> Arm:
    """A second moment that forgets sooner."""
    betas = values.get("optimizer.betas")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        return Arm("beta2", refused="the optimizer has no beta2")
    if betas[1] <= BETA2:
        return Arm("beta2", refused=f"beta2 is {betas[1]:g}, not above {BETA2}")
    return Arm("beta2", (f"optimizer.betas=[{betas[0]:g},{BETA2}]",))


def stable_adamw(choices: Mapping[str, str]) -> Arm:
    """AdamW with update clipping, which keeps AdamW's state."""
    kind = choices.get("optimizer")
    if kind != "adamw":
        return Arm("stable_adamw", refused=f"optimizer={kind}: only adamw has the same state and learning rate")
    return Arm("stable_adamw", ("optimizer=stable_adamw",))


def reset_moments(choices: Mapping[str, str], values: Mapping[str, Any]) -> Arm:
    """The optimizer's state starts at 0, and the weights are kept."""
    if choices.get("optimizer") == "sgd" and not values.get("optimizer.momentum"):
        return Arm(MOMENTS, refused="sgd without momentum has no moments")
    return Arm(MOMENTS, edit=MOMENTS, about="moments and step counters start at 0")


def mean_of_states(states: tuple[int, ...]) -> Arm:
    """The mean of the last healthy states, without the initial weights."""
    if len(states) < 2:
        return Arm(MEAN, refused="there is only one healthy state from before the trouble, and a mean needs two")
    *others, start = map(str, states)
    about = f"the mean of the weights after steps {', '.join(others)} and {start}"
    return Arm(MEAN, edit=MEAN, states=states, about=about)


def with_fixes(arms: Sequence[Arm], fixes: Sequence[str]) -> list[Arm]:
    """Puts the fixes that the diagnosis or the forecast names first, after `nothing`.

    If one of them is a learning rate, the rate is suspected, and `lr_usual` comes before them: of 88 recorded runs with
    another cause than wrong data or fp16's range, 83 end healthy with it (docs/evidence/whatif.md).

    Args:
        arms: of `catalogue`.
        fixes: best first; each one override, or several with blanks between.
    """
    named = []
    left = list(arms)
    for fix in fixes[:MAX_FIXES]:
        words = tuple(fix.split())
        known = next((arm for arm in left if arm.overrides == words), Arm(",".join(words), words))
        left = [arm for arm in left if arm is not known]
        named.append(replace(known, named=RECORDED))
    suspected = any(word.startswith("optimizer.lr=") for fix in fixes for word in fix.split())
    usual = [arm for arm in (*named, *left) if suspected and arm.name == LR_USUAL and not arm.refused]
    named, left = ([arm for arm in each if arm not in usual] for each in (named, left))
    first = [replace(arm, about="the rate is suspected; this is the usual one") for arm in usual]
    return [*left[:1], *first, *named, *left[1:]]


def own_arm(word: str) -> Arm:
    """Returns the arm of a typed `key=value[,key=value...]`; commas within brackets and quotes belong to the value.

    Raises:
        ConfigError: the text is no arm, or changes what all arms have in common.
    """
    pieces = split_at_commas(word)
    for piece in pieces:
        if not OVERRIDE.fullmatch(piece):
            raise ConfigError(
                f"{word}: {piece!r} is not key=value, so this is no arm; fix: write key=value[,key=value...], or name "
                "arms with --arms"
            )
        key = piece.lstrip("+~").partition("=")[0]
        group = key.partition(".")[0]
        if (reason := FIXED_KEYS.get(key) or FIXED_KEYS.get(group)) is not None:
            raise ConfigError(f"{word}: an arm cannot change {key}: {reason}; fix: leave it out")
        if key in SET_BY_WHATIF or group in SET_BY_WHATIF:
            raise ConfigError(f"{word}: a what-if sets {key} itself, and it changes no step; fix: leave it out")
    return Arm(",".join(pieces), tuple(pieces), named="you")


def split_at_commas(word: str) -> list[str]:
    """Splits at the commas that are not within brackets, braces or quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in word:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def choose_arms(arms: Sequence[Arm], names: Sequence[str] | None, own: Sequence[Arm]) -> list[Arm]:
    """Returns the arms to run: `nothing`, those that are named, and the user's own.

    Args:
        arms: all that there are, applying or not.
        names: of `--arms`; None for all of them.
        own: of `own_arm`.

    Raises:
        ConfigError: there is no arm of a name.
    """
    known = {arm.name: arm for arm in arms}
    for name in names or ():
        if name not in known:
            raise ConfigError(
                f"--arms {name}: there is no such arm{did_you_mean(name, known)}; fix: --list shows all of them, and "
                "an arm of your own is typed without --arms, as key=value[,key=value...]"
            )
    found = list(arms) if names is None else [arm for arm in arms if arm.name in (NOTHING, *names)]
    folders = {arm.folder for arm in found}
    return [*found, *(arm for arm in {arm.name: arm for arm in own}.values() if arm.folder not in folders)]
