"""Keeps the rest of a held step: decides which samples are left out of its second try, and reports what became of it.

`policy/kept.py` says when this may be done, and counts it; `guilty.py` searches.
"""

from stabletrain.forensics.incident import add_to_report
from stabletrain.guard.guilty import Counts, Sample, Search, all_samples, can_run
from stabletrain.guard.policy.kept import MOST
from stabletrain.guard.read_step import ReadStep
from stabletrain.printable import is_round
from stabletrain.records import Verdict


def keep_the_rest(step: ReadStep, verdict: Verdict) -> Verdict:
    """Returns KEEP if the held step can be taken again without its guilty samples, which `step.left_out` then holds.

    It can if these are found and are at most half of the step's samples. All ranks must call it.
    """
    guard, counts = step.guard, step.sample_counts()
    samples = sum(map(sum, counts))
    guilty = guilty_samples(step, counts)
    rest = set(all_samples(counts)).difference(guilty)
    if not guilty or len(guilty) > MOST * samples or not can_run(counts, rest):
        return verdict
    guard.take_without(step.reading.step, len(guilty), samples)
    step.left_out = guilty
    return Verdict.KEEP


def guilty_samples(step: ReadStep, counts: Counts) -> list[Sample]:
    """Returns the samples of a held step that are at fault, over all ranks; none if they cannot be named."""
    guard, samples = step.guard, all_samples(counts)
    if guard.kind == "bad_data":  # their values show it
        bad = step.parallel.gather_samples(*step.bad_samples(most=None))
        whole = any(each["index"] is None for each in bad)
        return [] if whole else [samples[each["index"]] for each in bad]
    # Each run of the step costs as much as a step, so only the first of several held steps in a row is searched.
    return Search(counts, step.is_sound_without).find() if guard.consecutive == 1 else []


def report_kept(step: ReadStep) -> None:
    """Reports that a step was applied without some samples, also on the page of its incident."""
    guard, tracker, reading = step.guard, step.tracker, step.reading
    samples = f"{guard.left_out} of its samples"
    fields = {"left_out": guard.left_out, "loss": reading.loss, "grad_norm": reading.grad_norm}
    tracker.event("kept", step.number, tick=step.tick, **fields)
    if is_round(guard.kept_steps):
        tracker.note(f"step {step.number}: {guard.reason}; applied without {samples} (number {guard.kept_steps})")
    page, step.guard.unfinished = step.guard.unfinished, None
    if page is not None and step.parallel.ranks.is_main:
        add_to_report(page, f"The rest of the step was applied, without {samples}: loss {reading.loss:.6g}.")
