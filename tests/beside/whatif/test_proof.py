"""Tests of the proof of the what-if, `tests/reliability/whatif/`."""

import json
from pathlib import Path

import pytest

from stabletrain.config.checks import check
from stabletrain.config.make import Choice
from tests.reliability.whatif.__main__ import CASES, CLEAN, COMMITTED
from tests.reliability.whatif.cases import FAMILIES, LOWER_RATE, Case, Drawn, all_cases, clean_cases, drawn
from tests.reliability.whatif.record import is_right, last_of_each, record
from tests.reliability.whatif.runs import pack, read
from tests.reliability.whatif.score import (
    beats_the_right_ones,
    distance,
    gap,
    healthy,
    noise,
    ranks,
    results,
    right,
    totals,
)
from tests.runs import ROOT, TINY_GPT, composed


def run(val: float | None = 2.0, status: str = "finished", diverged: bool = False, **more: object) -> dict[str, object]:
    """A run as it is recorded."""
    return {"status": status, "val": val, "diverged": diverged, "halts": [], "heals": [], "reason": "", **more}


def arm(mean: float, low: float, high: float, tier: int = 0) -> dict[str, object]:
    """How an arm ended with the other seed."""
    return {"tier": tier, "why": "", "val": 2.0, "difference": [mean, low, high]}


def recording(winner: str = "lr_half", **arms: dict[str, object]) -> dict[str, object]:
    """A case that halts, whose what-if has chosen a winner."""
    heal = {"event": "heal", "arm": winner, "steps": 1000, "to": 50}
    again = {"winner": winner, "second": "skip", "right": ["lr_half", "lr_fifth"], "random": "clip", "arms": arms}
    places = [("lr_half", ["optimizer.lr=1"], 0.0), ("skip", [], 0.1), ("clip", ["clipping.max_norm=0.3"], 0.2)]
    told = [{"arm": a, "overrides": o, "behind": {"low": low}, "held": True} for a, o, low in places]
    return {
        "case": "rate/0",
        "halted": run(None, "halted", halts=[9]),
        "healed": run(2.1, heals=[heal], halts=[9], wall=3.0),
        "grid": [
            {"fix": "a", **run(2.0)},
            {"fix": "b", **run(1.0, diverged=True)},
            {"fix": "c", **run(None, "halted")},
        ],
        "ranking": {"winner": winner, "tied": [winner], "arms": told},
        "again": again,
    }


def test_cases_are_drawn_alike_every_time_and_each_names_its_fixes() -> None:
    cases = all_cases()
    assert [case.family for case in cases[: len(FAMILIES)]] == [*FAMILIES], "each beginning has all families"
    assert len({case.name for case in cases}) == len(cases)
    assert [case.overrides for case in cases] == [case.overrides for case in all_cases()]
    assert all(case.drawn.right and case.drawn.grid for case in cases)
    assert len(clean_cases()) == 100
    assert sum("resnet" in case.family for case in cases) >= len(cases) / 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_case_can_still_be_built(family) -> None:
    with composed(*last_of_each(drawn(family, 0).overrides)) as cfg:
        check(cfg)
        assert Choice.of(cfg, "schedule").build().factor(0.5) > 0


def test_an_arm_is_right_if_it_is_named_or_lowers_the_rate() -> None:
    case = drawn("rate", 0)
    lr = float(next(each for each in case.overrides if each.startswith("optimizer.lr")).partition("=")[2])
    assert is_right("lr_half", (), case)
    assert is_right("optimizer.lr", (f"optimizer.lr={lr / 3}",), case)
    assert not is_right("optimizer.lr", (f"optimizer.lr={lr * 3}",), case)
    assert not is_right("skip", (), case)
    assert not is_right("lr_usual", ("optimizer.lr=0.003",), drawn("bad_data", 0)), "no lower rate mends data"
    assert is_right("bf16", ("precision=bf16",), drawn("overflow", 0))


def test_the_last_of_each_override_counts_and_the_keys_of_another_option_do_not() -> None:
    assert last_of_each(["a.b=1", "a=x", "a.b=2"]) == ["a=x", "a.b=2"]
    fp16 = ["precision=fp16", "precision.init_scale=4", "optimizer.lr=1"]
    assert last_of_each(fp16) == ["precision=fp16", "precision.init_scale=4", "optimizer.lr=1"]
    assert last_of_each([*fp16, "precision=bf16"]) == ["precision=bf16", "optimizer.lr=1"]
    assert last_of_each(["faults=poison", "faults.at=[1]", "seed=0", "faults=none"]) == ["faults=none", "seed=0"]


def test_a_distance_is_to_the_best_fix_from_step_0_that_ends_healthy() -> None:
    found = recording(lr_half=arm(0, 0, 0))
    assert distance(found) == pytest.approx(0.05)
    assert not healthy(found["grid"][1])  # type: ignore[index]
    assert "| end healthy with `guard.escalate=whatif` | 1 of 1 (100 %) |" in totals([found])
    found["healed"] = run(1.0, diverged=True, wall=3.0)
    assert "| 0 of 1 (0 %) |" in totals([found])


def test_a_first_rank_counts_if_it_is_known_or_better_beyond_the_interval() -> None:
    found = recording(lr_half=arm(0, 0, 0), skip=arm(0.3, 0.2, 0.4), clip=arm(0.1, 0.1, 0.1, tier=2))
    assert right("lr_half", found)
    assert gap("skip", found) == pytest.approx(0.3)
    assert "known to be right in 1 of 1" in ranks([found])
    other = recording("skip", skip=arm(0, 0, 0), lr_half=arm(0.3, 0.2, 0.4), clip=arm(0, 0, 0, tier=2))
    assert not right("skip", other)
    assert beats_the_right_ones(other)
    other["again"]["arms"]["lr_half"] = arm(0.3, -0.1, 0.7)  # type: ignore[index]
    assert not beats_the_right_ones(other), "within the interval"
    other["again"]["arms"]["skip"]["tier"] = 1  # type: ignore[index]
    assert not beats_the_right_ones(other), "it did not hold"


def test_a_lead_holds_if_the_winner_is_ahead_with_a_seed_that_did_not_choose_it() -> None:
    ahead = recording(lr_half=arm(0, 0, 0), skip=arm(0.3, 0.2, 0.4))
    behind = recording(lr_half=arm(0, 0, 0), skip=arm(-0.3, -0.4, -0.2))
    tied = recording(lr_half=arm(0, 0, 0, tier=1), skip=arm(-0.3, -0.4, -0.2))
    tied["ranking"]["tied"] = ["lr_half", "skip"]  # type: ignore[index]
    told = noise([ahead, behind, tied])
    assert "ahead of it in 1 of 3 (33 %); where" in told
    assert "had told them apart, in 1 of 2 (50 %)" in told
    assert "In 1 of the 3 the winner did not hold" in told


def test_the_page_has_the_results_of_the_committed_recordings() -> None:
    page = (ROOT / "docs" / "evidence" / "whatif.md").read_text()
    cases, clean = read(COMMITTED / CASES), read(COMMITTED / CLEAN)
    assert len(clean) == len(clean_cases())
    assert {each["case"] for each in cases} <= {case.name for case in all_cases()}
    for part in results(cases, clean).split("\n\n"):
        assert part.strip() in page, "put what `score` prints into docs/evidence/whatif.md"


def test_recordings_survive_packing(tmp_path: Path) -> None:
    made = [recording(lr_half=arm(0, 0, 0)) | {"case": f"rate/{number}"} for number in (1, 0)]
    (tmp_path / CASES).write_text("".join(json.dumps(each) + "\n" for each in made))
    pack(tmp_path / CASES, tmp_path / "packed")
    assert [file.name for file in (tmp_path / "packed").iterdir()] == ["cases.jsonl.xz"]
    assert read(tmp_path / "packed" / CASES) == made[::-1]
    assert read(tmp_path / "packed" / CLEAN) == []


@pytest.mark.slow
def test_a_case_is_recorded(few_arms, monkeypatch) -> None:
    monkeypatch.setattr("tests.reliability.whatif.record.plan", few_arms)
    halts = [*TINY_GPT, "steps=60", "precision=fp32", "optimizer.lr=3", "schedule=constant", "guard.whatif_steps=600"]
    halts += ["guard.max_rollbacks=0", "guard.patience=4", "checkpoint.every=40"]
    found = record(Case("rate/0", Drawn((*halts,), LOWER_RATE, (("optimizer.lr=0.01",),))))
    assert found["halted"]["halts"]
    assert healthy(found["healed"])
    again = found["again"]
    assert again["arms"][again["winner"]]["difference"]
    assert len(again["arms"]) > 1
    assert all(arm["difference"] or "broke at step" in arm["why"] for arm in again["arms"].values())
    assert len(found["grid"]) >= 4
