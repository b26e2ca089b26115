"""Tests of the proof of the forecast, `tests/reliability/foresight/`."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stabletrain.beside.forecast.model import FILE
from stabletrain.data.text import Stdlib
from tests.reliability.foresight.act import FILE as FILE_OF_ACTS
from tests.reliability.foresight.act import read_acts
from tests.reliability.foresight.cases import FAMILIES, FITTED, HELD_OUT, all_cases, ordered
from tests.reliability.foresight.creep import Creep
from tests.reliability.foresight.events import Run, break_of, crossings, runs_of
from tests.reliability.foresight.fit import as_json, fit, logistic
from tests.reliability.foresight.looks import Watched, watch, watched
from tests.reliability.foresight.record import Recording, record
from tests.reliability.foresight.results import results
from tests.reliability.foresight.score import false_alarms, judge, summary, threshold_at
from tests.reliability.foresight.shift import ShiftedText
from tests.reliability.foresight.store import COMMITTED, load, pack, read, shortened, write
from tests.reliability.foresight.tables import fitting_runs
from tests.runs import ROOT

NAMES = ["grad/norm", "lr", "monitors/attn_logit_max/blocks.0", "precision/loss_scale", "train/loss"]


def recording(case: str, losses: np.ndarray, logits: np.ndarray, applied: np.ndarray | None = None) -> Recording:
    """Returns a recording with a look every 25 steps."""
    steps = np.arange(1, len(losses) + 1, dtype=np.int32)
    looks = steps[24::25]
    ones = np.ones(len(losses))
    stepwise = np.stack([losses, ones, ones if applied is None else applied], axis=1).astype(np.float32)
    rows = [[1.0, 1e-2, logit, 1.0, 0.0] for logit in logits[: len(looks)]]
    return {
        "case": case,
        "final": 1.0,
        "status": "finished",
        "reason": "",
        "steps": steps,
        "looks": looks,
        "names": NAMES,
        "stepwise": stepwise,
        "signals": np.array(rows, np.float32),
    }


def growing(case: str, steps: int = 1000, doubling: float = 50.0) -> Recording:
    """Returns a run whose attention logits double every `doubling` steps from 10."""
    logits = 10 * 2 ** (np.arange(25, steps + 1, 25) / doubling)
    return recording(case, np.linspace(4, 2, steps), logits)


def quiet(case: str, steps: int = 1000) -> Recording:
    """Returns a run in which nothing changes."""
    return recording(case, np.linspace(4, 2, steps), np.full(steps // 25, 10.0))


def without_heights(run: Run) -> Watched:
    """Returns a run without heights."""
    return Watched(run, tuple(int(step) for step in run.recording["looks"]), (), {})


def test_a_campaign_has_the_runs_of_its_protocol() -> None:
    cases = all_cases()
    clean = [case for case in cases if case.family == "clean"]
    assert len({case.name for case in cases}) == len(cases) >= 240
    assert sum(case.steps for case in clean) >= 100_000
    assert {case.family for case in cases} == {*FITTED, *HELD_OUT, "hot", "clean", "tame", "sudden"}
    assert all(
        sum(case.fixed for case in cases if case.family == family) == runs for family, (_, runs, _) in FAMILIES.items()
    )
    whole = [case for case in cases if not case.slower]
    assert sum(case.fixed or case.family == "hot" for case in whole) >= len(whole) / 3, "hard negatives"
    names = {case.name for case in cases}
    assert all(case.name.removesuffix("/slower") in names for case in cases)
    assert [case.overrides for case in all_cases()] == [case.overrides for case in cases], "drawn alike every time"


def test_breaks() -> None:
    falling = np.linspace(4, 2, 400)
    flat = np.full(30, 10.0)
    assert break_of(recording("a/00", falling, flat), 400) is None
    bad = falling.copy()
    bad[200] = math.nan
    assert break_of(recording("a/00", bad, flat), 400) == 201
    applied = np.ones(400)
    applied[[100, 102, 104, 106, 108]] = 0
    assert break_of(recording("a/00", falling, flat, applied), 400) is None, "never five in a row"
    applied[100:105] = 0
    assert break_of(recording("a/00", falling, flat, applied), 400) == 101
    high = falling.copy()
    high[250:] = 8.0  # half of what was learnt is far below
    found = break_of(recording("a/00", high, flat), 400)
    assert found is not None
    assert 251 <= found <= 270
    assert break_of(recording("a/00", falling[:300], flat), 400) == 300, "it ended early"


def test_a_run_ends_worse_than_its_partner() -> None:
    flat = np.full(30, 10.0)
    for last, worse in ((2.0, False), (2.08, False), (2.2, True)):
        runs = [
            recording("a/00", np.linspace(4, last, 400), flat),
            recording("a/00/fixed", np.linspace(4, 2.0, 400), flat),
        ]
        found = {run.name: run for run in runs_of(runs, {"a/00": 400, "a/00/fixed": 400})}
        assert found["a/00"].worse is worse
        assert not found["a/00/fixed"].worse


def test_a_run_at_a_third_of_the_learning_rate_is_a_partner_and_no_run_of_its_own() -> None:
    flat = np.full(30, 10.0)
    ends = {"a/00": 2.2, "a/00/fixed": 2.2, "a/00/fixed/slower": 2.0, "b/00": 2.2, "b/00/slower": 2.15}
    made = [recording(name, np.linspace(4, last, 400), flat) for name, last in ends.items()]
    worse = {run.name: run.worse for run in runs_of(made, dict.fromkeys(ends, 400))}
    assert worse == {"a/00": True, "a/00/fixed": True, "b/00": False}


def test_the_time_of_a_crossing_is_foretold() -> None:
    run = Run(growing("a/00"), 1000, None, False)
    crossed = crossings(run)[("attention_logits", "blocks.0")]
    assert crossed == 500, "10 * 2 ** (t / 50) >= 1e4 at the look after 498.3"
    each = watched(run)
    for step, heights in zip(each.steps, each.heights, strict=True):
        if 275 <= step < crossed:
            assert heights.crossings["attention_logits", "blocks.0"] == pytest.approx(498.3, abs=1)


def test_false_alarms_within_a_horizon_are_one() -> None:
    steps = range(25, 1501, 25)
    always = np.ones(60, bool)
    assert false_alarms(steps, always) == 3
    assert false_alarms(steps, ~always) == 0
    one = ~always
    one[[0, 19]] = True
    assert false_alarms(steps, one) == 1, "steps 25 and 500"
    one[21] = True
    assert false_alarms(steps, one) == 2, "and step 550"


def test_a_threshold_gives_the_rate_of_false_alarms() -> None:
    runs = [without_heights(Run(quiet(f"a/{n:02d}"), 1000, None, False)) for n in range(20)]
    draw = np.random.default_rng(0)
    scores = {each.run.name: draw.random(len(each.steps)) for each in runs}
    for rate in (0.1, 0.5, 1.0):
        threshold = threshold_at(rate, runs, scores)
        found = summary([judge(each, scores[each.run.name], threshold) for each in runs])
        assert found["false_alarms"] <= rate < found["false_alarms"] + 0.06, "one more would be too many"


def test_hits_come_20_to_500_steps_before_a_break() -> None:
    run = without_heights(Run(quiet("a/00"), 1000, 900, False))
    for step, hit, lead in ((375, False, math.nan), (400, True, 500), (875, True, 25), (900, False, math.nan)):
        scores = np.array([float(each == step) for each in run.steps])
        found = judge(run, scores, 0.5)
        assert found.hit is hit
        assert found.lead == pytest.approx(lead, nan_ok=True)


def test_weights_are_not_negative_and_follow_the_labels() -> None:
    draw = np.random.default_rng(0)
    values = draw.random((4000, 3))
    chance = 1 / (1 + np.exp(-(-2 + 5 * values[:, 0] - 5 * values[:, 1])))
    labels = (draw.random(4000) < chance).astype(float)
    bias, *weights = logistic(values, labels, np.ones(4000))
    assert weights[0] > 2
    assert weights[1] == weights[2] == 0 or weights[1] == 0
    assert bias < 0


def test_a_fit_tells_growing_logits_from_steady_ones() -> None:
    runs = [growing(f"a/{n:02d}", doubling=45.0 + n) for n in range(3)] + [quiet(f"b/{n:02d}") for n in range(3)]
    found = [Run(one, 1000, None, one["case"].startswith("a")) for one in runs]
    own = [watched(run) for run in found]
    model = fit(own)
    verdicts = [judge(each, np.array([o.probability for o in each.outlooks(model)]), model.alarm) for each in own]
    assert summary(verdicts)["recall_worse"] == 1.0
    assert summary(verdicts)["false_alarms"] == 0.0


def test_recordings_survive_packing(tmp_path: Path) -> None:
    first, second = growing("a/00"), quiet("a/01")
    first["stepwise"][3, 0] = math.inf
    for one in (first, second):
        write(tmp_path / "made", one)
    pack(read(tmp_path / "made"), tmp_path / "packed")
    back = {one["case"]: one for one in read(tmp_path / "packed")}
    for one in (first, second):
        assert back[one["case"]]["names"] == one["names"]
        assert np.array_equal(back[one["case"]]["steps"], one["steps"])
        for name in ("stepwise", "signals"):
            assert np.allclose(back[one["case"]][name], one[name], rtol=1 / 4096)
    assert load(tmp_path / "made" / "a_00.npz")["stepwise"][3, 0] == math.inf


def test_rounding_keeps_what_is_not_finite() -> None:
    values = np.array([math.inf, -math.inf, math.nan, 0.0, 1 / 3, -1e30, 3.4e38], np.float32)
    short = shortened(values)
    assert np.array_equal(short[:4], values[:4], equal_nan=True)
    assert np.allclose(short[4:], values[4:], rtol=1 / 4096)


def test_creep_grows_in_every_step() -> None:
    creep = Creep(0.005)
    assert creep.factor(0.0) == 1.0
    assert creep.factor(1 / 1200) == pytest.approx(1.005)


def test_shifted_text_changes_slowly_to_other_bytes() -> None:
    data, plain = ShiftedText(start=10, length=100, block_size=16), Stdlib(block_size=16)
    assert data.batch(9, 8, "train").inputs.equal(plain.batch(9, 8, "train").inputs)
    assert data.batch(500, 8, "val").inputs.equal(plain.batch(500, 8, "val").inputs)
    late, before = data.batch(500, 8, "train"), plain.batch(500, 8, "train")
    assert late.inputs.equal((before.inputs + 128) % 256)
    assert late.targets.equal((before.targets + 128) % 256)
    changed = [
        int((data.batch(step, 32, "train").inputs != plain.batch(step, 32, "train").inputs).any(dim=1).sum())
        for step in (30, 60, 100)
    ]
    assert 0 < changed[0] < changed[1] < changed[2] < 32


@pytest.mark.slow
def test_a_case_is_recorded() -> None:
    case = next(case for case in all_cases() if case.name == "attention/00")
    short = ordered((*case.overrides, "steps=50", "warmup.steps=20", "eval_batches=1"))
    found = record(replace(case, overrides=short))
    assert found["status"] == "finished"
    assert [*found["looks"]] == [1, 25, 50]
    assert [*found["steps"]] == [*range(1, 51)]
    logits = [name for name in found["names"] if name.startswith("monitors/attn_logit_max/")]
    assert len(logits) == 4
    assert np.isfinite(found["stepwise"]).all()


def test_every_result_of_acting_is_read() -> None:
    acted = read_acts()
    assert len(acted) == len(FILE_OF_ACTS.read_text().splitlines()) == len({one["case"] for one in acted}) > 0
    assert all("broke" in one["nothing"] for one in acted)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_model_and_the_page_come_from_the_committed_recordings() -> None:
    runs = watch(read(COMMITTED))
    wanted = (*FITTED, "hot", "tame")
    fitted = [one for one in runs if one.run.recording["case"].partition("/")[0] in wanted]
    assert as_json(fit(*fitting_runs(fitted))) == FILE.read_text()
    page = (ROOT / "docs" / "evidence" / "foresight.md").read_text()
    for part in results(runs).split("\n\n"):
        assert part.strip() in page, "put what `score` prints into docs/evidence/foresight.md"
