"""The law of pictures: every point that a figure shows was logged, and every line ends at the last logged value.

`FIGURES` has a row for each function of the package that draws a figure, and a new one fails until it has its row.
"""

import ast
import math
import random
import re

import pytest
from matplotlib import pyplot

from stabletrain.beside.comparison import frame_of
from stabletrain.beside.comparison.pages.charts import NAMES
from stabletrain.beside.comparison.pages.comparison import comparison
from stabletrain.beside.comparison.pages.one_run import run_page
from stabletrain.beside.comparison.pages.rendering import WEB
from stabletrain.beside.comparison.pictures import draw, draw_losses
from stabletrain.beside.comparison.reading.runs import read_runs
from stabletrain.beside.comparison.sensitivity import LOGIT, arms
from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.outcome import Outcome
from stabletrain.beside.whatif.page import arm_curves
from stabletrain.beside.whatif.ranking import NO_INTERVAL, RankedArm
from tests.beside.comparison.read_back import assert_curves, assert_points, logged, mean_and_deviation, page_data
from tests.beside.comparison.written import word, write
from tests.runs import ROOT

pytestmark = pytest.mark.beside

STEPS, RATES, SEEDS = 12, (0.01, 0.1), (0, 1, 2)
BROKE = ("bf16", 0.1, 2)
"""The run that ends in NaN."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two precisions at two rates with three seeds. Every metric of every chart is logged; one run broke."""
    folder, numbers = tmp_path_factory.mktemp("pictures") / "sweep", random.Random(0)
    for precision in ("fp32", "bf16"):
        for rate in RATES:
            for seed in SEEDS:
                lost = (precision, rate, seed) == BROKE
                overrides = [f"precision={precision}", f"optimizer.lr={rate}", f"seed={seed}"]
                lines = [line(step, numbers, lost) for step in range(1, STEPS + 1)]
                write(folder / f"{precision}-{rate}-{seed}", overrides, lines=lines)
    return read_runs([folder])


def line(step, numbers, lost):
    """A line of `metrics.jsonl`. Step 5 was skipped, and a lost run has no finite loss from step 9 on."""
    values = {name: numbers.uniform(4.6, 5.0) for name in (*NAMES, "train/ce", LOGIT)}
    if step % 4:
        del values["val/loss"], values["val/accuracy"]
    if lost and step > 8:
        values |= {name: word(math.nan) for name in ("train/loss", "val/loss") if name in values}
    return {"step": step, "guard/applied": int(step != 5), **values}


@pytest.fixture
def axes(monkeypatch, tmp_path):
    """Draws a figure with a function, and returns its axes as lists of label, x and y of each line in data units."""
    drawn, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", drawn.append)

    def draws(function, *arguments, **more):
        function(*arguments, **more)
        return [
            [
                (each.get_label().replace("\n", " "), each.get_xdata().tolist(), each.get_ydata().tolist())
                for each in axis.lines
                if each.get_transform() == axis.transData and len(each.get_xdata())
            ]
            for axis in drawn[-1].axes
        ]

    yield draws
    for figure in drawn:
        close(figure)


def in_groups(runs):
    """The runs by precision and rate, without the one that broke."""
    found = {}
    for run in runs:
        precision, rate, seed = run.name.split("-")
        if (precision, float(rate), int(seed)) != BROKE:
            found.setdefault(f"precision={precision} optimizer.lr={rate}", []).append(run)
    return found


def losses_of_each_run(runs, axes, tmp_path):
    (lines,) = axes(draw_losses, runs, tmp_path / "a.svg", each=True)
    assert len(lines) == len(runs)
    for run, (_, x, y) in zip(runs, lines, strict=True):
        assert_points(x, y, logged(run.folder, "train/loss"), run.name)


def losses_by_setting(runs, axes, tmp_path):
    (lines,) = axes(draw_losses, runs, tmp_path / "a.svg")
    found = {label.partition(" (n=")[0]: (x, y) for label, x, y in lines}
    for name, members in in_groups(runs).items():
        means, _ = mean_and_deviation([run.folder for run in members], "train/loss")
        assert_points(*found.pop(name), means, name)
    ((label, (x, y)),) = found.items()
    assert label == "precision=bf16 optimizer.lr=0.1 seed=2 (broke), NaN from step 9"
    assert_points(x, y, logged(runs[0].folder.parent / "bf16-0.1-2", "train/loss"))


def sensitivity_picture(runs, axes, tmp_path):
    losses, logits = axes(draw, arms(runs), tmp_path / "a.svg")
    for lines, at in ((losses, final_loss), (logits, lambda run: max(logged(run.folder, LOGIT).values()))):
        for label, x, y in (each for each in lines if each[0].startswith("precision=")):
            assert x == [*RATES]
            for rate, mean in zip(x, y, strict=True):
                chosen = [at(run) for run in runs if run.name.startswith(f"{label[10:14]}-{rate}-")]
                assert len(chosen) == len(SEEDS)
                assert mean == pytest.approx(sum(chosen) / len(chosen))


def final_loss(run):
    """The last validation loss, or the loss at init if that is lower or the run diverged."""
    start, end = logged(run.folder, "train/ce")[1], logged(run.folder, "val/loss")[STEPS]
    return min(start, end) if math.isfinite(end) else start


def comparison_page(runs, axes, tmp_path):
    frame = frame_of(runs)
    data = page_data(comparison(runs, frame, tmp_path / "report.html", ""))
    by_name = {run.name: run for run in runs}
    ranked = [by_name[row[0]] for row in data["rows"]]
    for number, curves in data["curves"].items():
        assert assert_curves(curves, ranked[int(number)].folder) == {*NAMES}
    assert len(data["curves"]) == len(runs), "no run is left out"
    for group in data["groups"]:
        folders = [ranked[number].folder for number in group["sound"]]
        assert group["name"].partition(" (n=")[0] in in_groups(runs)
        for name in NAMES:
            curve, (means, deviations) = group["curves"][name], mean_and_deviation(folders, name)
            assert_points(curve["x"], curve["y"], means, name)
            for sign, edge in zip((-1, 1), curve["band"], strict=True):
                assert_points(curve["x"], edge, {step: means[step] + sign * deviations[step] for step in means}, name)
    column = [each["title"] for each in data["columns"]].index("val loss")
    for run, row in zip(ranked, data["rows"], strict=True):
        end = logged(run.folder, "val/loss")[STEPS]
        assert row[column] is None if math.isnan(end) else row[column] == pytest.approx(end, rel=1e-5)
    for arm in data["sensitivity"]["arms"]:
        for rate, mean in zip(arm["rates"], arm["loss"], strict=True):
            chosen = [final_loss(run) for run in runs if run.name.startswith(f"{arm['name'][10:]}-{rate}-")]
            assert mean == pytest.approx(sum(chosen) / len(chosen), rel=1e-5)


def page_of_a_run(runs, axes, tmp_path):
    for run in runs[:1] + [run for run in runs if run.name == "bf16-0.1-2"]:
        assert assert_curves(page_data(run_page(run))["run"], run.folder) == {*NAMES}


def page_of_a_what_if(runs, axes, tmp_path):
    places = [
        RankedArm(Outcome(Arm(run.name), run.folder, STEPS, "", 0, 0, (), {}, 1.0, 1.0, run), "", NO_INTERVAL)
        for run in runs
    ]
    for run, curves in zip(runs, arm_curves(places), strict=True):
        assert assert_curves(curves, run.folder) == {*NAMES}


FIGURES = {
    "draw_losses": [losses_of_each_run, losses_by_setting],
    "draw": [sensitivity_picture],
    "comparison": [comparison_page],
    "run_page": [page_of_a_run],
    "whatif_page": [page_of_a_what_if],  # the page itself is read in tests/beside/whatif/test_command.py
}
"""What reads the points back, by the function that draws them."""


@pytest.mark.parametrize("reads", [each for several in FIGURES.values() for each in several])
def test_every_point_of_a_figure_was_logged_and_every_line_ends_at_the_last_value(runs, axes, tmp_path, reads):
    reads(runs, axes, tmp_path)


def test_every_function_that_draws_a_figure_has_a_row():
    drawing, importing = set(), set()
    for file in (ROOT / "stabletrain").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if not re.search(r"\bcanvas\(|\bpage\(|matplotlib", text):
            continue
        tree = ast.parse(text)
        importing |= {file.name for node in ast.walk(tree) if "matplotlib" in imported(node)}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            called = {getattr(node.func, "id", "") for node in ast.walk(function) if isinstance(node, ast.Call)}
            drawing |= {function.name} if called & {"canvas", "page"} else set()
    assert drawing == {*FIGURES}, "a function that calls `canvas` or `page` draws a figure: give it a row"
    assert importing == {"pictures.py"}, "draw with its `canvas`, so that this test finds the figure"
    charts = {file.name for file in WEB.glob("*.js") if re.search(r"new (Chart|uPlot)\(", file.read_text("utf-8"))}
    assert charts == {"chart.js", "pictures.js", "grid.js"}, "all charts are made from curves, groups or sensitivity"


def imported(node):
    """The modules that a statement imports."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return {name.partition(".")[0] for name in names}
