"""Breaks thirty places that matter, one at a time, and prints which tests notice.

    python -m tests.reliability.breaks --json breaks.json
    python -m tests.reliability.breaks --root ../older --json older.json

A break is a text of one file and what stands there instead.
Each is made in a copy of the checkout (`forked_tests.py`). Then these tests run, and the first that fails ends it:

1. the fast tests of the file's mirror,
2. the other fast tests of the folder around it, and those in `also`,
3. the slow tests of all of these.

So "nothing" says that no test of these notices; a test elsewhere still may. A stage ends after `LIMIT` seconds of CPU
time, and has then noticed nothing. `--root` breaks another checkout, even one without `stabletrain/beside`. A
text that is not found there once is reported. At the end, the tests that noticed a break also run without one: where
one fails, the table says so.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.reliability.forked_tests import (
    FAILED,
    ROOT,
    Chosen,
    changed,
    copied,
    failing_anyway,
    import_libraries,
    mirror,
    run_forked,
)

LIMIT, HANGS = 240, 1200
"""Seconds of a stage: CPU time of the process, and time by the clock."""

MOVED = {
    "beside/comparison": "comparison",
    "beside/whatif": "whatif",
    "beside/forecast": "forecast",
    "beside/export": "weights",
    "beside/faults": "faults",
    "beside/adapters": "adapters",
    "beside/slurm": "cli/slurm",
    "beside/sweep": "cli/sweep",
}
"""Folders of the package and of its tests, and where they were before."""


@dataclass(frozen=True)
class Break:
    """A place that matters.

    Attributes:
        what: what no longer works.
        file: of the package.
        old, new: the text, which is in the file once, and what replaces it.
        also: further tests that should notice.
    """

    what: str
    file: str
    old: str
    new: str
    also: tuple[str, ...] = ()

    @property
    def tests(self) -> tuple[str, str]:
        """The file of tests, and the folder around it; empty for the outermost one."""
        own = mirror(f"stabletrain/{self.file}")
        folder = str(Path(own).parent)
        return own, "" if folder == "tests" else folder


BREAKS = (
    Break(
        "the gate stays open for NaN",
        "guard/policy/skip.py",
        "gate = (torch.stack(excess) <= 0).all()",
        "gate = ~(torch.stack(excess) > 0).any()",
        ("tests/laws/test_skipped.py",),
    ),
    Break(
        "an optimizer without found_inf runs with a closed gate",
        "step.py",
        "    elif gate.item():\n",
        "    else:\n",
        ("tests/laws/test_skipped.py",),
    ),
    Break(
        "first moments are not restored",
        "checkpoint/capture.py",
        "_copy_into(live.get(key), value, _home(",
        '_copy_into(live.get(key), value * 0 if key == "exp_avg" else value, _home(',
        ("tests/laws/test_resume.py",),
    ),
    Break(
        "buffers keep the values of a skipped step",
        "buffers.py",
        "memory = torch.where(gate, torch.cat(self._bytes), saved.memory)",
        "memory = torch.cat(self._bytes)",
        ("tests/laws/test_skipped.py",),
    ),
    Break(
        "gradients are not clipped",
        "stability/clipping/fixed.py",
        "        multiply_(model, factor)\n",
        "",
    ),
    Break(
        "the loss scale is not halved after an overflow",
        "stability/precision/loss_scale.py",
        "(self._scale * 0.5)",
        "(self._scale * 1.0)",
    ),
    Break(
        "the loss scale is forgotten by a resume",
        "stability/precision/loss_scale.py",
        'self._scale = state["scale"].to(self._scale)',
        "self._scale = self._scale.clone()",
        ("tests/laws/test_restored.py",),
    ),
    Break(
        "the checksum of a file is not compared",
        "checkpoint/reader.py",
        'if digest != files[name]["sha256"]:',
        'if not digest or "sha256" not in files[name]:',
    ),
    Break(
        "a snapshot shares the live tensors' memory",
        "checkpoint/snapshots.py",
        "kept(tensor, next(each)), tree)",
        "kept(tensor, tensor), tree)",
    ),
    Break(
        "the newest healthy checkpoint is deleted",
        "checkpoint/folder.py",
        "*healthy[-min(keep, 2) :]",
        "*healthy[: min(keep, 2)]",
    ),
    Break(
        "a file of a checkpoint is not synchronized",
        "checkpoint/writer.py",
        "        os.fsync(file.fileno())\n    return",
        "    return",
    ),
    Break(
        "a rollback reads the batch before the trouble once more",
        "trainer/rollback.py",
        "position(trouble - 1, state.skipped) + 1",
        "position(trouble - 1, state.skipped)",
    ),
    Break(
        "ignored labels count in the mean of a step",
        "step.py",
        "counts = [(batch.targets != IGNORE_INDEX).sum() for batch in batches]",
        "counts = [(batch.targets != IGNORE_INDEX - 1).sum() for batch in batches]",
    ),
    Break(
        "ranks do not agree on bad data",
        "parallel/distributed.py",
        "bad_data=bad.amax(),",
        "bad_data=bad[self.ranks.rank],",
    ),
    Break(
        "a replay has the random numbers of the next step",
        "forensics/replay.py",
        'tools, repro.step, variant == "fp32")',
        'tools, repro.step + 1, variant == "fp32")',
    ),
    Break(
        "the last operation is blamed instead of the first",
        "forensics/trace/origin.py",
        "return min(reached, key=lambda source: (BLAME_ORDER[source.how], source.record)) if reached",
        "return max(reached, key=lambda source: (BLAME_ORDER[source.how], source.record)) if reached",
    ),
    Break(
        "the last cause that holds is named instead of the first",
        "forensics/diagnosis/diagnose.py",
        "for rule in RULES:",
        "for rule in reversed(RULES):",
    ),
    Break(
        "a state is healthy at once",
        "guard/policy/retained.py",
        "step - taken >= self.healthy_after",
        "step - taken >= 0",
        ("tests/trainer/test_rollback.py",),
    ),
    Break(
        "a rollback takes a state that is not known to be healthy",
        "guard/policy/retained.py",
        "return self.healthy[-1] if self.healthy else None",
        "return self.steps[-1] if self.steps else None",
        ("tests/trainer/test_rollback.py",),
    ),
    Break(
        "rollbacks never end in a halt",
        "guard/policy/rollback.py",
        "if self.rollbacks_without_progress < self.max_rollbacks:",
        "if self.rollbacks_without_progress >= 0:",
        ("tests/trainer/test_rollback.py",),
    ),
    Break(
        "an update that is not finite is not noticed",
        "guard/checks/update_check.py",
        "bad = (gate & ~all_finite(self._state.model, self._state.optimizer, gate.device)).float()",
        "bad = torch.zeros_like(gate).float()",
        ("tests/laws/test_finite_updates.py",),
    ),
    Break(
        "a warmup longer than the run is not refused",
        "stability/schedule.py",
        "if length and length >= self.total:",
        "if length and length >= self.total + 10**9:",
    ),
    Break(
        "a run's page is not written",
        "beside/comparison/pages/at_end.py",
        "            write_run_page(self.folder)\n",
        "            del write_run_page\n",
    ),
    Break(
        "the forecast never says anything",
        "beside/forecast/forecast.py",
        "seen.probability < model.alarm",
        "seen.probability <= 1",
    ),
    Break(
        "the worst arm wins",
        "beside/whatif/ranking.py",
        "order = sorted(found, key=key)",
        "order = sorted(found, key=key, reverse=True)",
    ),
    Break(
        "a sweep runs its finished runs again",
        "beside/sweep/member.py",
        "self.overrides, steps, changed=plan.resumed_by_name())",
        "self.overrides, steps + 1, changed=plan.resumed_by_name())",
        ("tests/cli/test_sweep.py",),
    ),
    Break(
        "exported matrices are not transposed",
        "weights/gpt2.py",
        'found[f"{theirs}{TRANSPOSED[inner]}.{kind}"] = tensor.t().contiguous()',
        'found[f"{theirs}{TRANSPOSED[inner]}.{kind}"] = tensor.contiguous()',
    ),
    Break(
        "an evaluation runs in training mode",
        "trainer/evaluate.py",
        "with evaluating(model):",
        "with torch.no_grad():",
    ),
    Break(
        "NaN is not written as a word",
        "tracking/metrics.py",
        'return "NaN" if math.isnan(value) else "Infinity"',
        'return None if math.isnan(value) else "Infinity"',
    ),
    Break(
        "SIGTERM does not end a run",
        "machine/signals.py",
        "        self.name = signal.Signals(number).name\n",
        "        self.name = self.name or str()\n",
    ),
)


@dataclass
class Noticed:
    """What noticed a break.

    Attributes:
        what: see `Break`.
        by: "fast", "slow", "nothing", or "not made".
        test: the test that failed, or why the break was not made.
        stages: for each stage that ran, how it ended, the number of its tests, and its seconds of CPU time.
    """

    what: str
    by: str
    test: str
    stages: list[tuple[str, int, float]]


def there(root: Path, path: str) -> str:
    """Returns where a path of the package or of the tests is in a checkout: an older one has no `beside`."""
    if not (root / "stabletrain/beside").exists():
        for new, old in MOVED.items():
            path = path.replace(f"{new}/", f"{old}/")
    return path


def stages(root: Path, each: Break) -> Iterator[tuple[str, list[str], str]]:
    """Yields the tests of each stage: its tier, pytest's arguments, and a file to leave out or nothing."""
    own, folder = (there(root, path) for path in each.tests)
    also = [there(root, path) for path in each.also if (root / there(root, path)).exists()]
    has_own = (root / own).exists()
    if has_own:
        yield "fast", [own], ""
    others = [path for path in ([folder] if folder else []) + also if (root / path).exists() and path != own]
    if others:
        yield "fast", others, own if has_own else ""
    yield "slow", ["--slow", *([own] if has_own and not folder else []), *others], ""


def notice(copy: Path, root: Path, each: Break, moment: int) -> Noticed:
    """Makes a break in a copy of a checkout, runs its tests, and restores the file."""
    file = there(root, f"stabletrain/{each.file}")
    text = (root / file).read_text() if (root / file).exists() else ""
    if text.count(each.old) != 1:
        return Noticed(each.what, "not made", f"{file} has its text {text.count(each.old)} times", [])
    ran = []
    with changed(copy, root, {file: text.replace(each.old, each.new)}, moment):
        for tier, arguments, left_out in stages(root, each):
            ignored = [f"--ignore={copy / left_out}"] if left_out else []
            end = run_forked(copy, [*ignored, *arguments], Chosen(), LIMIT, HANGS)
            ran.append((f"{tier}: {end.outcome}", end.tests, end.seconds))
            if end.outcome == FAILED:
                return Noticed(each.what, tier, end.by, ran)
    return Noticed(each.what, "nothing", "", ran)


def table(found: Sequence[Noticed]) -> str:
    """Returns the breaks and what noticed them, as a table in Markdown."""
    rows = [f"| {each.what} | {each.by} | {each.test} |" for each in found]
    counts = ", ".join(f"{by} {sum(each.by == by for each in found)}" for by in ("fast", "slow", "nothing", "not made"))
    return "\n".join(["| break | noticed by | test |", "|---|---|---|", *rows, "", counts])


def main() -> None:
    """Makes the breaks, and prints what noticed them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to break")
    parser.add_argument("--json", type=Path, required=True, help="results; continued if it exists")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of breaks, from 1")
    given = parser.parse_args()
    root = given.root.resolve()
    found = [Noticed(**each) for each in json.loads(given.json.read_text())] if given.json.exists() else []
    known = {each.what for each in found}
    numbers = given.only or range(1, len(BREAKS) + 1)
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="breaks") as folder:
        copy = copied(root, Path(folder) / "copy")
        for number in numbers:
            each = BREAKS[number - 1]
            if each.what not in known:
                found.append(notice(copy, root, each, number))
                print(f"{number} {found[-1]}", flush=True)
                given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
        for tier, options in (("fast", []), ("slow", ["--slow"])):
            tests = [each.test for each in found if each.by == tier]
            for test in failing_anyway(copy, tests, options, LIMIT, HANGS):
                print(f"fails without a break, too: {test}")
    order = {each.what: number for number, each in enumerate(BREAKS)}
    print(table(sorted(found, key=lambda each: order[each.what])))


if __name__ == "__main__":
    main()
