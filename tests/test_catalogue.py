"""The pages of the catalogue, written from runs."""

import itertools
import math
import shlex
import shutil
import statistics

import pytest

from docs.catalogue import (
    KINDS,
    STAGES,
    Stage,
    chance,
    command,
    effect,
    factor,
    main,
    of_full_grid,
    rows_of,
    which_knobs,
)
from stabletrain.beside.comparison.intervals import Interval, student
from stabletrain.config.checks import check
from tests.beside.comparison.written import write
from tests.runs import composed

pytestmark = pytest.mark.beside

RATES, SEEDS = (3e-3, 1e-2, 3e-2, 1e-1), (0, 1)
LOSS = {3e-3: 2.2, 1e-2: 2.1, 3e-2: 2.35, 1e-1: 2.64}

HELPS, NOISE, WORSE = "QK-LayerNorm", "z-loss 1e-5", "clipping none"
SHIFT = {"default": 0.0, HELPS: -0.2, NOISE: 0.0, WORSE: 0.1}
"""What a knob does to the loss; all but the defaults have noise as well."""


SETTINGS = ["model=gpt_nano", "model.n_layer=2", "model.n_embd=64", "steps=200", "batch_size=16", "data.block_size=64"]


def made_loss(name, rate, seed):
    noise = 0.0 if name == "default" else (0.004 if RATES.index(rate) % 2 else 0.002) * (1 - 2 * seed)
    return LOSS[rate] + 0.01 * seed + SHIFT[name] + noise


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("catalogue")
    for name in SHIFT:
        for number, (rate, seed) in enumerate(itertools.product(RATES, SEEDS)):
            logit = {HELPS: 20, WORSE: 160}.get(name, 80) * (1 + rate)
            diverged = (name, rate, seed) == (WORSE, 1e-1, 1)
            write(
                folder / "screen" / name.replace(" ", "_") / str(number),
                [*SETTINGS, f"optimizer.lr={rate}", f"seed={seed}"],
                lines=[
                    {"step": 1, "train/ce": 5.5, "monitors/log_z_mean": -4.0, "monitors/headroom_min": 12.0},
                    {"step": 200, "monitors/attn_logit_max": logit, "monitors/log_z_mean": 2.0},
                    {"step": 200, "val/loss": "NaN" if diverged else made_loss(name, rate, seed)},
                ],
                hardware={"name": "cpu", "precision": "bf16", "threads": 1},
                versions={"torch": "2.14.1"},
                final={"seconds": 5.0},
                started="2026-11-28T10:00:00+00:00",
                ended="2026-11-28T10:00:05+00:00",
            )
    return folder


def test_effects_are_paired_by_rate_and_seed_with_the_spread_within_the_rates(runs):
    rows = rows_of(runs, "screen")
    found = effect(rows[HELPS], rows["default"])
    # The differences of the two seeds are -0.2 +- 0.002 or 0.004: deviations of 0.0028 or 0.0057 around their mean.
    spread = math.sqrt(statistics.fmean([0.004**2 / 2, 0.008**2 / 2] * 2))
    assert found.grid.mean == pytest.approx(-0.2)
    assert found.grid.high - found.grid.mean == pytest.approx(2.7764 * spread / math.sqrt(8), rel=1e-3)
    assert found.best.high - found.best.mean == pytest.approx(2.7764 * spread / math.sqrt(2), rel=1e-3)
    assert found.told_apart
    assert not effect(rows[NOISE], rows["default"]).told_apart


def test_a_run_that_diverged_counts_as_its_loss_at_init_and_is_counted(runs):
    row = rows_of(runs, "screen")[WORSE]
    assert (row.diverged, max(row.losses.values())) == (1, 5.5)
    assert row.log_z[1e-1, "2 0"] == 4.0  # the larger one of -4 and 2 without its sign


def test_a_factor_is_the_logarithm_of_the_ratio(runs):
    rows = rows_of(runs, "screen")
    found = factor(rows[HELPS].logit, rows["default"].logit)
    assert (found.mean, found.count) == (pytest.approx(-2), 8)
    assert factor(rows[HELPS].headroom, rows["default"].headroom, bits=True).mean == 0


def test_the_pages_say_what_is_told_apart_and_what_is_not(runs, tmp_path):
    main([str(runs), "--docs", str(tmp_path)])
    page, advice = ((tmp_path / name).read_text() for name in ("catalogue.md", "which_knobs.md"))
    lines = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("| ")}
    assert "**-0.2** (-0.2" in lines[HELPS]
    assert "**" not in lines[NOISE]
    assert f"Not told apart from what they are compared with: {NOISE}." in page
    assert "second stage has not been run" in page
    high, logits, drift, *_ = advice.split("\n## ")[1:]
    assert f"| {HELPS} | `qknorm=layernorm` | -0.2 (" in high
    assert advice.endswith(f"more runs diverged\n\n{WORSE} (1 more).\n")
    assert f"| {HELPS} | `qknorm=layernorm` | -2 (" in logits
    assert f"For the worse: {WORSE} (+1 (" in logits
    assert f"| {WORSE}" not in logits
    assert "No knob of the screen changes this for the better." in drift
    assert (tmp_path / "catalogue.svg").read_bytes().startswith(b"<?xml")


def test_the_full_grid_has_what_is_told_apart_and_what_it_is_compared_with(runs):
    rows = rows_of(runs, "screen")
    assert of_full_grid(rows) == {"default", HELPS, WORSE}
    beside = rows[WORSE]._replace(kind=rows[WORSE].kind._replace(beside=NOISE))
    assert of_full_grid({**rows, WORSE: beside}) == {"default", HELPS, WORSE, NOISE}


@pytest.mark.parametrize(
    ("value", "degrees", "wanted"), [(12.706, 1, 0.05), (2.776, 4, 0.05), (8.61, 4, 0.001), (5.408, 7, 0.001)]
)
def test_the_chance_of_a_difference_is_that_of_students_table(value, degrees, wanted):
    found = Interval(value, value - student(degrees), value + student(degrees), degrees + 1)
    assert chance(found, degrees) == pytest.approx(wanted, rel=2e-3)
    assert chance(found._replace(mean=-value), degrees) == chance(found, degrees)


def test_the_full_grid_has_no_row_that_many_intervals_would_give_by_chance(runs, monkeypatch):
    rows = rows_of(runs, "screen")
    apart = effect(rows[HELPS], rows["default"])
    found = {
        name: apart._replace(chance=0.0125 / each, diverged=0) for name, each in ((HELPS, 2), (NOISE, 1), (WORSE, 1))
    }
    assert all(each.told_apart for each in found.values())
    monkeypatch.setattr("docs.catalogue.effects_of", lambda _: found)  # three knobs have six intervals
    assert of_full_grid(rows) == {"default", HELPS}
    found[NOISE] = found[NOISE]._replace(diverged=1)
    assert of_full_grid(rows) == {"default", HELPS, NOISE}


def test_the_page_says_what_the_full_grid_still_lacks_and_shows_it_once_complete(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(STAGES, "full", Stage("", 8))
    drawn = []
    monkeypatch.setattr("docs.catalogue.draw", lambda rows, file: drawn.append({*rows}))
    shutil.copytree(runs / "screen", tmp_path / "screen")
    pages = []
    for names in (["default"], [HELPS, WORSE]):
        for name in names:
            folder = name.replace(" ", "_")
            shutil.copytree(runs / "screen" / folder, tmp_path / "full" / folder)
        main([str(tmp_path), "--docs", str(tmp_path)])
        pages.append((tmp_path / "catalogue.md").read_text().partition("## The full grid"))
    (screen, _, full), (later_screen, _, complete) = pages
    assert f"\n\nNot run yet: {HELPS}, {WORSE}.\n\n" in full
    assert "Not run yet" not in complete
    assert ["catalogue.svg" in part for part in (screen, full, later_screen, complete)] == [True, False, False, True]
    assert drawn == [{*SHIFT}, {"default", HELPS, WORSE}]


def test_runs_that_are_not_over_are_no_row(runs, tmp_path):
    write(tmp_path / "screen" / "default" / "0", status="running")
    with pytest.raises(SystemExit, match="no complete runs of the defaults; fix: python docs/catalogue.py --run"):
        main([str(tmp_path), "--docs", str(tmp_path)])
    assert not [*tmp_path.glob("*.md")]


def test_the_advice_names_the_costs(runs, tmp_path):
    (runs / "cost.json").write_text(f'{{"rows": {{"{HELPS}": {{"time": 1.25, "memory": 1.5}}}}}}')
    try:
        assert f"| {HELPS} | `qknorm=layernorm` | -2 (-2 to -2) | time x 1.25 |" in "\n".join(which_knobs(runs))
    finally:
        (runs / "cost.json").unlink()


def test_each_knob_is_compared_with_a_row_and_has_its_own_name_and_settings():
    names = [kind.name for kind in KINDS]
    assert len({*names}) == len(KINDS) == len({kind.settings for kind in KINDS})
    assert names[0] == "default"
    assert {kind.beside for kind in KINDS} <= {*names}


@pytest.mark.slow(unless=lambda kind: kind.name == HELPS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_knob_is_a_run_of_the_experiment(kind, tmp_path):
    words = command(kind, "screen", tmp_path)
    assert words[:3] == ["train.py", "-m", "experiment=catalogue"]
    with composed("experiment=catalogue", *shlex.split(kind.settings)) as cfg:
        check(cfg)
        settings = cfg.seed, cfg.optimizer.lr, cfg.model.n_layer
    assert settings == (0, 3e-3, 2)


def test_a_stage_has_as_many_runs_as_its_grid():
    for stage in STAGES.values():
        assert math.prod(word.count(",") + 1 for word in stage.settings.split()) == stage.runs
