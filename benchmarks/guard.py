"""What the guard costs: its step against the unguarded one, in pairs, and a snapshot in steps.

    python benchmarks/guard.py --json guard.json

A round times one step with each guard, in turns first; guarded / unguarded is the overhead. A snapshot, which
`rollback` takes every `guard.snapshot_every` steps, is timed by itself and given in unguarded steps. The median and the
quartiles are printed.
"""

import statistics
from collections.abc import Callable

import torch
from measuring import Clock, command_line, machine, save
from workloads import WORKLOADS, plain_tools

from stabletrain.machine import hardware
from stabletrain.records import Batch, TrainState
from stabletrain.stability.guard import NoGuard, RollbackGuard, SkipGuard
from stabletrain.stability.optimizers import AdamW
from stabletrain.state.capture import capture
from stabletrain.state.snapshots import Snapshots
from stabletrain.step import commit, compute

GUARDS = {"off": NoGuard, "skip": SkipGuard, "rollback": RollbackGuard}


def measured(make: Callable, mode: str, device: torch.device, rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Ratios of a round's guarded steps to its unguarded one, and snapshots in unguarded steps."""
    torch.manual_seed(0)
    model, inputs, targets = make()
    model, batch = model.to(device), Batch(inputs.to(device), targets.to(device))
    state = TrainState(model, AdamW(1e-4, [0.9, 0.95], 1e-8, 0.1)(model))
    tools = {name: plain_tools(mode, device, guard()) for name, guard in GUARDS.items()}
    snapshots = Snapshots()

    def step(name: str) -> Callable[[], object]:
        used = tools[name]
        return lambda: used.guard.judge(commit(state, compute(state, [batch], used), used).wait())

    def snapshot() -> None:
        snapshots.take(state.step, capture(state, {}))
        snapshots.keep([state.step])

    for name in GUARDS:
        step(name)()  # warms up
    snapshot()
    found: dict[str, list[float]] = {"skip": [], "rollback": [], "snapshot": []}
    for number in range(rounds):
        order = list(GUARDS) if number % 2 else list(reversed(GUARDS))
        taken = {name: clock.seconds(step(name)) for name in order}
        for name in ("skip", "rollback"):
            found[name].append(taken[name] / taken["off"])
        found["snapshot"].append(clock.seconds(snapshot) / taken["off"])
    return found


def main() -> None:
    """Measures every workload of the device, prints the table, and writes the JSON."""
    asked = command_line(__doc__, 40).parse_args()
    device = hardware.pick(asked.device)
    clock = Clock(device, asked.clock)
    print(machine(device))
    print(f"| {'workload':30} | precision | what | median | quartiles |")
    print("|---|---|---|---|---|")
    results = []
    for name, make in WORKLOADS[device.type].items():
        for mode in asked.precision.split(","):
            for what, ratios in measured(make, mode, device, asked.rounds, clock).items():
                low, middle, high = statistics.quantiles(ratios, n=4)
                print(f"| {name:30} | {mode} | {what} | {middle:.3f} | {low:.3f} - {high:.3f} |", flush=True)
                results.append({"workload": name, "precision": mode, "what": what, "ratios": ratios})
    save(asked.json, device, results)


if __name__ == "__main__":
    main()
