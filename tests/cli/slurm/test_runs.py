"""The runs of a command line, as they would be submitted: expanded as Hydra does, with a word on what each card can."""

import shlex

import pytest


@pytest.mark.slow
def test_a_v100_is_told_of_its_preset_unless_it_has_chosen(launch):
    hint = "v100 trains in fp16: stability=v100 is the preset"
    assert hint in launch("--dry-run", "--gpu", "v100")[2]
    assert hint in launch("--dry-run", "-m", "--gpu", "a100,v100", "seed=0,1")[2]
    for typed in ("stability=v100", "precision=fp32", "experiment=resnet_digits"):
        assert launch("--dry-run", "--gpu", "v100", typed)[1:][1] == ""
    assert launch("--dry-run", "--gpu", "a100", "precision=bf16")[2] == ""


def test_a_sweep_in_an_experiments_file_is_expanded_as_hydra_does(launch, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    params = "hydra:\n  sweeper:\n    params:\n      seed: range(0,3)\n      optimizer.lr: 1e-3,1e-2\n"
    (tmp_path / "mine" / "experiment" / "grid.yaml").write_text(f"# @package _global_\n{params}")
    code, out, _ = launch(
        "--dry-run", "-m", "--config-dir", "../mine", "experiment=grid", "optimizer.lr=5e-1", "steps=9"
    )
    assert code == 0
    runs = [
        shlex.split(line.strip()[len("0) overrides=(") : -len(") ;;")])
        for line in out.splitlines()
        if ") overrides" in line
    ]
    assert runs == [[f"seed={seed}", "optimizer.lr=0.5", "experiment=grid", "steps=9"] for seed in range(3)]
    assert "train.py --config-dir ../mine" in out
