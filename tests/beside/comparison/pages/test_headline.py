"""The sentences that summarize a comparison: each is true, and is omitted if there is nothing to report."""

import pytest

from stabletrain.beside.comparison import frame_of
from stabletrain.beside.comparison.by_setting import settings_of
from stabletrain.beside.comparison.pages.headline import (
    best,
    diverged,
    fastest,
    headline,
    incidents,
    is_number,
    joined_names,
    name_of,
    sensitivities,
    status_counts,
    throughput,
)
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.runs import read_runs
from stabletrain.beside.comparison.reading.settings import distinguishing_keys
from tests.beside.comparison.made_pages import made


def run(folder, incidents=(), **settings):
    """Returns a run that has only a name, settings and incidents."""
    return Run(folder, "finished", None, {}, settings, True, {}, incidents=[*incidents])


@pytest.fixture
def runs(tmp_path):
    return [run(tmp_path / "s" / str(i), qknorm=norm, lr=0.1) for i, norm in enumerate(["none", "rmsnorm", "full"])]


def ended(*losses, **more):
    return [{"status": "finished", "val_loss": loss, **more} for loss in losses]


def test_the_best_run_is_the_finished_one_with_the_lowest_loss(runs):
    rows = ended(2.5, 1.5, 1.75)
    assert best(runs, rows, ["qknorm"]) == "Best: qknorm=rmsnorm, validation loss 1.5 nats."
    rows[1]["status"] = "running"
    rows[2]["val_accuracy"] = 0.9125
    assert best(runs, rows, ["qknorm"]) == "Best: qknorm=full, validation loss 1.75 nats, accuracy 91.25 %."
    assert best(runs[:1], [{**rows[0], "steps": 1200}], []) == "Validation loss 2.5 nats after 1,200 steps."


def test_a_sentence_says_that_no_run_has_finished(runs):
    running = [{"status": "running", "val_loss": 1.0}, *ended(float("nan"), None)]
    assert best(runs, running, ["qknorm"]) == "No run has finished with a validation loss yet."
    assert best([], [], []) == "There are no runs."


def test_with_several_seeds_the_best_setting_is_named_and_not_the_best_run(tmp_path):
    for place, (arm, seed, level) in enumerate([("a", 0, 1.0), ("a", 1, 3.0), ("b", 0, 1.4), ("b", 1, 1.6)]):
        made(tmp_path / "s" / str(place), f"stability={arm}", f"seed={seed}", level=level)
    runs = read_runs([tmp_path / "s"])
    found = frame_of(runs)
    sentences = headline(runs, found.to_dict("records"), [], distinguishing_keys(runs, but=()), settings_of(found))
    assert sentences[0] == (
        "Best setting: stability=b, 1.52 ± 0.14 nats (2 runs). Not told apart from it: stability=a, +0.5 (-11 to +12)."
    )
    assert not any("seed=" in each for each in sentences)


def test_sensitivities_that_seeds_do_not_tell_apart_are_not_ranked():
    arms = [
        {"name": "a", "sensitivity": 0.224, "loss": [2.0, 3.0], "by_seed": {"0": 0.20, "1": 0.224, "2": 0.248}},
        {"name": "b", "sensitivity": 0.228, "loss": [2.5, 2.75], "by_seed": {"0": 0.29, "1": 0.228, "2": 0.166}},
    ]
    assert (
        "Sensitivities to the learning rate are not told apart: from 0.224 to 0.228 nats; paired by seed, -0.21 to "
        in (sensitivities(arms))
    )
    arms[1]["by_seed"] = {"0": 0.30, "1": 0.325, "2": 0.348}
    assert "Least sensitive to the learning rate: a" in sensitivities(arms)


def test_a_run_is_named_by_the_settings_that_differ_or_by_its_folder_if_too_many_do(runs, tmp_path):
    assert name_of(runs[1], ["qknorm", "lr"]) == "qknorm=rmsnorm lr=0.1"
    assert name_of(runs[1], []) == "1"
    assert name_of(runs[1], [f"key{i}" for i in range(6)]) == "s/1"
    assert name_of(run(tmp_path / "damaged"), ["lr"]) == "damaged"


def test_runs_are_counted_by_status_unless_there_is_one_finished_run():
    rows = [{"status": state} for state in ("finished", "halted", "finished")]
    assert status_counts(rows) == "3 runs: 2 finished, 1 halted."
    assert status_counts(rows[1:2]) == "1 run: 1 halted."
    assert status_counts(rows[:1]) == ""


def test_three_diverged_runs_are_named_and_the_others_counted(runs):
    rows = [{"diverged": i != 1} for i in range(3)]
    assert diverged(runs, rows, ["qknorm"]) == "2 diverged: qknorm=none; qknorm=full."
    assert diverged(runs, [{}] * 3, ["qknorm"]) == ""
    assert diverged(runs[:1], rows[:1], []) == "The run diverged."
    many = diverged(runs * 400, [{"diverged": True}] * 1200, ["qknorm"])
    assert many == "1,200 diverged: qknorm=none; qknorm=rmsnorm; qknorm=full and 1,197 more."


def test_incidents_are_counted_by_cause_with_the_most_common_first(tmp_path):
    causes = [{"cause": "bad_batch"}, {"cause": None, "kind": "spike"}, {"cause": "bad_label"}, {"cause": "bad_label"}]
    first, second = run(tmp_path / "0", causes[:3]), run(tmp_path / "1", causes[3:])
    assert incidents([first, second]) == "4 incidents in 2 runs: bad_label (2); bad_batch (1); spike (1)."
    assert incidents([second]) == "1 incident: bad_label (1)."
    assert incidents([run(tmp_path / "2")]) == "No incidents."


def test_the_arms_least_and_most_sensitive_to_the_learning_rate_are_named():
    losses = {"a": [2.0, 3.0], "b": [2.5, 2.75], "c": [1.0], "d": [1.75, 5.75]}
    known = {"a": 0.5, "b": 0.125, "c": None, "d": 2.0}
    arms = [{"name": name, "sensitivity": known[name], "loss": losses[name]} for name in losses]
    assert sensitivities(arms) == (
        "No setting is best at every learning rate. a has the lowest mean final loss, 2.5 nats. Least sensitive to the "
        "learning rate: b (0.125 nats); most sensitive: d (2.000)."
    )
    # Evenly bad, and therefore least sensitive: the sentence must not recommend it.
    arms[1]["loss"] = [4.0, 4.25]
    assert "Least sensitive to the learning rate: b (0.125 nats, but a is better at every rate); " in sensitivities(
        arms
    )
    assert sensitivities([arms[1], arms[0]]).startswith(
        "a has the lowest final loss at every learning rate, 2.5 nats on average. "
    )
    assert sensitivities([arms[0], {**arms[0], "name": "e"}]) == (
        "No setting is best at every learning rate. a has the lowest mean final loss, 2.5 nats."
    )
    assert sensitivities(arms[1:3]) == ""


def test_throughput_is_the_median_by_card_and_precision():
    rows = [{"card": card, "precision": "bf16", "unit": "tokens", "units_per_s": rate} for card, rate in
            [("a", 1.0), ("a", 9.0), ("a", 2.0), ("b", 4.0), ("b", 6.0), ("b", None)]]  # fmt: skip
    assert [(g["card"], g["median"], g["lowest"], g["highest"], g["runs"]) for g in throughput(rows)] == [
        ("b", 5.0, 4.0, 6.0, 2),
        ("a", 2.0, 1.0, 9.0, 3),
    ]


def test_the_fastest_card_is_named_only_if_the_rates_share_a_unit():
    def row(card, rate, unit="tokens"):
        return {"card": card, "precision": "bf16", "unit": unit, "units_per_s": rate}

    rows = [row("H200", 6000.0), row("V100", 1500.0)]
    assert fastest(rows) == "Fastest: H200 in bf16, 6,000 tokens per second, 4 times as fast as V100 in bf16."
    assert fastest(rows[:1]) == ""
    assert fastest([rows[0], row("V100", 1500.0, "images")]) == ""


def test_a_number_is_finite_and_not_a_bool():
    assert [is_number(value) for value in (1, 0.5, True, None, "1", float("nan"), float("inf"))] == [
        True,
        True,
        *[False] * 5,
    ]


def test_names_omitted_from_a_list_are_counted():
    names = ["a", "b", "c", "d", "e"]
    assert joined_names(names[:3]) == "a; b; c"
    assert joined_names(names) == "a; b; c and 2 more"
    assert joined_names(names[:4], 2000) == "a; b; c and 1,997 more"
