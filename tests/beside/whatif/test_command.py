"""The command as a user types it: the table, the files, the command that goes on, and one message for bad input."""

import json
import math
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

import stabletrain
from stabletrain.beside.whatif import arm_run, driver
from stabletrain.beside.whatif.plan import WhatIfOptions, plan
from stabletrain.beside.whatif.ranking import finalists, rank
from stabletrain.cli.commands import main
from stabletrain.tracking.metrics import read_jsonl
from tests.beside.comparison.browser import browser, opened
from tests.beside.comparison.read_back import assert_curves
from tests.beside.whatif.given import STEPS
from tests.beside.whatif.test_ranking import ended
from tests.once import once
from tests.runs import python
from tests.shapes import differences, shape, strict

TYPED = ["--past", "30", "--steps", "30", "--best", "1"]


def typed(*words):
    return main(["whatif", *map(str, words)])


@pytest.fixture(scope="module")
def done(shared_run, tmp_path_factory):
    """A copy of the run after a what-if, and what it printed."""

    def make(place):
        run = shutil.copytree(shared_run, place / "run")
        ended = python(
            "-m", "stabletrain.cli.commands", "whatif", str(run), "--arms", "lr_half", "optimizer.lr=1e-3,zloss=palm",
            *TYPED, cwd=place,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        (place / "out.txt").write_text(ended.stdout)

    place = once(tmp_path_factory, "whatif_done", make)
    return place / "run", (place / "out.txt").read_text()


def folder_of(run):
    return run / "whatif" / "step-00000080"


def found_in(run):
    return json.loads((folder_of(run) / "whatif.json").read_text())


def losses(folder):
    lines = read_jsonl(folder / "metrics.jsonl")
    return {line["tick"]: repr(line["train/loss"]) for line in lines if "train/loss" in line}


def test_what_is_going_to_happen_is_said_with_its_price(done):
    _, out = done
    assert "trouble  steps 92 to 95: 4 skipped steps, 1 rollback: loss " in out
    assert "start    the state after step 80, which was not kept: computed again from step-00000060" in out
    # 95 + 30 - 80 steps for each of three arms, and 30 more for the best, and for nothing
    price = "20 steps to compute the state, first round 3 x 45 = 135 steps, second at most 2 x 30 = 60 steps; about "
    assert f"price    {price}" in out


def test_the_table_ranks_the_arms_and_the_files_have_the_same(done):
    run, out = done
    found = found_in(run)
    assert (found["start"], found["rounds"], found["compared_after"]) == (80, [125, 155], 125)
    ranked = [*found["arms"], *found["first_round_only"]]
    assert {each["arm"] for each in ranked} == {"nothing", "lr_half", "optimizer.lr=1e-3,zloss=palm"}
    table = re.findall(r"^( *\d?=?)  (\S+) +came back: 1 rollback, 4 skips +(\S+)", out, re.MULTILINE)
    assert [name for _, name, _ in table] == [each["arm"] for each in ranked]
    for each, (_, _, shown) in zip(ranked, table, strict=True):
        mean = each["difference"]["mean"]
        assert shown == ("0" if each["arm"] == found["reference"] else f"{mean:+.4f}")
        assert each["step"] == (155 if each in found["arms"] else 125)
        assert math.isfinite(each["val_loss"])
    assert found["verdict"] in out
    assert {"nothing", found["winner"]} <= {each["arm"] for each in found["arms"]}


def test_a_difference_is_that_of_the_logged_losses(done):
    # All arms roll back in the same way, over 17 batches, so the same step reads the same batch.
    run, _ = done
    found = found_in(run)
    for each in [*found["arms"], *found["first_round_only"]]:
        batch, last = (125, 155) if each in found["arms"] else (95, 125)
        mine, other = (
            {line["step"]: line["train/ce"] for line in read_jsonl(folder_of(run) / name / "metrics.jsonl")
             if "train/ce" in line and not line.get("rolled_back") and batch <= line["step"] - 1 + 17 < last + 17}
            for name in (found["reference"], each["folder"].rpartition("/")[2])
        )  # fmt: skip
        mine = {step: mine[step] for step in other}
        assert each["difference"]["count"] == len(other) > 40
        assert each["difference"]["mean"] == pytest.approx(sum(other[s] - mine[s] for s in mine) / len(mine))
        assert bool(each["difference"]["mean"]) == (each["arm"] != found["reference"])


@pytest.mark.slow
def test_the_command_that_goes_on_is_the_winner_and_the_run_in_a_new_folder(done, tmp_path):
    run, out = done
    found = found_in(run)
    assert f"continue {found['command']}" in out
    words = shlex.split(found["command"])
    assert words[:2] == ["stabletrain", "train"]
    new = stabletrain.train([*words[2:], f"hydra.run.dir={tmp_path / 'new'}"]).folder
    winner = next(each for each in found["arms"] if each["arm"] == found["winner"])
    then, now = losses(folder_of(run) / winner["folder"].rpartition("/")[2]), losses(new)
    assert len(now) > 5
    assert {tick: loss for tick, loss in now.items() if tick in then}.items() <= then.items()
    record = json.loads((new / "run.json").read_text())
    assert (record["status"], record["final"]["steps"]) == ("finished", STEPS)
    keys = {key for change in record.get("changes", []) for key in change["keys"]}
    assert not keys & {"log_every", "eval_every", "checkpoint.keep"}, "only the winner's overrides are changed"


def test_the_page_has_the_ranking_and_the_curves_from_the_fork_on(done):
    run, _ = done
    text = (folder_of(run) / "whatif.html").read_text()
    found = found_in(run)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [arm["name"] for arm in data["arms"]] == [
        each["arm"] for each in [*found["arms"], *found["first_round_only"]]
    ]
    assert all(arm["curves"]["train/loss"]["x"][0] == 81 for arm in data["arms"])
    folders = [Path(each["folder"]) for each in [*found["arms"], *found["first_round_only"]]]
    assert all("val/loss" in assert_curves(arm, folder) for arm, folder in zip(data["arms"], folders, strict=True))
    for words in (found["verdict"], "optimizer.lr=1e-3 zloss=palm", "Continue the run"):
        assert words in text
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text)


@pytest.mark.slow
def test_the_page_is_drawn_in_a_browser(done):
    run, _ = done
    with browser() as page, opened(page, folder_of(run) / "whatif.html") as shown:
        assert shown.locator("#legend li").count() == 3
        assert shown.locator(".plot canvas").count() >= 4


def test_the_same_command_again_runs_nothing_and_prints_json_if_asked_to(done, monkeypatch, capsys, tmp_path):
    run = shutil.copytree(done[0], tmp_path / "run")
    first = found_in(run)
    monkeypatch.setattr("stabletrain.beside.whatif.arm_run.train_until", None)
    monkeypatch.setattr("stabletrain.beside.whatif.start.train_until", None)
    assert typed(run, "--arms", "lr_half", *TYPED, "optimizer.lr=1e-3,zloss=palm", "--json") == 0
    again, seen = found_in(run), capsys.readouterr()
    assert strict(seen.out) == again
    assert not [*differences(again, shape("whatif"))]
    assert again["verdict"] in seen.err, "what is said beside it goes to standard error"
    for each in (first, again):  # the copy lies elsewhere
        for arm in [*each["arms"], *each["first_round_only"]]:
            arm["folder"] = arm["folder"].rpartition("/")[2]
    assert again["arms"] == first["arms"]
    assert again["first_round_only"] == first["first_round_only"]


def test_the_arms_of_the_second_round_are_remembered(done, tmp_path):
    shutil.copy(folder_of(done[0]) / "first_round.json", tmp_path)
    kept = json.loads((tmp_path / "first_round.json").read_text())
    places = rank([ended(name) for name in kept["arms"]], 0)
    assert driver.recorded_finalists(tmp_path, places, 125, 1) == kept["going"]
    assert driver.recorded_finalists(tmp_path, places, 125, 2) == finalists(places, 2), "asked otherwise"


def test_a_list_says_of_every_arm_why_and_writes_nothing(run, monkeypatch, capsys):
    planned = plan(WhatIfOptions(run))  # takes seconds, so only once
    monkeypatch.setattr("stabletrain.beside.whatif.opening.plan", lambda options: planned)
    assert typed(run, "--list") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"arms from the state after step 80 of {run}; the trouble: steps 92 to 95\n")
    does, does_not = out.split("these do not:")
    assert re.search(r"^  qknorm +qknorm=layernorm: .*gains start at", does, re.MULTILINE)
    assert re.search(r"^  \S+ +.*named by the diagnosis or forecast", does, re.MULTILINE)
    assert re.search(r"^  beta2 +beta2 is 0.95, not above 0.95$", does_not, re.MULTILINE)
    assert typed(run, "--list", "--json") == 0
    found = strict(capsys.readouterr().out)
    assert not [*differences(found, shape("whatif --list"))]
    applies = {each["arm"]: each["applies"] for each in found["arms"]}
    assert (applies["qknorm"], applies["beta2"]) == (True, False)
    assert not (run / "whatif").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--past", "3"], "--past 3 is below 16; fix: --past 16 or more"),
        (["--steps", "5"], "--steps 5 is below 16; fix: "),
        (["--best", "0"], "--best 0 is below 1; fix: --best 1 or more"),
        (["--jobs", "0"], "--jobs 0 is below 1; fix: --jobs 1 or more"),
        (["--from", "soon"], "--from soon is not a step; fix: write --from step-500"),
        (["--from", "step-150"], "the arms would start after step 150, and the run ends at step 160"),
        (["--from", "step-200"], "--from step-200: "),
        (["--arms", "lr_haf"], "--arms lr_haf: there is no such arm; did you mean lr_half?"),
        (["seed=1"], "seed=1: an arm cannot change seed: the arms read identical batches; fix: leave it out"),
        (
            ["--arms", "lr_half", "optimizer.lr=fast"],
            "the arm optimizer.lr=fast does not apply: optimizer.lr=fast is not a number",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message(shared_run, capsys, words, said):
    assert typed(shared_run, *words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"stabletrain: {said}")
    assert shown.count("\n") == 1
    assert not (shared_run / "whatif").exists()


def test_what_is_no_run_and_an_unknown_option_are_refused(tmp_path, capsys):
    assert typed(tmp_path / "nowhere") == 2
    assert "does not exist; fix: name a run folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        typed(tmp_path, "--quick")
    assert ended.value.code == 2
    assert "unrecognized arguments: --quick" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["diagnose", str(tmp_path), "a=b"])


def test_two_at_once_are_refused(run, capsys):
    with driver.locked(folder_of(run)):
        assert typed(run, "--arms", "lr_half") == 2
    assert "another process runs this what-if; fix: wait for it" in capsys.readouterr().err


def test_a_signal_ends_it_with_the_states_saved_and_the_code_of_an_interrupted_run(run, capsys, monkeypatch):
    reached = arm_run.ReachedStep.__call__

    def signalled(self, job):
        if job.state.step == 62:
            signal.raise_signal(signal.SIGTERM)
        return reached(self, job)

    monkeypatch.setattr(arm_run.ReachedStep, "__call__", signalled)
    assert typed(run, "--arms", "lr_half", *TYPED, "--from", "step-60") == 75
    assert "stabletrain: the what-if was stopped, its states are saved; fix: type it again" in capsys.readouterr().err
    folder = run / "whatif" / "step-00000060"
    assert (folder / "nothing" / "checkpoints").is_dir()
    assert not (folder / "whatif.json").exists()


@pytest.mark.slow
def test_every_arm_that_applies_to_the_gpt_runs(run, capsys):
    assert typed(run, "--past", "16", "--steps", "0") == 0
    found = found_in(run)
    arms = {each["arm"]: each for each in found["arms"]}
    assert arms.keys() >= {
        *("nothing", "skip", "lr_half", "lr_fifth", "clip", "zclip", "qknorm", "qkclip", "zloss", "softcap"),
        *("stable_adamw", "moments"),
    }
    for name, each in arms.items():
        assert not each["broke"], name
        assert each["step"] == 111
        record = json.loads((folder_of(run) / each["folder"].rpartition("/")[2] / "run.json").read_text())
        changed = {key for change in record["changes"] for key in change["keys"]}
        for override in each["overrides"]:
            assert override.partition("=")[0] in changed, f"{name}: {override} is not in force"
