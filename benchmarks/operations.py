"""What a step launches: operations of a guarded step and of a bare loop's, and the host time of both.

    python benchmarks/operations.py                       counts, as if on a CUDA device, without values (fake_card.py)
    python benchmarks/operations.py --host --rounds 400   host time: tiny models on one CPU thread, in turns

Both loops run in one process, with the same model, batch and precision; the bare loop is `bare.py`. Batches are on the
device already. `launches` counts the operations that run a kernel on a card, `dispatched` also views and allocations,
which cost host time only. The step is one of the loop's ordinary rounds, in which no monitor inspects it.

A launch-bound model pays for each operation. On tiny models, whose kernels take no time, host time shows this cost.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import bare
import torch
from jobs import SIZES, Rounds, built
from measuring import Clock, command_line, head, in_turns, machine, quartiles, ratios, row, save, silence
from overhead import OPTIMIZERS, bare_of, optimizer_of
from targets import judged

from stabletrain.machine import hardware
from stabletrain.records import Batch

sys.path.insert(0, str(Path(__file__).parent.parent))  # `tests` is not installed
from tests.tools.fake_card import Recorder, as_if_on_a_card

MODELS = {
    "gpt_nano": ("model=gpt_nano", "data=random_tokens", "batch_size=16"),
    "gpt_mini": ("model=gpt_mini", "data=random_tokens", "batch_size=16"),
    "ResNet-20": ("model=resnet20", "data=random_images", "batch_size=128"),
}

KINDS = {
    "guard=off": ("guard=off",),
    "guard=skip": ("guard=skip",),
    "guard=rollback, monitors=default": ("guard=rollback", "monitors=default"),
}

CHECKED = "guard=skip, update checked"
"""An optimizer of which nothing is proven, without copies: with them the host waits for each update."""

METADATA = ("empty", "empty_strided", "empty_like", "new_empty", "_record_function_enter_new", "_record_function_exit")
"""Operations that run no kernel although they return no view."""


class Launches:
    """Counts operations of the recorder: those that launch a kernel, and all."""

    def __init__(self) -> None:
        self.launched = self.dispatched = 0

    def add(self, function: Any) -> None:
        """Counts one operation."""
        self.dispatched += 1
        view = function.is_view or function.__name__.split(".")[0] in METADATA
        self.launched += not view


def counted(step: Callable[[], object]) -> Launches:
    """Counts the operations of the third call of `step`: the first ones create the optimizer's state."""
    step()
    step()
    found, dispatch = Launches(), Recorder.__torch_dispatch__

    def counting(recorder: Recorder, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace != "prim":
            found.add(func)
        return dispatch(recorder, func, types, args, kwargs)

    with mock.patch.object(Recorder, "__torch_dispatch__", counting):
        step()
    return found


def both(overrides: Sequence[str], precision: str, checked: bool = False) -> tuple[Launches, Launches]:
    """Returns what a step of this project and one of the bare loop launch, in that order.

    With `checked`, the optimizer is AdamW of another class, so that its updates are checked.
    """
    kind = optimizer_of(overrides)
    shared = ("device=cuda", f"precision={precision}", f"optimizer={kind}", f"optimizer.lr={OPTIMIZERS[kind][1]}")
    with tempfile.TemporaryDirectory() as folder, silence(), as_if_on_a_card():
        run = Rounds(built(Path(folder), (*overrides, *shared)))
        run.fetch = prepared(run)  # ty: ignore[invalid-assignment]
        if checked:
            optimizer, check = run.job.state.optimizer, run.job.tools.guard.update_check
            optimizer.__class__ = type("Own", (type(optimizer),), {})
            assert check.why(optimizer)
            check.copies = False
        reference = bare_of(run, kind, bf16=precision == "bf16")
        # On a card PyTorch chooses this form by itself, but not for tensors without values.
        clip = bare.clip_grad_norm_
        with mock.patch.object(bare, "clip_grad_norm_", lambda parameters, norm: clip(parameters, norm, foreach=True)):
            return counted(run), counted(reference)


def count(precision: str) -> tuple[list[dict[str, Any]], int]:
    """Prints the counts of every model and guard; returns them, and the most launches beyond a bare loop's."""
    print(head("model", "kind", "launches", "bare", "more", "dispatched", "bare", "more"))
    results, most = [], 0
    for model, overrides in MODELS.items():
        for kind, chosen in {**KINDS, CHECKED: KINDS["guard=skip"]}.items():
            ours, theirs = both((*overrides, *chosen), precision, kind == CHECKED)
            more = ours.launched - theirs.launched
            cells = (ours.launched, theirs.launched, more)
            cells += (ours.dispatched, theirs.dispatched, ours.dispatched - theirs.dispatched)
            print(row(model, f"{kind}, {precision}", *cells), flush=True)
            results.append({"model": model, "kind": kind, "ours": vars(ours), "bare": vars(theirs)})
            most = max(most, more if kind in KINDS else 0)
    return results, most


HOST = dict(zip(KINDS, ("operations/host_off", "operations/host_skip", "operations/host_rollback"), strict=True))
"""The target for each guard."""


def host_time(rounds: int, clock: Clock, loading: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Prints the host time of steps of tiny models, beside a bare loop's in the same rounds.

    Args:
        loading: whether this project's batches are made by its background thread meanwhile.

    Returns:
        the rows, and the largest ratio of each guard by target.
    """
    print(head("model", "what", "a step", "over bare", "quartiles"))
    results, values = [], {}
    for name, overrides in SIZES["tiny"].items():
        kind = optimizer_of(overrides)
        shared = ("device=cpu", "precision=fp32", f"optimizer={kind}", f"optimizer.lr={OPTIMIZERS[kind][1]}")
        with tempfile.TemporaryDirectory() as folder, silence():
            runs = {
                what: Rounds(built(Path(folder) / str(number), (*overrides, *shared, *chosen)))
                for number, (what, chosen) in enumerate(KINDS.items())
            }
            first = next(iter(runs.values()))
            for run in () if loading else runs.values():
                run.fetch = prepared(run)  # ty: ignore[invalid-assignment]
            steps = {"bare": bare_of(first, kind, bf16=False), "bare again": bare_of(first, kind, bf16=False), **runs}
            turns = {what: lambda _, step=step: clock.seconds(step) for what, step in steps.items()}
            taken = in_turns(turns, rounds)
        for what, seconds in taken.items():
            middle, low, high = quartiles(ratios(seconds, taken["bare"]))
            cells = ("1", "") if what == "bare" else (f"{middle:.3f}", f"{low:.3f} - {high:.3f}")
            print(row(name, what, f"{1e6 * quartiles(seconds)[0]:,.0f} us", *cells), flush=True)
            results.append({"model": name, "what": what, "seconds": seconds, "ratio": middle})
            if what in HOST:
                values[HOST[what]] = max(middle, values.get(HOST[what], 0.0))
    return results, values


def prepared(run: Rounds) -> Callable[[], tuple[Batch, list[Batch]]]:
    """Returns a function that gives the first batch of a run, on its device already as those of the bare loop."""
    batch = run.job.data.load(0).to(run.job.device)
    return lambda: (batch, [batch])


def main() -> None:
    """Counts, or with `--host` measures the host time."""
    parser = command_line(__doc__, 400)
    parser.set_defaults(precision="bf16")
    parser.add_argument("--host", action="store_true", help="measure host time instead of counting")
    parser.add_argument("--loading", action="store_true", help="with --host: batches are loaded meanwhile, as in a run")
    asked = parser.parse_args()
    device = hardware.choose_device("cpu")
    if asked.host:
        torch.set_num_threads(1)
        print(f"{machine(device)}, {asked.clock} time, {asked.rounds} rounds")
        results, values = host_time(asked.rounds, Clock(device, asked.clock), asked.loading)
        print("\n" + judged(values, device, "operations/host"))
        save(asked.json, device, results, values)
        return
    print(f"as if on an H100, torch {torch.__version__}")
    results, most = count(asked.precision)
    values = {"operations/more": most}
    print("\n" + judged(values, device, "operations/more"))
    save(asked.json, device, results, values)


if __name__ == "__main__":
    main()
