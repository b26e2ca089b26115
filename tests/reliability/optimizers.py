"""Optimizers of other libraries under `Guard`: as without it, and as without a fault that comes once.

    pip install pytorch_optimizer && python -m tests.reliability.optimizers

A small model trains 8 steps with each optimizer: in a bare loop, with `Guard`, and with `Guard` and one update that
leaves a NaN, but not when it is computed again. All three have to end with the same weights, and no step withheld.
Optimizers that the bare loop cannot run, such as those that want a closure, are left out.
"""

import contextlib
import io
import tempfile
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from stabletrain import Guard

STEPS, SPOILT = 8, 5


def net() -> nn.Module:
    """Returns the model, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def trained(make: Any, guarded: bool, spoilt: int = 0) -> tuple[dict[str, torch.Tensor], Guard | None]:
    """Trains the model; returns its weights, and the guard."""
    model = net()
    optimizer = make(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    first, calls = next(model.parameters()), []

    def spoil(*_: Any) -> None:
        calls.append(1)
        if len(calls) == spoilt:
            with torch.no_grad():
                first[0, 0] = torch.nan

    optimizer.register_step_post_hook(spoil)
    guard = Guard(model, optimizer, folder=tempfile.mkdtemp()) if guarded else None
    drawn = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x, y = torch.randn(8, 8, generator=drawn), torch.randint(0, 3, (8,), generator=drawn)
        if guard is not None:
            guard.step(lambda x, y: nn.functional.cross_entropy(model(x), y), batch=(x, y))
        else:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return dict(model.state_dict()), guard


def outcome(make: Any) -> str:
    """Returns how an optimizer fares: `as bare`, `cannot run`, or what differs."""
    try:
        bare, _ = trained(make, guarded=False)
    except Exception:
        return "cannot run"
    for spoilt in (0, SPOILT):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found, guard = trained(make, guarded=True, spoilt=spoilt)
        assert guard is not None
        same = all(torch.equal(bare[name], found[name]) for name in bare)
        if not same or guard.skipped or guard.machine_faults != bool(spoilt):
            return "differs, spoilt" if spoilt else "differs"
    return "as bare"


def main() -> None:
    """Prints how many optimizers fare how, and the names of those that differ."""
    import pytorch_optimizer  # ty: ignore[unresolved-import]

    warnings.simplefilter("ignore")
    counts = Counter[str]()
    for name in pytorch_optimizer.get_supported_optimizers():
        try:
            found = outcome(pytorch_optimizer.load_optimizer(name))
        except Exception as error:
            found = f"{type(error).__name__}"
        counts[found] += 1
        if found not in ("as bare", "cannot run"):
            print(f"{name}: {found}")
    print(dict(counts))


if __name__ == "__main__":
    main()
