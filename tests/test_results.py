"""The results page, written from runs by one command: every number is in the runs' files."""

import itertools
import json
import math
import re
import shutil
import statistics
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from docs import results
from docs.results import PAGE, SECTIONS, everything, main
from tests.beside.comparison.written import write

pytestmark = pytest.mark.beside

PRESETS, RATES, SEEDS = ("none", "qknorm", "zloss", "zloss_qknorm"), (1e-2, 3e-1), (0, 1, 2)

START = datetime.fromisoformat("2026-11-27T21:00:00+00:00")

LOST = ("zloss", 3e-1, 1)
"""The run that ends in NaN."""


def made_loss(preset, rate, seed):
    """QK-norm helps at the highest rate, and costs a little at the lowest; z-loss does nothing but noise."""
    loss = {1e-2: 1.9, 3e-1: 2.7}[rate] + 0.013 * seed
    if "qknorm" in preset:
        loss += {1e-2: 0.02 + 0.001 * seed, 3e-1: -0.4 - 0.01 * seed}[rate]
    if "zloss" in preset:
        loss += 0.002 * (seed - 1) + 0.0007
    return math.nan if (preset, rate, seed) == LOST else loss


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "sweep"
    shared = ["experiment=lr_sensitivity", "steps=300", "batch_size=16", "data.block_size=64", "monitors.every=25"]
    for number, (preset, rate, seed) in enumerate(itertools.product(PRESETS, RATES, SEEDS)):
        loss, logit = made_loss(preset, rate, seed), (20 + seed if "qknorm" in preset else 1e5 * rate + seed)
        lines = [
            {"step": 1, "train/ce": 5.5 + 0.01 * seed, "monitors/attn_logit_max": 3.5},
            {"step": 300, "monitors/attn_logit_max": logit, "val/loss": "NaN" if math.isnan(loss) else loss},
        ]
        started = START + timedelta(minutes=number)
        write(
            folder / str(number),
            [*shared, f"stability={preset}", f"optimizer.lr={rate}", f"seed={seed}"],
            lines=lines,
            choices={"experiment": "lr_sensitivity", "stability": preset, "model": "gpt_nano", "guard": "off"},
            hardware={"name": "cpu", "precision": "bf16", "threads": 1},
            versions={"torch": "2.14.1"},
            final={"seconds": 50.0},
            started=started.isoformat(),
            ended=(started + timedelta(minutes=2)).isoformat(),
        )
    return folder


BEFORE = "# Results\n\nbefore\n\n## Learning-rate sensitivity\n\nold 99.99\n\n## Another\n\nafter 88.88\n"


@pytest.fixture(scope="module")
def page(sweep, tmp_path_factory):
    """The page after the command."""
    file = tmp_path_factory.mktemp("docs") / "results.md"
    file.write_text(BEFORE)
    main([str(sweep), "--page", str(file)])
    return file


def section(page):
    """The text of the section, without its code block."""
    whole = page.read_text(encoding="utf-8")
    return whole.partition("```\n\n")[2].partition("\n## ")[0]


def in_the_files(sweep):
    """All that may be said about the runs in numbers, computed with nothing but the files and `statistics`."""
    losses, logits, above = {}, {}, 0
    for folder in sweep.iterdir():
        record = json.loads((folder / "run.json").read_text())
        settings = dict(override.split("=") for override in record["overrides"])
        key = settings["stability"], float(settings["optimizer.lr"]), int(settings["seed"])
        first, last = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        loss = float(last["val/loss"])
        losses[key] = first["train/ce"] if math.isnan(loss) else min(loss, first["train/ce"])
        above += loss > first["train/ce"]
        logits[key] = last["monitors/attn_logit_max"]

    def interval(values):
        half = 4.3027 * statistics.stdev(values) / math.sqrt(3)
        mean = statistics.fmean(values)
        return [f"{each:+.2g}" for each in (mean, mean - half, mean + half)]

    def spread(values, mean=".3f", deviation=".3f"):
        return [f"{statistics.fmean(values):{mean}}", f"{statistics.stdev(values):{deviation}}"]

    allowed = {f"{rate:g}" for rate in RATES} | {str(seed) for seed in SEEDS} | {"300", "16", "64", "25"}  # settings
    index = {}
    for preset in PRESETS:
        means = {rate: [losses[preset, rate, seed] for seed in SEEDS] for rate in RATES}
        for rate in RATES:
            allowed |= {*spread(means[rate]), f"{max(logits[preset, rate, seed] for seed in SEEDS):.3g}"}
        curves = {seed: [losses[preset, rate, seed] for rate in RATES] for seed in SEEDS}
        index[preset] = [statistics.fmean(curve) - min(curve) for curve in curves.values()]
        best = min(RATES, key=lambda rate: statistics.fmean(means[rate]))
        allowed |= {*spread(index[preset]), *spread(means[best], ".4g", ".2g")}
        to_best = [losses[preset, best, seed] - losses["none", best, seed] for seed in SEEDS]
        allowed |= {*interval(to_best)}
    for on, off in (("qknorm", "none"), ("zloss_qknorm", "zloss"), ("zloss", "none"), ("zloss_qknorm", "qknorm")):
        allowed |= {*interval([a - b for a, b in zip(index[on], index[off], strict=True)])}
        for rate in RATES:
            allowed |= {*interval([losses[on, rate, seed] - losses[off, rate, seed] for seed in SEEDS])}
    high = [key for key in logits if logits[key] > 1e4]
    counts = [len(losses), above, 1, len(high), 3]  # runs, above init, NaN, large logits, seeds
    allowed |= {*map(str, counts)}
    for group in (high, losses.keys() - high):
        allowed |= {f"{found([losses[key] for key in group]):.3f}" for found in (min, max)}
    minutes = len(losses) * 50 / 60, len(losses) + 1
    return allowed | {f"{each:.0f}" for each in minutes} | {"2.14.1"}


def test_every_number_of_a_section_is_in_the_runs_files(sweep, page):
    text = section(page)
    of_the_prose = {"2309.14322", "95", "1e-5", "0", "1e+04", str(4 * (len(RATES) + 1))}
    numbers = re.findall(r"(?<![\w.])[-+]?\d[\d.]*(?:e[-+]?\d+)?(?<!\.)", text)
    assert len(numbers) > 100
    assert not {*numbers} - in_the_files(sweep) - of_the_prose


def test_its_sentences_follow_from_the_intervals_and_count_the_runs_that_broke(page):
    text = re.sub(r"\s+", " ", section(page))
    assert "**QK-norm**: lowers the sensitivity: -0.2" in text
    assert "The losses are lower at 0.3; higher at 0.01." in text
    assert "The losses are higher at 0.01; not told apart at 0.3." in text
    assert "**z-loss beside QK-norm**: the sensitivities with and without it are not told apart: " in text
    assert "At no learning rate are the losses told apart." in text
    assert "Of 24 runs, 1 ended in NaN or were halted, and 0 ended above their loss at init." in text
    assert "passed 1e+04 in 6 of them: `stability=none` at 0.3 (3), `stability=zloss` at 0.3 (3)." in text
    assert "here 1 of 6 did" in text
    assert "| stability=none | 0.01 | 1.913 ± 0.013 | 3 |" in text


def test_only_its_own_section_changes_and_a_second_time_nothing(sweep, page):
    first, picture = page.read_text(encoding="utf-8"), (page.parent / "lr_sensitivity.svg").read_bytes()
    assert first.startswith("# Results\n\nbefore\n\n## Learning-rate sensitivity\n\n```\npython train.py -m ")
    assert first.endswith("\n\n## Another\n\nafter 88.88\n")
    assert "99.99" not in first
    main([str(sweep), "--page", str(page)])
    assert page.read_text(encoding="utf-8") == first
    assert (page.parent / "lr_sensitivity.svg").read_bytes() == picture


def test_runs_of_no_section_are_refused_and_the_page_keeps_its_text(sweep, page, tmp_path):
    before = page.read_text(encoding="utf-8")
    other = write(tmp_path / "other", ["experiment=cards"])
    running = write(tmp_path / "running", ["experiment=lr_sensitivity"], status="running")
    refused = {
        "runs of experiment cards, lr_sensitivity: give those of one of lr_sensitivity, spiky": [other, sweep],
        "no-such does not exist": [tmp_path / "no-such"],
        r"running is running \(1 of 25 are not over\)": [sweep, running],
        "there are no runs with stability=qknorm,zloss,zloss_qknorm": [sweep / str(number) for number in range(6)],
    }
    for message, runs in refused.items():
        with pytest.raises(SystemExit, match=message):
            main([*map(str, runs), "--page", str(page)])
    assert page.read_text(encoding="utf-8") == before


def curve(loss):
    """Lines of a run that ends at this validation loss."""
    return [{"step": 1, "train/loss": 5.5}, {"step": 500, "train/loss": 2.1}, {"step": 500, "val/loss": loss}]


def made_spiky(folder):
    for name, guard, faults, loss in (
        ("0", "off", "spiky", 2.9),
        ("1", "rollback", "spiky", 2.2),
        ("2", "rollback", "none", 2.0),
    ):
        choices = {"experiment": "spiky", "guard": guard, "faults": faults}
        write(folder / name, lines=curve(loss), choices=choices)
    return [
        "it ends at 2.900 nats/byte",
        "same seed it ends at 2.200",
        "at 2.000, so the loss with the guard is 10.0 % higher",
    ]


def made_foretold(folder):
    told = {
        "event": "forecast",
        "step": 150,
        "at": 244.1,
        "low": 183.9,
        "high": 375.8,
        "threshold": 0.01,
        "signal": "s",
    }
    entropies = [
        {"step": step, "monitors/attn_entropy_min/blocks.0": 0.08 / step * 50} for step in (300, 400, 425, 500)
    ]
    for name, qknorm, rate, loss in (("0", "none", 0.2, 3.046), ("1", "layernorm", 0.067, 2.132)):
        choices = {"experiment": "foretold", "qknorm": qknorm}
        lines = [*entropies, *curve(loss)]
        write(folder / name, [f"optimizer.lr={rate}"], lines=lines, events=[told], choices=choices)
    return [
        "At a learning rate of 0.2 without",
        "At step 150 the forecast says that they reach 0.01 near step 244, between 184 and 376; they are below it at "
        "step 425. The run ends at 3.046 nats/byte. The state of step 150 was kept.",
        "From it, with QK-norm and a learning rate of 0.067, the run ends at 2.132.",
    ]


def made_healed(folder):
    heal = {"event": "heal", "step": 313, "tick": 500, "to": 0, "origin": 250, "arm": "x", "arms": ["x", "y"]}
    heal |= {"steps": 1234, "why": "x is best.", "settings": ["optimizer.lr=0.003"]}
    gone = [{"event": "skip", "step": step, "tick": step, "cause": "spike"} for step in (300, 301, 302)]
    gone.append({"event": "rollback", "step": 302, "tick": 302, "to": 250})
    for name, status, extra in (("halt", "halted", []), ("whatif", "finished", [heal])):
        overrides, choices = ["optimizer.lr=3.0", f"guard.escalate={name}"], {"experiment": "healed"}
        final = {"ticks": 500, "steps": 313}
        write(
            folder / name,
            overrides,
            status=status,
            lines=curve(2.195),
            events=[*gone, *extra],
            choices=choices,
            final=final,
        )
    return [
        "with a learning rate of 3 in place of 0.003. The guard skips 3 steps, rolls back 1 times, and halts at step ",
        "With `whatif` 2 arms take 1,234 steps, most of them from the state of step 250.",
        "The verdict: *x is best.* The run goes on from step 0 with `optimizer.lr=0.003`, and ends at 2.195 nats/byte.",
    ]


@pytest.mark.parametrize("made", [made_spiky, made_foretold, made_healed])
def test_the_other_sections_say_what_their_runs_say(tmp_path, made):
    wanted, page = made(tmp_path / "runs"), tmp_path / "results.md"
    name = made.__name__.removeprefix("made_")
    page.write_text(f"# Results\n\n## {SECTIONS[name].heading}\n\nold\n")
    main([str(tmp_path / "runs"), "--page", str(page)])
    text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
    for sentence in wanted:
        assert sentence in text
    assert (tmp_path / f"{name}.svg").exists()
    shutil.rmtree(sorted((tmp_path / "runs").iterdir())[-1])
    with pytest.raises(
        SystemExit, match="0 runs with .*, but one is needed; fix: python docs/results.py --run <section>"
    ):
        main([str(tmp_path / "runs"), "--page", str(page)])


def test_the_page_has_each_section_with_its_commands():
    text = PAGE.read_text(encoding="utf-8")
    for experiment, each in SECTIONS.items():
        assert f"## {each.heading}\n\n```\n{each.commands[0]}" in text
        assert f"\npython docs/results.py multirun/{experiment}\n```\n" in text


def on_the_page(text):
    """The commands of the page in its order: those of the table, then those of the blocks below headings."""
    table, _, sections = text.partition("\n## ")
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    found = [command for cell in cells for command in re.findall(r"`((?:python|benchmarks/)[^`]*)`", cell)]
    blocks = re.findall(r"^```\n(.*?)^```", sections, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return found + [line for line in lines if not line.startswith("python docs/results.py ")]


def test_the_commands_of_the_page_are_those_that_would_be_run(capsys):
    wanted = [command for commands in everything().values() for command in commands]
    assert on_the_page(PAGE.read_text(encoding="utf-8")) == wanted
    main(["--list"])
    listed = capsys.readouterr().out.splitlines()
    assert [line for line in listed if not line.startswith("# ")] == wanted
    assert "# spiky: not timed" in listed
    times = "| `python train.py` | x | 60 s |\n| `python train.py a=1` | x | 12 s, 48 s |\n"
    assert results.known_minutes(f"{times}(52\nminutes from the first start") == {
        "table": 2.0,
        "lr_sensitivity": 52.0,
        "card": 10.0,
    }


class Called:
    """Stands in for `subprocess.run`: keeps what was called, and writes what the commands would have written."""

    def __init__(self):
        self.lines = []

    def __call__(self, words, cwd, env=None, **_):
        line = " ".join(["python" if words[0] == results.sys.executable else words[0], *words[1:]])
        self.lines.append(line)
        for word in words:
            if word.startswith("hydra.run.dir="):
                final = {"seconds": 12.4, **({"val/accuracy": 0.98765} if "digits" in line else {})}
                write(Path(word.removeprefix("hydra.run.dir=")), loss=1.25, final=final)
            if word.endswith("scale.json"):
                rows = [[10.0, *[1.5] * 9], [100.0, *[3.0] * 9], [1000.0, *[4.5] * 9]]
                parts = [{"part": part, "rows": rows, "exponents": [0.25] * 9} for part in results.SCALES]
                Path(word).write_text(json.dumps({"machine": {"name": "cpu", "torch": "2.14.1"}, "results": parts}))
        out = 'log\n{"kills": 30, "inside_write": 7, "identical": true}'
        return results.subprocess.CompletedProcess(words, 0, stdout=out)


@pytest.fixture
def called(monkeypatch, tmp_path):
    found = Called()
    monkeypatch.setattr(results.subprocess, "run", found)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    return found


def test_the_table_and_the_tables_of_scale_are_written_from_what_their_commands_wrote(called, tmp_path):
    page = tmp_path / "results.md"
    shutil.copy(PAGE, page)
    (without_data,) = [
        line for line in page.read_text(encoding="utf-8").splitlines() if "tinyshakespeare.txt m" in line
    ]
    main(["--run", "table", "--page", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "| `python train.py` | val loss 1.250 nats/byte | 12 s |" in text
    assert "| `python train.py experiment=resnet_digits` | 98.77 % accuracy on the held-out fifth | 12 s |" in text
    assert "one thread | 98.77 %, 98.77 %, 98.77 % accuracy | 12 s, 12 s, 12 s |" in text
    assert "30 times, 7 of them while it writes a checkpoint |" in text
    assert f"\n{without_data}\n" in text
    main(["--run", "scale", "--page", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "## Scale of work\n\n```\npython benchmarks/scale.py\n```\n" in text
    assert "| 100 | 3 | 3 | 3 |\n| 1,000 | 4.5 | 4.5 | 4.5 |\n| grows as | ^0.25 | ^0.25 | ^0.25 |" in text
    commands = everything()["table"]
    trained = [line.partition(" hydra.run.dir=")[0] for line in called.lines]
    left = [command for command in commands if "tinyshakespeare" in command or "cifar10" in command]
    assert len(left) == 2
    assert trained[:-1] == [command for command in commands if command not in left]
    assert trained[-1].startswith("python benchmarks/scale.py --json ")


def test_nothing_is_trained_again_over_runs_that_are_there(called, tmp_path):
    (tmp_path / "multirun" / "healed").mkdir(parents=True)
    with pytest.raises(SystemExit, match="healed exists; fix: "):
        main(["--run", "--page", str(PAGE)])
    assert called.lines == []


def test_all_parts_are_run_in_the_order_of_the_page(monkeypatch, called):
    parts = []
    monkeypatch.setattr(results, "run_part", lambda name, page: parts.append(name))
    main(["--run", "--page", str(PAGE)])
    assert parts == ["table", "scale", *SECTIONS, "card"]


def made_card(folder, device="cuda:0"):
    """A folder of benchmarks/gpu.sh: a table of parts, two benchmarks, and a report of pytest."""
    folder.mkdir(exist_ok=True)
    machine = {"device": device, "name": "NVIDIA H100", "torch": "2.14.1"}
    quick = {"size": "gpt2", "precision": "bf16", "unit": "tokens", "what": "stabletrain, compiled", "rate": 305872.4}
    quick |= {"speed": [5.6, 5.5, 4.8], "mfu": 0.264, "memory": 19_200_000_000, "compile": 26.2}
    stall = {"workload": "gpt2, bf16", "what": "snapshot", "unit": "steps", "median": 0.66, "quartiles": [0.6, 0.7]}
    for name, result, targets in (("throughput", quick, {"throughput/gpt2_mfu": 0.264}), ("recovery", stall, {})):
        told = {"machine": machine, "results": [result], "targets": targets, "left_out": []}
        (folder / f"{name}.json").write_text(json.dumps(told))
    (folder / "parts.md").write_text("| part |\n|---|\n| fp8 | ran without width 4096 |\n")
    bad, skipped = '<testcase name="bad[1]"><failure/></testcase>', '<testcase name="b"><skipped/></testcase>'
    (folder / "tests.xml").write_text(f'<testsuite><testcase name="good"/>{bad}{skipped}</testsuite>')
    return folder


def test_the_section_on_a_card_has_what_was_measured_and_names_what_was_left_out(tmp_path):
    folder, page = made_card(tmp_path / "gpu-results"), tmp_path / "results.md"
    page.write_text("# Results\n\n## On a card\n\nNot measured yet.\n\n## Another\n\nafter\n")
    main(["--card", str(folder), "--page", str(page)])
    text = page.read_text()
    assert "on one NVIDIA H100, torch 2.14.1." in text
    assert "| gpt2 | bf16 | stabletrain, compiled | 305,872 tokens/s | 5.50 | 26.4 % | 19.2 | 26 |\n" in text
    assert "| gpt2, bf16 | snapshot | 0.66 | steps |" in text
    assert "| `throughput/gpt2_mfu` | 0.264 |" in text
    assert "| fp8 | ran without width 4096 |" in text
    assert "**tests**: 1 of 3 tests passed, 1 were skipped, 1 failed: `bad[1]`." in text
    assert "Not measured yet" not in text
    assert text.endswith("\n\n## Another\n\nafter\n")
    main(["--card", str(folder), "--page", str(page)])
    assert page.read_text() == text


def test_measurements_of_a_cpu_are_not_said_to_be_a_cards(tmp_path):
    page = tmp_path / "results.md"
    page.write_text("# Results\n\n## On a card\n\nbefore\n")
    with pytest.raises(SystemExit, match="was measured on cpu, not on a card"):
        main(["--card", str(made_card(tmp_path / "gpu-results", "cpu")), "--page", str(page)])
    with pytest.raises(SystemExit, match="has no measurement of benchmarks/gpu.sh"):
        main(["--card", str(tmp_path), "--page", str(page)])
    assert page.read_text().endswith("\n\nbefore\n")
    assert "\n## On a card\n" in PAGE.read_text(), "the page has a place for it"
