"""The pages in a real browser: silent, offline, readable at every width, and doing what they offer."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from stabletrain.beside.comparison import frame_of
from stabletrain.beside.comparison.pages.comparison import write_page
from stabletrain.beside.comparison.pages.one_run import write_run_page
from stabletrain.beside.comparison.pictures import running_mean
from stabletrain.beside.comparison.reading.runs import read_runs
from tests.beside.comparison.browser import browser, contrast, opened, painted, until
from tests.beside.comparison.made_pages import SAMPLE, made, sweep
from tests.beside.comparison.read_back import logged
from tests.beside.comparison.written import write
from tests.runs import ROOT

pytestmark = pytest.mark.slow

LOSS = '[data-panel="train/loss"]'


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sweep with its page, and the page of each of its runs."""
    root = sweep(tmp_path_factory.mktemp("pages") / "sweep")
    for number in range(6):
        write_run_page(root / str(number))
    compared(root)
    return root


def compared(root):
    runs = read_runs([root])
    write_page(runs, frame_of(runs), root / "report.html")
    return root / "report.html"


def column(page, title):
    """The texts of a column of the table, from top to bottom."""
    return page.evaluate(
        """(title) => {
          const table = Tabulator.findTable('#table')[0];
          const field = table.getColumns().find((c) => c.getDefinition().title === title).getField();
          return table.getRows('active').map((row) => row.getCell(field).getElement().textContent);
        }""",
        title,
    )


def head(page, title):
    return page.locator(".tabulator-col", has=page.get_by_text(title, exact=True)).first


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        *(("report.html", 1280, "light"), ("report.html", 390, "dark")),
        *(("5/report.html", 1280, "dark"), ("5/report.html", 390, "light")),
        *(("2/report.html", 1280, "light"), ("2/report.html", 390, "dark")),
    ],
)
def test_a_page_is_silent_fits_its_window_and_can_be_read(chromium, folder, name, width, scheme):
    with opened(chromium, folder / name, width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        texts = [".verdict", ".words li", "h2", "p.soft", ".picture .note", "h1"]
        texts += [".tabulator-cell", ".tabulator-col-title", ".status"] if name == "report.html" else [".settings dt"]
        assert {text: value for text in texts if (value := contrast(page, text)) < 4.5} == {}
        assert min(painted(page, "#pictures")) > 0.005
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_table_sorts_by_a_click_and_from_the_keyboard(chromium, folder):
    with opened(chromium, folder / "report.html") as page:
        assert column(page, "run") == ["5", "4", "3", "1", "0", "2"]  # finished by loss, then what was halted
        head(page, "units/s").locator(".tabulator-col-title").click()
        assert column(page, "run") == ["5", "3", "4", "2", "1", "0"]
        head(page, "units/s").locator(".tabulator-col-title").click()
        assert column(page, "run") == ["0", "1", "2", "4", "3", "5"]
        head(page, "optimizer.lr").press("Enter")
        assert column(page, "optimizer.lr") == ["0.001", "0.001", "0.01", "0.01", "0.1", "0.1"]


def test_filters_and_ticks_choose_the_rows_and_what_is_drawn(chromium, folder):
    with opened(chromium, folder / "report.html") as page:
        lines = "pictures.panels[0].chart.plan.series.filter((one) => !one.faint).map((one) => one.name)"
        assert page.locator("#drawn").inner_text() == "6 runs, 6 drawn"
        head(page, "stability").locator("input").press_sequentially("full")
        until(page, "document.querySelector('#drawn').textContent.startsWith('3 of 6')")
        assert column(page, "run") == ["5", "4", "3"]
        assert len(page.evaluate(lines)) == 3
        head(page, "optimizer.lr").locator("input").press_sequentially("> 0.005")
        until(page, "document.querySelector('#drawn').textContent.startsWith('2 of 6')")
        assert column(page, "run") == ["5", "4"]
        page.locator("#table input[type=checkbox]").first.uncheck()
        assert page.evaluate(lines) == ["stability=full optimizer.lr=0.01"]
        page.locator("#usual").click()
        until(page, "document.querySelector('#drawn').textContent === '6 runs, 6 drawn'")
        page.locator("#none").click()
        assert page.evaluate(lines) == []


def test_dragging_zooms_every_picture_and_the_keyboard_brings_it_back(chromium, folder):
    with opened(chromium, folder / "report.html") as page:
        ranges = "pictures.all().map((chart) => [chart.u.scales.x.min, chart.u.scales.x.max])"
        assert all(each == [1, 40] for each in page.evaluate(ranges))
        over = page.locator(f"{LOSS} .u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=5)
        page.mouse.up()
        zoomed = page.evaluate(ranges)
        assert all(each == pytest.approx([10.75, 20.5], abs=0.3) for each in zoomed), zoomed
        assert page.get_by_role("button", name="all steps").first.is_visible()
        page.locator(f"{LOSS} .plot").press("0")
        assert all(each == [1, 40] for each in page.evaluate(ranges))
        page.locator(f"{LOSS} .plot").press("+")
        assert page.evaluate(ranges)[0][1] - page.evaluate(ranges)[0][0] < 39


def test_hovering_says_which_run_which_step_and_which_value(chromium, folder):
    with opened(chromium, folder / "2" / "report.html") as page:
        over = page.locator(f"{LOSS} .u-over")
        over.scroll_into_view_if_needed()
        left = page.evaluate("pictures.all()[0].u.valToPos(10, 'x')")
        over.hover(position={"x": left, "y": 100})
        said = page.locator(f"{LOSS} .tip").inner_text()
        assert "train/loss" in said
        assert "step 10 · " in said
        expected = json.loads((folder / "2" / "metrics.jsonl").read_text().splitlines()[9])["train/loss"]
        assert f"{expected:.4g}" in said
        over.hover(position={"x": page.evaluate("pictures.all()[0].u.valToPos(20, 'x')"), "y": 100})
        said = page.locator(f"{LOSS} .tip").inner_text()
        assert "lr_too_high: it climbs" in said
        assert "step 20: skipped" in said


def test_the_incident_is_drawn_and_leads_to_its_page(chromium, folder):
    with opened(chromium, folder / "report.html") as page:
        link = page.locator("table.plain a").first
        assert link.inner_text() == "20"
        assert (folder / link.get_attribute("href")).read_text() == "# what happened\n"
        marks = page.evaluate(
            "pictures.panels[0].chart.plan.series.flatMap((one) => (one.marks || []).map((m) => m.kind))"
        )
        assert sorted(marks) == ["halt", "incident", "rollback"], "one mark for a skipped step with an incident"


def saved(page, panel, kind):
    """Clicks a chart's button, and returns the file that is saved and its name."""
    with page.expect_download() as download:
        page.locator(panel).first.locator("header button", has_text=kind).click()
    return Path(download.value.path()), download.value.suggested_filename


def test_a_chart_is_saved_as_svg_whose_points_are_those_that_were_logged(chromium, folder):
    with opened(chromium, folder / "2" / "report.html") as page:
        file, name = saved(page, LOSS, "SVG")
        assert name == "training_loss.svg"
        svg = ElementTree.parse(file).getroot()
        chart = "pictures.panels[0].chart.u"
        box = page.evaluate(f"[{chart}.bbox.left, {chart}.bbox.top, {chart}.bbox.width, {chart}.bbox.height]")
        x, y = (page.evaluate(f"[{chart}.scales.{axis}.min, {chart}.scales.{axis}.max]") for axis in "xy")
    paths = [path.get("d") for path in svg.iter("{http://www.w3.org/2000/svg}path")]
    line = max(paths, key=len)
    points = [tuple(map(float, pair.split())) for pair in re.findall(r"[ML]([\d.]+ [\d.]+)", line)]
    known = logged(folder / "2", "train/loss")
    assert len(points) == len(known)
    for (left, top), (step, loss) in zip(points, known.items(), strict=True):
        assert x[0] + (x[1] - x[0]) * (left - box[0]) / box[2] == pytest.approx(step, abs=0.01)
        assert y[1] - (y[1] - y[0]) * (top - box[1]) / box[3] == pytest.approx(loss, abs=0.001)
    words = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Training loss", "train/loss"} <= {*words}
    assert "Vertical line: halted." in " ".join(words)


def test_a_chart_is_saved_as_png_in_its_colours(chromium, folder):
    with opened(chromium, folder / "report.html") as page:
        for panel in (LOSS, "#sensitivity figure"):
            file, name = saved(page, panel, "PNG")
            assert name.endswith(".png")
            pixels = imread(file, format="png")
            assert pixels.shape[0] > 500
            assert pixels.shape[1] > 800
            orange = abs(pixels[..., :3] - [0xC7 / 255, 0x50 / 255, 0]).max(axis=-1) < 0.02
            assert orange.sum() > 200, "the line of the second setting"


def test_seeds_are_a_mean_with_a_band_and_a_lost_run_is_a_line_that_the_axis_reaches(chromium, tmp_path):
    for stability, levels in (("none", [1.0, 1.5, 2.0]), ("full", [1.0, 1.5, 71.0])):
        for seed, level in enumerate(levels):
            made(
                tmp_path / "s" / f"{stability}-{seed}",
                f"stability={stability}", f"seed={seed}",
                level=level, status="halted" if level > 70 else "finished",
            )  # fmt: skip
    root = tmp_path / "s"
    told = {"event": "forecast", "step": 9, "signal": "headroom", "low": 12, "high": 60, "text": "soon"}
    (root / "full-2" / "events.jsonl").write_text(json.dumps(told) + "\n")
    with opened(chromium, compared(root)) as page:
        assert page.locator("#drawn").inner_text() == "6 runs, 6 drawn: 5 in 2 means, 1 by itself"
        legend = "[...document.querySelectorAll('#legend li')].map((item) => item.textContent)"
        lost = "stability=full seed=2 (in no mean)"
        assert page.evaluate(legend) == [
            "stability=full (n=2 of 3, 1 broke)", "stability=none (n=3)", lost
        ]  # fmt: skip
        chart = "pictures.panels[0].chart"
        lines = page.evaluate(f"{chart}.plan.series.map((one) => [one.name, !!one.band, one.y.at(-1)])")
        ends = {name: logged(root / name, "train/loss")[40] for name in ("none-0", "none-1", "none-2", "full-2")}
        assert [(name, band) for name, band, _ in lines] == [
            ("stability=full (n=2 of 3, 1 broke)", True), ("stability=none (n=3)", True), (lost, False)
        ]  # fmt: skip
        assert lines[1][2] == pytest.approx(sum(ends[f"none-{seed}"] for seed in range(3)) / 3, rel=1e-5)
        assert lines[2][2] == pytest.approx(ends["full-2"], rel=1e-5)
        low, high = page.evaluate(f"[{chart}.u.scales.y.min, {chart}.u.scales.y.max]")
        assert low < ends["none-0"] < ends["full-2"] < high
        assert page.evaluate(f"{chart}.plan.log"), "a linear axis would flatten all but the lost run"
        note = page.locator(f"{LOSS} .note").inner_text()
        assert "band: ± 1 standard deviation" in note
        assert f"Forecast for {lost}, step 9." in note
        page.locator("#each").check()
        assert page.locator("#drawn").inner_text() == "6 runs, 6 drawn"
        assert len(page.evaluate(f"{chart}.plan.series")) == 6
        page.locator("#each").uncheck()
        page.locator("#table input[type=checkbox]").first.uncheck()
        names = page.evaluate(f"{chart}.plan.series.map((one) => one.name)")
        assert names == ["stability=none (n=3)", "stability=full seed=1", lost], "no mean of a part of a setting"


def test_means_over_steps_are_added_to_the_logged_line_and_said(chromium, folder):
    with opened(chromium, folder / "5" / "report.html") as page:
        page.locator("#smooth").fill("10")
        series = page.evaluate("pictures.panels[0].chart.plan.series.map((one) => [one.name, one.y])")
        known = logged(folder / "5", "train/loss")
        found = dict(series)
        assert found["train/loss, as logged"] == pytest.approx([*known.values()], rel=1e-5)
        means = running_mean(np.array([*known]), np.array([*known.values()]), 10)
        assert found["train/loss"] == pytest.approx(means.tolist(), rel=1e-5), "as the pictures of `losses`"
        assert "Running means over 10 steps; faint: as logged." in page.locator(f"{LOSS} .note").inner_text()


def test_a_loss_that_is_not_finite_is_marked_where_it_happens_and_one_evaluation_is_a_point(chromium, tmp_path):
    lines = [{"step": step, "train/loss": 2.0 if step < 6 else "NaN", "guard/applied": 1} for step in range(1, 10)]
    lines.append({"step": 9, "val/loss": 3.0})
    write(tmp_path / "run", lines=lines)
    write_run_page(tmp_path / "run")
    with opened(chromium, tmp_path / "run" / "report.html") as page:
        assert page.evaluate("pictures.panels[0].chart.plan.series[0].bad") == [[6, "NaN"]]
        assert "Cross with a word: NaN" in page.locator(f"{LOSS} .note").inner_text()
        assert "NaN" in saved(page, LOSS, "SVG")[0].read_text()
        svg = saved(page, '[data-panel="val/loss"]', "SVG")[0].read_text()
        assert svg.count("<circle") == 1
        assert painted(page, '[data-panel="val/loss"]')[0] > 0.005


def test_a_logarithmic_axis_has_ticks_wherever_it_starts(chromium, tmp_path):
    for number, norms in enumerate(([0.1166, 3.0], [0.0466, 9.0], [167.0, 2.8e6])):
        lines = [{"step": step, "grad/norm": norm} for step, norm in enumerate(norms, 1)]
        write(tmp_path / f"{number}", lines=lines)
        write_run_page(tmp_path / f"{number}")
        with opened(chromium, tmp_path / f"{number}" / "report.html") as page:
            ticks = page.evaluate("pictures.all()[0].u.axes[1]._values.filter((text) => text !== '')")
            assert len(ticks) > 1, norms


def test_a_healing_is_a_line_of_its_own_and_the_note_says_what_it_means(chromium, tmp_path):
    made(tmp_path / "run", rolled_back=(24, 30))
    heal = {"event": "heal", "step": 30, "tick": 30, "reason": "loss 7 is a spike", "to": 23, "arm": "lr_half"}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(heal) + "\n")
    write_run_page(tmp_path / "run")
    with opened(chromium, tmp_path / "run" / "report.html") as page:
        marks = page.evaluate("pictures.panels[0].chart.plan.series[0].marks.map((m) => [m.kind, m.x, m.text])")
        text = "step 30: halted: loss 7 is a spike; went on from step 23 with lr_half"
        assert marks == [["heal", 30, text]]
        assert "halted, and went on with a fix" in page.locator(f"{LOSS} .note").inner_text()


def test_a_skipped_step_with_an_incident_is_at_the_loss_of_the_skipped_step(chromium, tmp_path):
    made(tmp_path / "run", incident={"step": 20, "cause": "bad_batch"})
    skip = {"event": "skip", "step": 20, "tick": 20, "kind": "spike", "loss": 3.75}
    with open(tmp_path / "run" / "events.jsonl", "a") as file:
        file.write(json.dumps(skip) + "\n" + json.dumps({**skip, "step": 21, "tick": 21, "loss": "NaN"}) + "\n")
    write_run_page(tmp_path / "run")
    with opened(chromium, tmp_path / "run" / "report.html") as page:
        marks = page.evaluate("pictures.panels[0].chart.plan.series[0].marks.map((m) => [m.kind, m.x, m.y, m.text])")
        assert marks == [
            ["cross", 21, None, "step 21: skipped"],
            ["incident", 20, 3.75, "step 20: skipped, loss 3.75; bad_batch"],
        ]
        note = page.locator(f"{LOSS} .note").inner_text()
        assert note == "Cross: skipped step. Triangle: incident."


def test_a_forecast_is_drawn_over_the_loss_and_over_its_own_signal(chromium, tmp_path):
    made(tmp_path / "run")
    told = {"event": "forecast", "step": 9, "signal": "headroom", "low": 12, "high": 60, "text": "soon"}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(told) + "\n")
    write_run_page(tmp_path / "run")
    with opened(chromium, tmp_path / "run" / "report.html") as page:
        marks = "(shown) => (shown.chart.plan.series[0].marks || []).map((m) => [m.x, m.to, m.text])"
        found = page.evaluate(f"pictures.panels.map((shown) => [shown.panel.names[0], ({marks})(shown)])")
        drawn = {name: told for name, told in found if told}
        mark = [[9, [12, 60], "step 9: forecast: soon"]]
        assert drawn == {"train/loss": mark, "monitors/headroom_min": mark}
        assert "Dashed vertical line: forecast" in page.locator(f"{LOSS} .note").inner_text()


@pytest.mark.parametrize("applied", [True, False])
def test_a_run_that_was_halted_early_shows_its_steps_up_to_the_halt(chromium, tmp_path, applied):
    first = {"step": 1, "train/loss": 5.5 if applied else "NaN", "guard/applied": int(applied)}
    skips = [{"event": "skip", "step": step, "tick": step, "loss": 4.5} for step in (3, 4)]
    write(tmp_path / "run", lines=[first], events=skips, status="halted", reason="too many", final={"steps": 4})
    write_run_page(tmp_path / "run")
    with opened(chromium, tmp_path / "run" / "report.html") as page:
        chart = "pictures.panels[0].chart"
        marks = page.evaluate(f"{chart}.plan.series[0].marks.map((m) => [m.kind, m.x])")
        assert marks == [["cross", 3], ["cross", 4], ["halt", 4]]
        scales = page.evaluate(f"[{chart}.u.scales.x.min, {chart}.u.scales.x.max, {chart}.u.scales.y.min]")
        assert scales[:2] == ([1, 4] if applied else [3, 4])
        assert scales[2] < 4.5, "the crosses are inside the chart, at their losses"
        over = page.locator(f"{LOSS} .u-over")
        over.scroll_into_view_if_needed()
        over.hover(position={"x": page.evaluate(f"{chart}.u.valToPos(4, 'x')") - 2, "y": 100})
        assert "step 4: halted: too many" in page.locator(f"{LOSS} .tip").inner_text()
        assert painted(page, LOSS)[0] > 0.005


def test_no_two_ticks_of_an_axis_have_the_same_text(chromium, folder):
    with opened(chromium, folder / "2" / "report.html") as page:
        for values in ([0, 5e-5, 1e-4, 1.5e-4, 2e-4], [1e6, 1.5e6, 2e6], [123450, 123451, 123452], [0.1, 0.1000001]):
            texts = page.evaluate("(values) => Numbers.ticks(null, values)", values)
            assert len({*texts}) == len(values), texts
            assert [float(text) for text in texts] == values
        assert page.evaluate("Numbers.ticks(null, [1, null, 0.0005, 2e7])") == ["1", "", "5e-4", "2e7"]
        u = "{axes: [{scale: 'y'}], scales: {y: {min: values[0], max: values.at(-1)}}}"
        log = f"(values) => Numbers.round({u}, values, 0)"
        assert page.evaluate(log, [0.01, 0.02, 0.1, 0.5, 1, 10]) == [0.01, None, 0.1, None, 1, 10]
        assert page.evaluate(log, [1, 2, 3, 5, 10]) == [1, 2, None, 5, 10]
        assert page.evaluate(log, [5.5, 6, 7, 8, 9]) == [None, 6, 7, 8, 9], "one labelled tick would show no scale"


def test_ticks_of_steps_are_whole_numbers(chromium, tmp_path):
    write_run_page(made(tmp_path / "run", steps=4))
    with opened(chromium, tmp_path / "run" / "report.html") as page:
        assert page.evaluate("pictures.all()[0].u.axes[0]._values") == ["1", "2", "3", "4"]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_words_of_settings_are_not_broken(chromium, tmp_path, width):
    long = "a.rather.long.name.of.a.setting.in.a.group"
    made(tmp_path / "run", f"{long}=false", "card=NVIDIA_H100_80GB_HBM3", f"path=/data/{'folder/' * 20}")
    write_run_page(tmp_path / "run")
    with opened(chromium, tmp_path / "run" / "report.html", width) as page:
        lines = page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll('.settings dt, .settings dd')].map((one) => [
              one.textContent, one.getBoundingClientRect().height / parseFloat(getComputedStyle(one).lineHeight)]))"""
        )
        assert {lines[word] for word in (long, "false", "NVIDIA_H100_80GB_HBM3", "path")} == {1.0}
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_run_opens_from_the_table_and_closes_with_escape(chromium, folder):
    with opened(chromium, folder / "report.html") as page:
        page.locator("button.name", has_text="5").first.click()
        dialog = page.locator("dialog")
        assert "some text" in dialog.inner_text()
        assert dialog.get_by_role("link", name="report of this run").get_attribute("href") == "5/report.html"
        page.keyboard.press("Escape")
        dialog.wait_for(state="detached")  # or it fails: a browser tells of the closing later


def test_colours_follow_the_setting_that_is_chosen(chromium, folder):
    with opened(chromium, folder / "report.html") as page:
        colors = "new Set(pictures.panels[0].chart.plan.series.map((one) => one.style.color)).size"
        assert page.evaluate(colors) == 6, "few runs have each their own colour"
        page.locator("#by").select_option(label="stability")
        assert page.evaluate(colors) == 2


HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">'\"`${1}<!--"


def test_hostile_names_and_texts_stay_text(chromium, tmp_path):
    root = tmp_path / "sw<b>eep' & é𝔘漢"
    about = {"step": 9, "cause": HOSTILE, "verdict": HOSTILE, "fix": [HOSTILE]}
    made(
        root / HOSTILE.replace("/", "∕"), f"data.path={HOSTILE}", "seed=1", incident=about, sample=SAMPLE, card=HOSTILE
    )
    made(root / ("long" * 60), f"data.path={'x' * 300}", "seed=2", status="failed", card="x" * 300)
    made(root / "ünï\u202ecode", f"{HOSTILE}=1", "<img>=1", "seed=3")
    own = [folder / "report.html" for folder in root.iterdir()]
    for file in own:
        write_run_page(file.parent)
    for number, file in enumerate([*own, compared(root)]):
        widths = [390, 1280] if number % 2 else [1280, 390]  # a window is opened in one width, and then changed
        with opened(chromium, file, widths[0]) as page:
            for width in widths:
                page.set_viewport_size({"width": width, "height": 900})
                page.wait_for_timeout(100)
                assert page.title().startswith("stabletrain") or page.title().endswith("stabletrain")
                assert page.locator("img").count() == 0
                assert page.evaluate("document.documentElement.scrollWidth") <= width
            if file.parent == root:
                for button in page.locator("button.name").all():
                    button.click()
                    page.keyboard.press("Escape")
                head(page, "seed").locator(".tabulator-col-title").click()
                assert page.locator("img").count() == 0


def test_runs_that_are_empty_broken_or_going_on_are_shown_as_such(chromium, tmp_path):
    made(tmp_path / "runs" / "whole", "seed=0")
    made(tmp_path / "runs" / "going", "seed=1", status="running")
    made(tmp_path / "runs" / "none", "seed=2", steps=4)
    (tmp_path / "runs" / "none" / "metrics.jsonl").write_text("")
    made(tmp_path / "runs" / "torn", "seed=3")
    (tmp_path / "runs" / "torn" / "run.json").write_text("{")
    with opened(chromium, compared(tmp_path / "runs")) as page:
        states = dict(zip(column(page, "run"), column(page, "status"), strict=True))
        assert states == {"whole": "finished", "going": "running", "none": "empty", "torn": "broken"}
        page.locator("button.name", has_text="torn").click()
        assert "run.json is damaged: it is not valid JSON" in page.locator("dialog").inner_text()
    for name in ("going", "none", "torn"):
        write_run_page(tmp_path / "runs" / name)
        with opened(chromium, tmp_path / "runs" / name / "report.html") as page:
            assert page.locator(".verdict").inner_text().startswith(states[name].capitalize())


def test_ten_thousand_rows_stay_usable(chromium, tmp_path):
    """All rows are in the table, but only those in sight in the page, also once sorted; and the curves of
    some of them."""
    file = tmp_path / "report.html"
    subprocess.run(
        [sys.executable, "-m", "tests.beside.comparison.many", tmp_path / "sweep", file], cwd=ROOT, check=True
    )
    assert file.stat().st_size < 6e6
    with opened(chromium, file) as page:
        assert "10,000 runs, 30 drawn" in page.locator("#drawn").inner_text()
        assert "this page contains the curves of 300" in page.locator("#drawn").inner_text()
        rows, there = page.evaluate("""() => {
          const table = Tabulator.findTable('#table')[0];
          table.setSort(table.getColumns()[1].getField(), 'asc');
          return [table.getDataCount(), document.querySelectorAll('#table .tabulator-row').length];
        }""")
        assert rows == 10_000
        assert 5 < there < 300
