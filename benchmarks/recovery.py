"""The cost of recovery, in steps: a snapshot, a checkpoint, a rollback, a resume, a diagnosis.

    python benchmarks/recovery.py --json recovery.json
    python benchmarks/recovery.py --size gpt2 --precision fp32 --rounds 2 --json recovery_gpt2.json

Each cost is divided by the median time of steps taken in the same turn of the same run:

- **snapshot, checkpoint**: the time that the loop waits. A thread then writes the checkpoint beside the steps; their
  slowdown until it is written is reported as well, and so is the very first snapshot, which allocates its memory.
- **rollback**: the step computed meanwhile, which is discarded; restoring the state from memory or disk; starting a
  checkpoint of it; and the next batch. How many steps are lost depends on `guard.snapshot_every`.
- **resume**: whole commands: from the start of the process to its first step, against a run that starts anew.
- **diagnosis**: see `incidents.py`.

With `--clock cpu`, the time of the checkpoint thread counts too.
"""

import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from first_step import TRAIN, to_a_step
from incidents import AT, diagnoses
from jobs import HERE, NOTHING_ELSE, Rounds, built
from measuring import Budget, Clock, command_line, head, in_turns, machine, modes, save, silence
from quantities import COLUMNS, quantity, reached, show
from targets import judged

from stabletrain.machine import hardware

LARGE = ("model=gpt2", "data=random_tokens", "data.vocab_size=50257")
SMALL = {
    "gpt_nano, 16 x 128 tokens": ("model=gpt_nano", "data=random_tokens", "batch_size=16"),
    "resnet20, 32 images of 32 px": ("model=resnet20", "data=random_images", "batch_size=32"),
}
TINY = {
    "gpt_nano 2 x 16, 4 x 16 tokens": (
        *("model=gpt_nano", "model.n_layer=2", "model.n_head=2", "model.n_embd=16"),
        *("data=random_tokens", "data.block_size=16", "batch_size=4"),
    )
}
SIZES = {
    ("tiny", "cpu"): TINY,
    ("tiny", "cuda"): TINY,
    ("small", "cpu"): SMALL,
    ("small", "cuda"): SMALL,
    ("gpt2", "cpu"): {"gpt2 (124 M), 4 x 256 tokens": (*LARGE, "data.block_size=256", "batch_size=4")},
    ("gpt2", "cuda"): {"gpt2 (124 M), 8 x 1024 tokens": (*LARGE, "data.block_size=1024", "batch_size=8")},
}
PARTS = ("state", "resume", "diagnosis")
KEPT = (
    *("guard.healthy_after=1", "guard.snapshots=1", "guard.snapshot_every=1000000", "guard.sigma=inf"),
    *("checkpoint=default", "checkpoint.every=1000000", "optimizer.lr=1e-4"),
)
"""A snapshot is healthy one step later, and the only snapshots are the measured ones."""

TARGETS = {
    "snapshot": "recovery/snapshot",
    "checkpoint": "recovery/checkpoint",
    "rollback from memory": "recovery/rollback",
}
OF_GPT2 = ("recovery/snapshot", "recovery/checkpoint")
"""Targets for 124 M parameters."""

PLAIN_STEPS = 3
"""Steps per group of plain steps; a turn takes two groups. The median of all its steps is the unit of the costs."""


class Turn:
    """A run that stops between two steps for each measurement."""

    def __init__(self, folder: Path, overrides: Sequence[str], clock: Clock) -> None:
        self.checkpoints = folder / "checkpoints"
        self.run = Rounds(built(folder, (*overrides, *KEPT)))
        self.job, self._clock = self.run.job, clock
        self.recovery = self.job.rollback

    def step(self) -> float:
        """Returns the seconds of one step, judged at the end."""
        return self._clock.seconds(lambda: (self.run(), self.run.judge()))

    def seconds(self, work: Callable[[], object]) -> float:
        """Returns the seconds of `work`."""
        return self._clock.seconds(work)

    def rollback(self) -> float:
        """Returns the seconds from the start of a step that will be discarded to the batch after the rollback."""
        job = self.job

        def work() -> None:
            self.run.compute()
            self.recovery.roll_back(job.state.step)
            job.data.batches.get(job.state.step)

        taken = self._clock.seconds(work)
        job.saved.checkpoints.wait()
        return taken

    def __call__(self) -> dict[str, float]:
        """Takes one turn: returns the seconds of each quantity, and of a step."""
        job, found = self.job, {}
        steps = [self.step() for _ in range(PLAIN_STEPS)]
        found["snapshot"] = self.seconds(self.job.saved.take_snapshot)
        put_by = job.state.step
        steps.append(self.step())  # the snapshot is healthy now
        found["checkpoint"] = self.seconds(lambda: job.saved.save(None))
        beside = [self.step() for _ in range(2)]
        while not (self.checkpoints / f"step-{put_by + 1:08d}").exists() and len(beside) < 1000:
            beside.append(self.step())
        job.saved.checkpoints.wait()
        assert job.tools.guard.states.target == put_by, f"healthy is {job.tools.guard.states.target}, not {put_by}"
        found["rollback from memory"] = self.rollback()
        assert job.state.step == put_by
        steps += [self.step() for _ in range(PLAIN_STEPS)]
        job.saved.snapshots.retain([])
        found["rollback from disk"] = self.rollback()
        assert job.state.step == put_by
        found["step"] = statistics.median(steps)
        found["steps beside a checkpoint's writing, more"] = sum(beside) - len(beside) * found["step"]
        return found


def stalls(folder: Path, overrides: Sequence[str], clock: Clock, rounds: int) -> list[dict[str, float]]:
    """Returns the turns of one run, without the warm-up turn."""
    turn = Turn(folder, overrides, clock)
    turn.step()
    first = turn.seconds(turn.job.saved.take_snapshot)
    turn()
    found = [turn() for _ in range(rounds)]
    turn.run.close()
    found[0]["first snapshot"] = first
    return found


def resumed(folder: Path, overrides: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds to the first step for new runs, and to the first additional step for resumed ones."""
    command = (
        *TRAIN,
        "--config-dir",
        str(HERE / "conf"),
        *NOTHING_ELSE,
        *overrides,
        *KEPT,
        "log_every=1",
        "report=false",
        "eval_batches=1",
    )
    old = folder / "old"
    saving = ("checkpoint.every=2", "checkpoint.keep=1000")
    to_a_step((*command, f"hydra.run.dir={old}", *saving), folder, old / "events.jsonl", 2)
    for later in sorted((old / "checkpoints").glob("step-*"))[1:]:  # saved before the run was killed
        shutil.rmtree(later)
    metrics, kept = old / "metrics.jsonl", '{"step": 2, "tick": 2}\n'

    def start(number: int) -> float:
        place = folder / f"new-{number}"
        return to_a_step((*command, f"hydra.run.dir={place}"), folder, place / "metrics.jsonl").wall

    def resume(number: int) -> float:
        metrics.write_text(kept)  # removes the lines of the previous resume
        return to_a_step((*command, f"hydra.run.dir={old}", "resume=auto"), folder, metrics, 3).wall

    return in_turns({"start": start, "resume": resume}, rounds, warm_up=0)


def of_state(where: str, overrides: Sequence[str], clock: Clock, rounds: int) -> list[dict[str, Any]]:
    """Measures snapshots, checkpoints and rollbacks, in steps."""
    with tempfile.TemporaryDirectory() as folder, silence():
        turns = stalls(Path(folder), overrides, clock, rounds)
    step = [turn["step"] for turn in turns]
    found = [quantity(where, "a step", step, "s")]
    for what in dict.fromkeys(name for turn in turns for name in turn if name != "step"):
        seconds = [(turn[what], turn["step"]) for turn in turns if what in turn]
        steps = [taken / each for taken, each in seconds]
        found.append(
            quantity(where, what, steps, "steps", TARGETS.get(what, ""), seconds=[taken for taken, _ in seconds])
        )
    return found


def of_resuming(where: str, overrides: Sequence[str], clock: Clock, rounds: int) -> list[dict[str, Any]]:
    """Measures the time to the first step of a resumed process, against a new one."""
    with tempfile.TemporaryDirectory() as folder:
        found = resumed(Path(folder), overrides, rounds)
    more = [after - new for after, new in zip(found["resume"], found["start"], strict=True)]
    return [
        quantity(where, "start to the first step", found["start"], "s"),
        quantity(where, "resume to the first step", found["resume"], "s"),
        quantity(where, "resume, more than a start", more, "s"),
    ]


def of_diagnoses(where: str, overrides: Sequence[str], clock: Clock, rounds: int) -> list[dict[str, Any]]:
    """Measures diagnoses in steps, one run per round."""
    runs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, silence():
            runs.append(diagnoses(Path(folder), overrides, clock))
    return [
        quantity(
            where,
            f"diagnosis, {incident}",
            [run[incident]["seconds"] / run[incident]["step"] for run in runs],
            "steps",
            "recovery/diagnosis",
            runs=[run[incident] for run in runs],
        )
        for incident in AT
    ]


def main() -> None:
    """Measures, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 5)
    parser.add_argument(
        "--size",
        default="small",
        choices=["tiny", "small", "gpt2"],
        help="tiny: only to check that it runs; gpt2: 124 M",
    )
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, separated by commas: {','.join(PARTS)}")
    parser.add_argument("--workload", default="", help="measure only models whose name contains this")
    parser.set_defaults(precision="fp32")
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    clock = Clock(device, asked.clock)
    parts = dict(zip(PARTS, (of_state, of_resuming, of_diagnoses), strict=True))
    print(f"{machine(device)}, {asked.clock} time")
    print(head(*COLUMNS))
    results, budget = [], Budget(asked.budget)
    for name, overrides in SIZES[asked.size, device.type].items():
        for mode in modes(asked.precision, device) if asked.workload in name else ():
            chosen = (*overrides, f"device={device}", f"precision={mode}")
            for part in asked.only.split(","):
                if budget.begins(f"{part}, {name}, {mode}"):
                    results += show(parts[part](f"{name}, {mode}", chosen, clock, asked.rounds))
                    save(asked.json, device, results)
    values = {name: value for name, value in reached(results).items() if asked.size == "gpt2" or name not in OF_GPT2}
    print("\n" + judged(values, device, "recovery/"))
    save(asked.json, device, results, values, budget)


if __name__ == "__main__":
    main()
