"""The tables of docs/evidence/whatif.md, from the recordings."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from stabletrain.beside.whatif.budget import FROM_0
from tests.reliability.whatif.cases import FAMILIES, drawn
from tests.reliability.whatif.record import is_right

NEAR = (0.02, 0.1)
"""Distances to the best of the grid that are counted, as shares of its validation loss."""

Recording = dict[str, Any]


def results(cases: Sequence[Recording], clean: Sequence[Recording]) -> str:
    """Returns all tables as Markdown."""
    troubled = [each for each in cases if "healed" in each]
    parts = [saved_table(cases), totals(troubled), ranks(troubled), wrong(troubled), noise(troubled)]
    parts += [losses(troubled), far_from_best(troubled), of_clean(clean)]
    return "\n\n".join(part for part in parts if part)


def healthy(run: Recording) -> bool:
    """Whether a run ends healthy: finished, with at least half of what it had learnt at its best."""
    return run["status"] == "finished" and not run["diverged"] and run.get("val") is not None


def best_of_grid(found: Recording) -> float:
    """Returns the lowest validation loss of the fixes from step 0; infinity if none of them ends healthy."""
    return min((each["val"] for each in found["grid"] if healthy(each)), default=math.inf)


def distance(found: Recording) -> float:
    """Returns how far a healed run's validation loss is above the best of the grid, as a share of that."""
    return distance_of(found["healed"], found)


def distance_of(run: Recording, found: Recording) -> float:
    """Returns how far the validation loss of any healthy run of a case is above the best of its grid."""
    best = best_of_grid(found)
    return run["val"] / best - 1 if math.isfinite(best) else -math.inf


def restarted(found: Recording) -> Recording | None:
    """Returns the run from step 0 with the usual learning rate, which is that of the model's experiment."""
    usual = "optimizer.lr=0.1" if "resnet" in found["case"] else "optimizer.lr=0.003"
    return next((run for run in found["grid"] if run["fix"] == usual), None)


def spent(found: Recording) -> int:
    """Returns the steps that its arms have taken."""
    return sum(each["steps"] for each in found["healed"]["heals"])


def percent(value: float) -> str:
    """Formats a share."""
    return "better" if value == -math.inf else f"{100 * value:+.1f} %"


def share(count: int, of: int) -> str:
    """Formats a count of a total."""
    return f"{count} of {of} ({100 * count / of:.0f} %)" if of else "0 of 0"


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    rows = [[*map(str, line)] for line in (head, ["---"] * len(head), *lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def saved_table(cases: Sequence[Recording]) -> str:
    """Returns, for each cause, how many configurations fail, and how many of them the what-if saves."""
    lines = []
    for family in FAMILIES:
        all_of = [each for each in cases if each["case"].partition("/")[0] == family]
        failed = [each for each in all_of if "healed" in each]
        saved = [each for each in failed if healthy(each["healed"])]
        steps = [spent(each) for each in failed if each["healed"]["heals"]]
        lines.append(
            (
                family,
                len(all_of),
                sum(bool(each["halted"]["halts"]) for each in failed),
                sum(not each["halted"]["halts"] for each in failed),
                len(saved),
                percent(median(map(distance, saved))) if saved else "-",
                f"{median(steps):,.0f}" if steps else "-",
            )
        )
    head = (
        "cause",
        "drawn",
        "halt",
        "diverge",
        "saved",
        "loss above the best of the grid, median",
        "steps of arms, median",
    )
    return table(head, lines)


def totals(troubled: Sequence[Recording]) -> str:
    """Returns the sums over all causes."""
    saved = [each for each in troubled if healthy(each["healed"])]
    far = sorted(map(distance, saved))
    heals = [heal for each in troubled for heal in each["healed"]["heals"]]
    tried = [each for each in troubled if each["healed"]["heals"]]
    steps, seconds = [spent(each) for each in tried], [each["healed"]["wall"] for each in tried]
    usual = [distance_of(run, each) for each in troubled if (run := restarted(each)) and healthy(run)]
    lines = [
        ("configurations that halt or diverge", len(troubled)),
        ("end healthy with `guard.escalate=whatif`", share(len(saved), len(troubled))),
        (
            "end healthy from step 0 with the usual learning rate, without a what-if",
            share(sum(healthy(run) for run in map(restarted, troubled) if run), len(troubled)),
        ),
        ("validation loss above the best of the grid, median of those saved", percent(median(far)) if far else "-"),
        *(
            (
                f"saved, and at most {100 * bound:.0f} % above it; with the usual rate",
                f"{share(sum(each <= bound for each in far), len(troubled))}; "
                f"{share(sum(each <= bound for each in usual), len(troubled))}",
            )
            for bound in NEAR
        ),
        ("halts for which fixes were tried", len(heals)),
        ("of these, the best arm won from step 0", sum(heal.get("arm", "").startswith(FROM_0) for heal in heals)),
        (
            "of these, another arm won, and the state before the trouble was that of step 0",
            sum(heal["to"] == 0 and heal["event"] == "heal" and FROM_0 not in heal["arm"] for heal in heals),
        ),
        ("of these, no fix held or none was left", sum(heal["event"] == "unhealed" for heal in heals)),
        ("steps of arms in a run that tried fixes, median", f"{median(steps):,.0f}" if steps else "-"),
        ("seconds of such a run on one core, median", f"{median(seconds):.0f}" if seconds else "-"),
    ]
    return table(("", ""), lines)


def policies(found: Recording) -> dict[str, str]:
    """Returns the arm that each way to choose one takes."""
    again = found["again"]
    return {
        "first rank": again["winner"],
        "always `lr_half`": "lr_half",
        "always `lr_usual`": "lr_usual",
        "always `skip`": "skip",
        "a random arm": again["random"],
    }


def right(name: str, found: Recording) -> bool:
    """Whether an arm is known to be right for the cause of a case."""
    overrides = {each["arm"].removeprefix(f"{FROM_0}:"): each["overrides"] for each in found["ranking"]["arms"]}
    case = drawn(*split(found["case"]))
    return name in found["again"]["right"] or is_right(name, overrides.get(name, ()), case)


def split(name: str) -> tuple[str, int]:
    """Returns family and number of a case."""
    family, _, number = name.partition("/")
    return family, int(number)


def gap(name: str, found: Recording) -> float:
    """Returns by how much an arm's loss is above the lowest of the arms that held with the other seed."""
    arms = found["again"]["arms"]
    held = {each: arm["difference"][0] for each, arm in arms.items() if arm["difference"] and arm["tier"] == 0}
    return held[name] - min(held.values()) if name in held else math.inf


def beats_the_right_ones(found: Recording) -> bool:
    """Whether the winner held, and beat each right arm that was run with the other seed, beyond the intervals."""
    arms, winner = found["again"]["arms"], found["again"]["winner"]
    others = [arm for name, arm in arms.items() if name != winner and right(name, found)]

    def worse(arm: Recording) -> bool:
        return arm["tier"] > 0 or (arm["difference"] is not None and arm["difference"][1] > 0)

    return bool(others) and arms[winner]["tier"] == 0 and all(map(worse, others))


def ranks(troubled: Sequence[Recording]) -> str:
    """Returns how good the first rank is, beside simple rules, with a seed that did not choose it."""
    incidents = [each for each in troubled if "again" in each]
    count = len(incidents)
    names = [*policies(incidents[0])] if incidents else []

    def line(name: str) -> tuple[object, ...]:
        arms = [(policies(each)[name], each) for each in incidents]
        ran = [(arm, each) for arm, each in arms if arm in each["again"]["arms"]]
        gaps = [gap(arm, each) for arm, each in ran]
        known = share(sum(right(arm, each) for arm, each in arms), count)
        if len(ran) < count:
            return name, known, "not run in all", "-"
        return (
            name,
            known,
            share(sum(each["again"]["arms"][arm]["tier"] == 0 for arm, each in ran), len(ran)),
            f"{median(gaps):.3f}" if gaps and math.isfinite(median(gaps)) else "did not hold",
        )

    known = [right(each["again"]["winner"], each) for each in incidents]
    better = sum(not is_known and beats_the_right_ones(each) for is_known, each in zip(known, incidents, strict=True))
    text = (
        f"Of {count} halts, the first rank is a fix known to be right in {share(sum(known), count)}, and in {better} "
        "more it held and was better than each right one that was run, beyond the interval."
    )
    head = (
        "way to choose",
        "known to be right",
        "held with another seed",
        "loss above the best that held, median",
    )
    return f"{text}\n\n{table(head, [*map(line, names)])}"


def wrong(troubled: Sequence[Recording]) -> str:
    """Returns the halts whose first rank is not known to be right; empty if there are none."""
    lines = [
        (
            each["case"],
            each["again"]["winner"],
            ", ".join(each["again"]["right"]),
            "yes" if beats_the_right_ones(each) else "no",
        )
        for each in troubled
        if "again" in each and not right(each["again"]["winner"], each)
    ]
    head = ("first rank not known to be right", "arm", "right ones", "better than those, beyond the interval")
    return table(head, lines) if lines else ""


def noise(troubled: Sequence[Recording]) -> str:
    """Returns whether the winner's lead holds with a seed that did not choose it."""
    compared = []
    for each in troubled:
        again = each.get("again")
        if again and again["second"] in again["arms"]:
            told = again["second"] not in each["ranking"]["tied"]
            compared.append((told, again["arms"][again["winner"]], again["arms"][again["second"]]))
    ahead = [is_ahead(winner, second) for _, winner, second in compared]
    sure = [is_ahead(winner, second) for told, winner, second in compared if told]
    relapsed = sum(winner["tier"] > 0 for _, winner, _ in compared)
    return (
        f"In {len(compared)} of these halts an arm that came second was run again as well. With the other seed the "
        f"winner is ahead of it in {share(sum(ahead), len(ahead))}; where the what-if had told them apart, in "
        f"{share(sum(sure), len(sure))}. In {relapsed} of the {len(compared)} the winner did not hold with it."
    )


def is_ahead(winner: Recording, second: Recording) -> bool:
    """Whether the winner has held better than the second arm with the other seed or, if alike, has a lower loss."""
    if winner["tier"] != second["tier"]:
        return bool(winner["tier"] < second["tier"])
    return second["difference"] is not None and second["difference"][0] > 0


def losses(troubled: Sequence[Recording]) -> str:
    """Returns the runs that were not saved, by name."""
    lines = []
    for each in troubled:
        run = each["healed"]
        if not healthy(run):
            arms = ", ".join(heal.get("arm", "") or "none holds" for heal in run["heals"]) or "never halted"
            lines.append((each["case"], run["status"], "diverged" if run["diverged"] else "", arms, run["reason"][:90]))
    return table(("not saved", "ended", "", "arms that it went on with", "why"), lines)


def far_from_best(troubled: Sequence[Recording]) -> str:
    """Returns the runs that were saved, but end further than the larger of `NEAR` above the best of the grid."""
    lines = []
    for each in troubled:
        if healthy(each["healed"]) and distance(each) > NEAR[-1]:
            best = min((run for run in each["grid"] if healthy(run)), key=lambda run: run["val"])
            arms = ", ".join(heal.get("arm", "") for heal in each["healed"]["heals"]) or "never halted"
            lines.append((each["case"], percent(distance(each)), arms, f"`{best['fix']}`"))
    return table(
        ("saved, but far from the best", "loss above it", "arms that it went on with", "best of the grid"), lines
    )


def of_clean(clean: Sequence[Recording]) -> str:
    """Returns how many ordinary runs tried fixes."""
    touched = [each["case"] for each in clean if each["run"]["halts"]]
    finished = sum(each["run"]["status"] == "finished" for each in clean)
    tried = f"{len(touched)} tried a fix {touched or ''}".rstrip()
    return f"Ordinary runs: {len(clean)}, of which {finished} finished and {tried}"
