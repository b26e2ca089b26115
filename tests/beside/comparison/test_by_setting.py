"""Settings compared: means over seeds, paired differences, and which settings are told apart."""

import json
import math
import shutil
import statistics
import subprocess
from itertools import chain, product

import pytest

import stabletrain
from stabletrain.beside.comparison.by_setting import latex, markdown, sentence, settings_of
from stabletrain.beside.comparison.frames import frame
from stabletrain.beside.comparison.groups import groups
from stabletrain.beside.comparison.reading.runs import read_runs
from stabletrain.cli.commands import main
from stabletrain.errors import ConfigError
from tests.beside.comparison.written import AT_INIT, write

LOSSES = {
    # by precision and seed: the seeds differ by far more than fp32 and bf16, and fp16 is worse by a constant
    "fp32": [2.480, 2.484, 2.490],
    "bf16": [2.4801, 2.4839, 2.4902],
    "fp16": [2.500, 2.504, 2.511],
}


def sweep(folder, losses=LOSSES, **more):
    """Writes a run for each precision and seed; returns the folder."""
    for name, each in losses.items():
        for seed, loss in enumerate(each):
            write(folder / f"{name}-{seed}", [f"precision={name}", f"seed={seed}"], loss, **more)
    return folder


def test_settings_are_means_over_seeds_with_differences_paired_by_seed(tmp_path):
    best, near, worse = settings_of(frame(sweep(tmp_path)))
    assert [each.name for each in (best, near, worse)] == ["precision=fp32", "precision=bf16", "precision=fp16"]
    assert best.mean == pytest.approx(statistics.fmean(LOSSES["fp32"]))
    assert best.deviation == pytest.approx(statistics.stdev(LOSSES["fp32"]))
    assert math.isnan(best.difference.mean)
    pairs = [bf16 - fp32 for bf16, fp32 in zip(LOSSES["bf16"], LOSSES["fp32"], strict=True)]
    assert near.difference.mean == pytest.approx(statistics.fmean(pairs))
    half = 4.3027 * statistics.stdev(pairs) / math.sqrt(3)
    assert near.difference.high - near.difference.mean == pytest.approx(half)
    assert not near.difference.excludes_zero
    assert worse.difference.excludes_zero, "unpaired, the seeds would hide it"
    assert sentence([best, near, worse]) == (
        "Best setting: precision=fp32, 2.485 ± 0.005 (3 runs). Not told apart from it: precision=bf16, +6.7e-05 "
        "(-0.00031 to +0.00045)."
    )


def test_a_run_that_broke_is_counted_and_enters_no_mean(tmp_path):
    sweep(tmp_path, {"fp32": [2.0, 2.2], "bf16": [1.5, 1.5, 1.5]})
    write(tmp_path / "bf16-3", ["precision=bf16", "seed=3"], 1.0, "halted")
    write(tmp_path / "bf16-4", ["precision=bf16", "seed=4"], math.nan)
    write(tmp_path / "bf16-5", ["precision=bf16", "seed=5"], 1.0, "running")
    sound, broken = settings_of(frame(tmp_path))
    assert sound.name == "precision=fp32", "a setting that may break is not the best, however low its losses"
    assert (broken.mean, broken.ended, broken.broke, broken.not_over) == (1.5, "3 of 6, 2 broke, 1 not over", 2, 1)
    write(tmp_path / "bf16-6", ["precision=bf16", "seed=6"], 26_000.0)
    write(tmp_path / "fp32-6", ["precision=fp32", "seed=6"], 1.05 * AT_INIT)  # it has learnt nothing
    stuck, lost = settings_of(frame(tmp_path))
    assert (lost.broke, lost.mean) == (3, 1.5), "finite, and far above the loss of the first step"
    assert (stuck.broke, stuck.runs) == (0, 3)
    by_name = {group.name: group for group in groups(read_runs([tmp_path]))}
    assert [len(by_name[f"precision={name}"].broke) for name in ("fp32", "bf16")] == [0, 3], "pictures count alike"
    assert "precision=bf16" in sentence([sound, broken]), "two pairs, both lower"


def test_the_best_rate_of_each_setting_is_compared(tmp_path):
    for name, best in (("none", 0.01), ("qknorm", 0.1)):
        for rate in (0.001, 0.01, 0.1):
            for seed in (0, 1):
                off = abs(math.log10(rate / best))
                loss = 0.01 * seed + (1.5 + off if name == "qknorm" else 2.0 + off / 2)
                write(
                    tmp_path / f"{name}-{rate}-{seed}",
                    [f"stability={name}", f"optimizer.lr={rate}", f"seed={seed}"],
                    loss,
                )
    found = frame(tmp_path)
    assert [(each.name, each.rate, each.runs) for each in settings_of(found)] == [
        ("stability=qknorm", 0.1, 2),
        ("stability=none", 0.01, 2),
    ]
    by_rate = settings_of(found, ["optimizer.lr"])
    assert by_rate[0].name == "optimizer.lr=0.1"
    assert by_rate[0].runs == 4, "over both stabilities and seeds"
    assert by_rate[1].difference.count == 4


def test_one_run_each_is_never_told_apart(tmp_path):
    settings = settings_of(frame(sweep(tmp_path, {"fp32": [2.0], "bf16": [5.0]})))
    assert not settings[1].difference.excludes_zero
    assert "Not told apart from it: precision=bf16, +3, one pair." in sentence(settings)


def test_a_key_in_which_no_runs_differ_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--by precison: no two runs differ in it; did you mean precision?"):
        settings_of(frame(sweep(tmp_path)), ["precison"])


def test_the_command_prints_settings_and_writes_them_as_csv_and_latex(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # as in a pipe: long lines stay whole
    sweep(tmp_path / "sweep")
    assert main(["compare", "sweep", "--by", "precision", "--csv", "s.csv", "--tex", "s.tex"]) == 0
    out = capsys.readouterr().out
    assert "| precision=fp32 | 2.485 ± 0.005 | 3 | best |" in out
    assert out.count("\n") < 12, "no table of runs"
    rows = (tmp_path / "s.csv").read_text().splitlines()
    assert rows[0].startswith("setting,settings.precision,val_loss,val_loss_sd,finished,runs,broke,not_over,difference")
    assert len(rows) == 4
    tex = (tmp_path / "s.tex").read_text()
    assert r"fp32 & 2.485 $\pm$ 0.005 & 3/3 & best \\" in tex
    assert r"& $+6.7 \cdot 10^{-5}$ $[-0.00031, +0.00045]$ n.s. \\" in tex
    assert tex.count("n.s.") == 2, "in one row, and in the comment that says what it means"
    page = (tmp_path / "sweep" / "report.html").read_text(encoding="utf-8")
    assert "Best setting: precision=fp32" in page
    assert main(["compare", "sweep"]) == 0
    assert "Not told apart from it: precision=bf16" in capsys.readouterr().out
    assert main(["compare", "sweep", "--tex", "sweep/fp32-0/run.json"]) == 2


def test_the_command_prints_json_alone_if_asked_to(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(sweep(tmp_path / "sweep") / "broken", ["precision=fp16", "seed=3"], math.nan)
    assert main(["compare", "sweep", "--json", "--by", "precision"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 10
    assert {run["val_loss"] for run in found["runs"]} == {*chain(*LOSSES.values()), "NaN"}
    best, near, worse = found["settings"]
    assert (best["setting"], best["finished"], best["difference"]) == ("precision=fp32", 3, None)
    assert (near["told_apart"], worse["broke"], worse["settings.precision"]) == (False, 1, "fp16")


def test_the_same_in_python(tmp_path):
    found = stabletrain.compare(sweep(tmp_path)).by_setting("precision")
    assert found.index.tolist() == ["precision=fp32", "precision=bf16", "precision=fp16"]
    assert found["told_apart"].tolist() == [False, False, True]
    assert found["finished"].tolist() == [3, 3, 3]


def test_tables_show_no_character_that_would_break_them(tmp_path):
    write(tmp_path / "a", [r"data.path=a_b%c\d|e", "seed=0"], 1.0)
    write(tmp_path / "b", ["data.path=x#$&{}", "seed=0"], 2.0)
    settings = settings_of(frame(tmp_path))
    assert r"a\_b\%c\textbackslash{}d" in latex(settings)
    assert r"x\#\$\&\{\}" in latex(settings)
    assert all(line.count(" | ") == 3 for line in markdown(settings).splitlines())


def rated(folder):
    """Writes runs that differ in two keys and the learning rate; returns the folder."""
    cases = product(("fp32", "bf16_params"), ("none", "qknorm"), (0.001, 0.01), (0, 1, 2))
    for number, (precision, stability, rate, seed) in enumerate(cases):
        typed = [f"precision={precision}", f"stability={stability}", f"optimizer.lr={rate}", f"seed={seed}"]
        write(folder / str(number), typed, 2.5 + 0.01 * (number % 5) + rate)
    return folder


def test_a_sweep_without_rates_is_compared_with_one_that_has_them(tmp_path):
    sweep(tmp_path / "one")
    rated(tmp_path / "other")
    settings = settings_of(frame(tmp_path))
    assert {each.rate for each in settings} == {None, 0.001, 0.01}
    assert "|  | 2.485 ± 0.005 | 3 | best |" in markdown(settings)
    assert "&  & 2.485 $\\pm$ 0.005 & 3/3 & best" in latex(settings)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
@pytest.mark.parametrize("write_runs", [sweep, rated])
def test_the_latex_table_compiles(tmp_path, write_runs):
    table = latex(settings_of(frame(write_runs(tmp_path / "sweep"))))
    document = "\n".join([r"\documentclass{article}\usepackage{booktabs}\begin{document}", table, r"\end{document}"])
    (tmp_path / "t.tex").write_text(document)
    done = subprocess.run(["pdflatex", "-interaction=nonstopmode", "t.tex"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert b"Overfull" not in done.stdout, "it fits the width of an article"
