"""Whether a slow spike should be rolled back by default: what it gains in faulty runs, and what healthy ones would pay.

    python -m tests.reliability.slow_rollback

Every run is trained twice with the guard as a user has it, once with `guard.slow=alarm` and once with
`guard.slow=rollback`: runs with a fault in training (`finite/kinds.py`; wrong labels, inputs, settings), and runs that
overfit (few data, read many times). A positive difference of the final validation losses says that going back was
worse. Clean runs with an alarm are counted by `python -m tests.reliability.finite score`.
"""

import argparse
import json
import shlex
import statistics
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from tests.reliability.finite.cases import MODELS, Case
from tests.reliability.finite.kinds import KINDS
from tests.reliability.finite.record import record

POLICIES = ("alarm", "rollback")
SLOW = ("slow_loss", "slow_gradient", "update_length", "weight_growth", "slow_validation")
FILES = (shlex.__file__, textwrap.__file__)
OVERFITTING = ("data=text", "model.n_embd=128", "batch_size=16", "optimizer.lr=6e-3", "steps=1000", "eval_every=50")
"""A GPT that reads one short file of Python's library some forty times."""


def cases(group: str, seeds: range) -> Iterator[Case]:
    """Yields the cases of a group: `fault` or `overfitting`."""
    if group == "fault":
        for seed in seeds:
            for model in MODELS:
                for name, kind in KINDS.items():
                    if kind.group == "training" and model in kind.models:
                        yield Case("faulty", model, "fp32", seed, name, "act")
    else:
        for seed in seeds:
            for file in FILES:
                yield Case("clean", "gpt", "fp32", seed, extra=(*OVERFITTING, f"data.path={file}"))


def both(case: Case) -> dict:
    """Trains a case with both policies; returns their losses, and the slow spikes and rollbacks of each."""
    torch.set_num_threads(1)
    found: dict = {"kind": case.kind, "model": case.model, "seed": case.seed, "extra": case.extra}
    for policy in POLICIES:
        one = record(replace(case, mode="act", extra=(*case.extra, f"guard.slow={policy}")))
        seen = [tuple(event) for event in one["events"]]
        found[policy] = {
            "loss": one["final"],
            "status": one["status"],
            "slow": [kind for _, event, kind in seen if event == "alarm" and kind in SLOW],
            "rollbacks": sum(event == "rollback" for _, event, _ in seen),
        }
        if policy == POLICIES[0] and not found[policy]["slow"]:  # the other one would be the same run
            found[POLICIES[1]] = found[policy]
            break
    return found


def main() -> None:
    """Runs all groups and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="seeds of each fault and of each overfitting run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="one group: fault or overfitting")
    parser.add_argument("--out", type=Path, help="a file for the results, one JSON object in each line")
    chosen = parser.parse_args()
    with ProcessPoolExecutor(chosen.processes) as pool:
        for group in ("fault", "overfitting"):
            if chosen.only in ("", group):
                found = [*pool.map(both, [*cases(group, range(chosen.seeds))])]
                if chosen.out:
                    with chosen.out.open("a") as file:
                        file.writelines(json.dumps({"group": group, **one}) + "\n" for one in found)
                report(group, found)


def report(group: str, found: list[dict]) -> None:
    """Prints what a group gains and pays."""
    slow = [one for one in found if one["alarm"]["slow"]]
    print(f"{group}: {len(found)} runs, {len(slow)} with a slow spike")
    for kind in dict.fromkeys(one["kind"] or one["model"] for one in slow):
        of_kind = [one for one in slow if (one["kind"] or one["model"]) == kind]
        gains = [one["rollback"]["loss"] - one["alarm"]["loss"] for one in of_kind]
        halted = sum(one["rollback"]["status"] == "halted" for one in of_kind)
        rollbacks = sum(one["rollback"]["rollbacks"] for one in of_kind)
        print(
            f"  {kind:22} {len(of_kind):3} runs  rollback minus alarm, nats: median {statistics.median(gains):+.3f} "
            f"({min(gains):+.3f} to {max(gains):+.3f})  rollbacks {rollbacks}"
            f"  halted {halted}",
            flush=True,
        )


if __name__ == "__main__":
    main()
