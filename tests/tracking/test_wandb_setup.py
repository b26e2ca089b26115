"""The default group, name, job type and tags of a run in W&B."""

from pathlib import Path

import pytest

from stabletrain.tracking.wandb_setup import LONGEST_NAME, LONGEST_TAG, card_of, name_of, sweep_of, tags_of


@pytest.mark.parametrize(
    ("folder", "sweep"),
    [
        ("multirun/2026-11-21/16-45-39/3", "2026-11-21_16-45-39"),
        ("multirun/2026-11-21/16-45-39/a100/3", "2026-11-21_16-45-39"),
        ("mine/grid/3", "grid"),
        (f"mine/{'x' * 300}/3", "x" * LONGEST_NAME),
    ],
    ids=["hydra", "cards", "own", "long"],
)
def test_a_sweep_is_known_by_its_folder(folder, sweep):
    assert sweep_of(Path(folder), sweeping=True) == sweep
    assert sweep_of(Path(folder), sweeping=False) is None


def test_a_job_of_an_array_is_part_of_a_sweep_though_hydra_does_not_know(tmp_path):
    (tmp_path / "multirun.yaml").touch()
    assert sweep_of(tmp_path / "3", sweeping=False) == tmp_path.name


def test_a_run_of_a_sweep_is_named_by_what_is_its_own(tmp_path):
    (tmp_path / "multirun.yaml").write_text(
        "hydra:\n  overrides:\n    task:\n    - steps=40\n    - 'faults.at=[30]'\n    - qknorm=none,layernorm\n"
    )
    typed = ["steps=40", "faults.at=[30]", "qknorm=layernorm", "+wandb.tags=[x]", "hydra.verbose=true", "seed=1"]
    assert name_of(tmp_path / "3", typed) == "3 qknorm=layernorm seed=1"
    assert len(name_of(tmp_path / "3", ["data.path=" + "x" * 300])) == LONGEST_NAME


def test_tags_are_choices_by_name_and_never_longer_than_wandb_takes():
    choices = {"precision": "bf16", "model": "team/" + "x" * 100, "wandb": "offline", "extra": None, "zloss": "none"}
    tags = tags_of(choices, ["mine", "precision:bf16", "y" * 100])
    assert tags[:2] == ["mine", "precision:bf16"]
    assert tags[-1] == "zloss:none"
    assert len(tags) == 5
    assert all(1 <= len(tag) <= LONGEST_TAG for tag in tags)


def test_the_card_is_the_one_it_ran_on():
    assert card_of({"name": "NVIDIA H200", "device": "cuda:0"}) == "NVIDIA H200"
    assert card_of({"name": "cpu"}) == card_of({}) == "cpu"
