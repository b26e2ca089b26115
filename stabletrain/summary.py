"""What a person reads first and last of a run: what was chosen and why, what came of it, and what to try next."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stabletrain.models.sampling import generate


def opening(
    choices: Mapping[str, str],
    config: Mapping[str, Any],
    model: nn.Module,
    data: Any,
    tools: Any,
    machine: str,
    folder: str,
) -> str:
    """Three lines: what is trained on what, with which settings, and where the run is kept.

    Args:
        choices: option by group.
        config: the composed configuration, plain values.
        model, data: the objects.
        tools: the step's `Tools`.
        machine: the device and its threads.
        folder: the run folder.
    """
    size = sum(p.numel() for p in model.parameters())
    about = getattr(data, "summary", choices["data"])
    precision = tools.precision
    settings = [f"precision {precision.name}{f' ({precision.why})' if precision.why else ''}"]
    resolved = {"warmup": {"steps": tools.learning_rate.warmup.length(tools.learning_rate.total)}}
    settings += [
        named(group, choices[group], {**config[group], **resolved.get(group, {})})
        for group in SHOWN
        if choices[group] != "none"
    ]
    return "\n".join(
        [
            f"stabletrain · {choices['model']}, {millions(size)} parameters · {about} · {machine}",
            " · ".join(settings),
            f"run {near(folder)}",
        ]
    )


def near(folder: str) -> str:
    """A folder as one would type it: relative, if it lies below the current one."""
    path = Path(folder)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else folder


SHOWN = ("optimizer", "clipping", "warmup", "guard", "zloss", "qknorm")
"""Groups of the opening's second line."""

FIRST_VALUE = ("lr", "max_norm", "steps", "coefficient")
"""The value shown beside an option, where it has one of these."""


def named(group: str, option: str, values: Mapping[str, Any]) -> str:
    """`clipping norm 1.0`: a group, its option and the value that matters most."""
    shown = [f"{key} {values[key]:g}" if key == "lr" else f"{values[key]:g}" for key in FIRST_VALUE if values.get(key)]
    return " ".join([group, option, *shown[:1]])


def millions(count: int) -> str:
    """0.85 M, 124 M, 1.2 B."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= 0.1 * size:
            value = count / size
            return f"{value:.0f} {letter}" if value >= 100 else f"{value:.2g} {letter}"
    return f"{count:,}"


def closing(
    *,
    step: int,
    history: Any,
    skips: Mapping[str, int],
    unit: str,
    per: str,
    folder: str,
    sample: str | None,
    typed: Sequence[str],
) -> str:
    """The result, a sample of generated text, the pace, the run folder, and a command to try next.

    Args:
        step: steps done.
        history: the run's `History`.
        skips: withheld updates by kind.
        unit: what the pace counts, `tok` or `img`.
        per: what a loss is per, such as `byte`.
        folder: the run folder.
        sample: generated text, or None.
        typed: the command line's overrides.
    """
    loss = history.val.get("val/loss", math.nan)
    result = f"val loss {loss:.3f} nats/{per} ({loss / math.log(2):.2f} bits)"
    if "val/accuracy" in history.val:
        result = f"val accuracy {100 * history.val['val/accuracy']:.2f} %, loss {loss:.3f} nats"
    skipped = sum(skips.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in skips.items() if count)
    best = f"best at step {history.best_step:,}"
    lines = [
        f"{result} after {step:,} steps in {history.seconds:.0f} s, {skipped} skipped{kinds and f' ({kinds})'}, {best}",
        f"pace     {history.units / max(history.seconds, 1e-9):,.0f} {unit}/s",
    ]
    if sample and sample.strip():
        first, *rest = sample.strip("\n").splitlines()
        lines += [f"sample   {first}", *(f"         {line}" for line in rest)]
    return "\n".join([*lines, f"run      {near(folder)}", f"next     {suggestion(typed, per)}"])


def suggestion(typed: Sequence[str], per: str) -> str:
    """A sweep to try next, over what was just run."""
    sweep = ["stability=none,zloss_qknorm", "optimizer.lr=1e-3,1e-1"]
    if per == "image":
        sweep = ["clipping=none,norm", "optimizer.lr=0.03,3"]
    swept = tuple(f"{each.partition('=')[0]}=" for each in sweep)
    kept = [override for override in typed if not override.startswith((*swept, "resume=", "hydra."))]
    return shlex.join(["python", "train.py", "-m", *kept, *sweep])


def sample_text(model: nn.Module, data: Any, device: torch.device, tokens: int = 200) -> str | None:
    """Text that the model continues from the data's prompt; None for data that is no text. Leaves no trace."""
    if not all(hasattr(data, name) for name in ("encode", "decode", "prompt")):
        return None
    prompt = torch.tensor([data.encode(data.prompt)], device=device)
    generator = torch.Generator(device).manual_seed(0)
    tokens_out = generate(model, prompt, tokens, temperature=0.8, top_k=50, generator=generator)
    return data.decode(tokens_out[0].tolist())
