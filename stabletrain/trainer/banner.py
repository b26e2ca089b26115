"""The first and the last lines that a run prints: what was chosen and why, the result, and a command to try next."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stabletrain.config.arguments import SWEEP, Arguments, key_of, program
from stabletrain.config.rules import CHOSEN_PARTS
from stabletrain.guard.checks.update_check import replays_exactly
from stabletrain.guard.checks.written import kept_outside
from stabletrain.models.sampling import generate
from stabletrain.parallel.ranks import Ranks, current_ranks, run_on_main
from stabletrain.trainer.contract import context_length


def opening(
    choices: Mapping[str, str],
    config: Mapping[str, Any],
    model: nn.Module,
    data: Any,
    tools: Any,
    machine: str,
    folder: str,
    notes: Sequence[str] = (),
) -> str:
    """Returns the first lines: model, data and machine; the settings; `notes` that are not empty; the run folder."""
    size = sum(p.numel() for p in model.parameters())
    about = getattr(data, "summary", choices["data"])
    precision = tools.precision
    settings = [f"precision {precision.name}{f' ({precision.why})' if precision.why else ''}"]
    if config["precision"].get("fp32_modules"):
        settings.append(f"in fp32 {', '.join(config['precision']['fp32_modules'])}")
    # warmup.steps=null is resolved from `steps`: show the length that is used
    resolved = {"warmup": {"steps": tools.learning_rate.warmup.length(tools.learning_rate.total)}}
    settings += [
        option_text(group, choices[group], {**config[group], **resolved.get(group, {})})
        + (tools.guard.note if group == "guard" else "")
        for group in SHOWN
        if choices[group] != CHOSEN_PARTS.get(group, "none")
    ]
    return "\n".join(
        [
            f"stabletrain · {choices['model']}, {parameter_count(size)} parameters · {about} · {machine}",
            " · ".join(settings),
            *filter(None, notes),
            f"run {relative_path(folder)}",
        ]
    )


BUSY = 1.5
"""Load average per core above which a run on the CPU is slow."""

LONG = 50
"""Number of batches in an evaluation above which the user is advised to use fewer."""


def split_note(data: Any) -> str:
    """Returns a line on how the data was split into training and validation; empty if the data set does not say."""
    about = getattr(data, "split", "")
    return f"split: {about}" if isinstance(about, str) and about else ""


ALONE = Ranks()

AT_START = 5.0
"""Seconds that a run waits for its tokenizer before the first step; only the sample at the end needs it."""

SAMPLE_TOKENS = 200
"""Number of tokens of the text at the end of a run."""


def text_note(data: Any) -> str:
    """Returns a line that says that no text can be shown at the end, and why; empty if it can, or if it is unknown."""
    why = data.why_no_text(AT_START) if callable(getattr(data, "why_no_text", None)) else ""
    return f"no text sample at the end: {why}" if why else ""


def busy_note(load: float, cores: int, threads: int, val_batches: int) -> str:
    """Returns a line with advice for a faster run on a busy CPU; empty if it is not busy or no advice applies.

    Args:
        load: load average: the number of processes that run or wait for a core.
        cores: number of cores that this process may use.
        threads: number of threads that PyTorch uses.
        val_batches: number of batches of an evaluation.
    """
    if load < BUSY * cores:
        return ""
    help = [f"OMP_NUM_THREADS=1 instead of {threads} threads"] if threads > 1 else []
    if val_batches > LONG:
        help.append(f"eval_batches=20 instead of {val_batches} at each evaluation")
    return f"busy machine: load {load:.1f} on {cores} cores; faster with {' and '.join(help)}" if help else ""


def update_note(guard: Any, state: Any) -> str:
    """Returns a line that says why updates are checked, and what is kept to undo one; empty if they are not."""
    why = guard.update_check.why(state.optimizer)
    if not why:
        return ""
    device = next(state.model.parameters()).device
    keeps_states = guard.states.steps or guard.states.due(state.step)
    if keeps_states and replays_exactly(state.model, state.optimizer, device):
        return f"updates are checked, because {why}; one that is not finite is undone by a replay from a snapshot"
    trained = [each for each in state.model.parameters() if each.requires_grad]
    size = 2 * sum(each.numel() * each.element_size() for each in trained) / 1e6
    note = f"updates are checked, because {why}; copies of weights, gradients ({size:,.0f} MB) and moments are kept"
    lost = [name for name, value in kept_outside(state.optimizer).items() if not isinstance(value, int | float)]
    return (
        f"{note}; a rollback or a resume does not restore its {', '.join(lost)}: keep them in `state`" if lost else note
    )


def relative_path(folder: str) -> str:
    """Returns the path relative to the working directory if the folder is inside it; else the path unchanged."""
    path = Path(folder)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else folder


SHOWN = ("optimizer", "clipping", "warmup", "guard", "zloss", *CHOSEN_PARTS, "averaging")
SHOWN += ("activation_checkpointing", "faults")
"""Config groups shown in the opening's second line, unless their option does nothing."""

FIRST_VALUE = ("lr", "max_norm", "clip_value", "clipping", "steps", "coefficient", "attention_cap", "max_logit")
"""Keys to look for in an option: the first one that is set is shown beside the option's name."""


def option_text(group: str, option: str, values: Mapping[str, Any]) -> str:
    """Formats a group, its option and its most important value: `clipping norm 1`."""
    shown = [
        f"{key} {values[key]:g}" if key == "lr" else f"{values[key]:g}"
        for key in FIRST_VALUE
        if values.get(key) is not None
    ]
    return " ".join([group, option, *shown[:1]])


def parameter_count(count: int) -> str:
    """Formats a number of parameters: 0.85 M, 124 M, 1.2 B."""
    for least, size, letter in ((1e9, 1e9, "B"), (1e5, 1e6, "M")):
        if count >= least:
            value = count / size
            return f"{value:.0f} {letter}" if value >= 10 else f"{value:.2g} {letter}"
    return f"{count:,}"


def closing(
    *,
    state: Any,
    history: Any,
    guard: Any,
    unit: str,
    loss_unit: str,
    per: str,
    folder: str,
    sample: str | None,
    again: str | None,
    healed_by: Sequence[str] = (),
) -> str:
    """Returns the last lines: the result, the guard's work, the pace, a text sample, the run folder, the next command.

    Args:
        unit: unit of throughput: `tok`, `img` or `sample`.
        loss_unit: unit of the loss, such as `nats`; empty if it has none.
        per: what one loss belongs to, such as `byte`.
        again: the command to try next; None for none.
        healed_by: the arms with which the run went on after its halts.
    """
    result = result_text(history.val, loss_unit, per)
    best = f"best at step {history.best_step:,}"
    lines = [
        f"{result} after {state.step:,} steps in {history.seconds:.0f} s, {best}",
        f"guard    {guard_summary(state, history, guard, healed_by)}",
        f"pace     {history.units / max(history.seconds, 1e-9):,.0f} {unit}/s",
    ]
    if (averaged := history.val.get("averaging/val_loss")) is not None:
        lines.insert(1, f"average  val loss {averaged:.3f}, of the averaged weights")
    if sample and sample.strip():
        first, *rest = sample.strip("\n").split("\n")
        lines += [f"sample   {first}", *(f"         {line}" for line in rest)]
    return "\n".join([*lines, f"run      {relative_path(folder)}", *([f"next     {again}"] if again else [])])


def result_text(val: Mapping[str, float], loss_unit: str, per: str) -> str:
    """Formats the metrics of the last evaluation."""
    if "val/loss" not in val:
        return "val loss nan: nothing was evaluated"
    if not math.isfinite(loss := val["val/loss"]):
        return f"val loss {loss}: weights, validation data, or what the model computes from them are not finite"
    if "val/accuracy" in val:
        return f"val accuracy {100 * val['val/accuracy']:.2f} %, loss {loss:.3f}{f' {loss_unit}' if loss_unit else ''}"
    if loss_unit:
        return f"val loss {loss:.3f} {loss_unit}/{per} ({loss / math.log(2):.2f} bits)"
    others = [f"{name.removeprefix('val/')} {value:.4g}" for name, value in val.items() if name.startswith("val/")]
    return "val " + ", ".join(others[:6])


def guard_summary(state: Any, history: Any, guard: Any, healed_by: Sequence[str] = ()) -> str:
    """Summarizes what the guard did: updates, skips, rollbacks, healings, time lost, batches never read again."""
    again = f", {state.executed_steps:,} executed" if state.executed_steps != state.step else ""
    words = [f"{history.updates:,} updates in {state.step:,} steps{again}"]
    words += [f"{count} skipped ({kind.replace('_', ' ')})" for kind, count in guard.skips.items() if count]
    if count := guard.kept_steps:
        words.append(f"{count} kept without {guard.samples_left_out} sample{'s' * (guard.samples_left_out > 1)}")
    if count := guard.machine_faults:
        words.append(f"{count} step{'s' * (count > 1)} taken again after a fault of the machine")
    if guard.rollbacks:
        words.append(f"{guard.rollbacks} rollback{'s' if guard.rollbacks > 1 else ''}")
    if healed_by:
        words.append(f"{len(healed_by)} healing{'s' if len(healed_by) > 1 else ''} ({', then '.join(healed_by)})")
    if guard.rollbacks or healed_by:
        words.append(f"{history.lost_steps} steps ({history.lost_seconds:.0f} s) lost")
        if state.skipped:
            words.append("batches never read again " + " ".join(f"{start}-{stop - 1}" for start, stop in state.skipped))
    return ", ".join(words) if len(words) > 1 else f"{words[0]}, none skipped"


def suggestion(typed: Arguments, has_attention: bool, per: str) -> str:
    """Returns a command that sweeps a few settings of the run that just ended.

    Args:
        has_attention: whether the model takes QK-norm, so that every `stability` preset fits it.
        per: unit of the loss.
    """
    sweep = ["clipping=none,norm", "optimizer.lr=0.03,3"]
    if has_attention:
        sweep = ["stability=none,zloss_qknorm", "optimizer.lr=1e-3,1e-1"]
    elif per != "image":
        sweep = ["clipping=none,norm", "optimizer.lr=1e-3,1e-1"]
    # drop the keys that the sweep or its presets set: a typed key would win over the preset
    swept = {key_of(each) for each in sweep} | {"resume", "zloss", "qknorm", "qkclip", "stability"}
    kept = [o for o in typed.overrides if key_of(o) not in swept and not key_of(o).startswith(("hydra", "faults"))]
    options = [option for option in typed.options if option not in SWEEP]
    return shlex.join([*program(current_ranks()), "-m", *options, *kept, *sweep])


def sample_text(model: nn.Module, data: Any, device: torch.device, ranks: Ranks = ALONE) -> str | None:
    """Generates `SAMPLE_TOKENS` tokens of text from the data's prompt, on the main process.

    Returns None on the others, and if the data is not text. All ranks must call it, because the model may be sharded.
    Leaves the model and the random generators unchanged. If an error prevents it, returns a line that says so: the run
    is finished and saved.
    """
    if not all(hasattr(data, name) for name in ("encode", "decode", "prompt")):
        return None
    prompt, failed = run_on_main(ranks, lambda: encoded(data))  # the other ranks need no tokenizer
    if failed:
        return failed
    try:
        generator = torch.Generator(device).manual_seed(0)
        length = context_length(model, data)
        ids = generate(model, torch.tensor([prompt], device=device), SAMPLE_TOKENS, 0.8, 50, generator, length)
        return data.decode(ids[0].tolist()) if ranks.is_main else None
    except Exception as error:
        return no_sample(error)


def encoded(data: Any) -> tuple[list[int], str]:
    """Returns the ids of the data's prompt, and an empty string; or no ids, and the line that stands for the sample."""
    try:
        return data.encode(data.prompt), ""
    except Exception as error:
        return [], no_sample(error)


def no_sample(error: Exception) -> str:
    """Returns the line that stands for a sample that could not be generated."""
    return f"(none: {' '.join((str(error) or type(error).__name__).split())})"
