"""The runs of a command line, as they would be submitted: expanded as Hydra does, with a word on what each card can."""

import os
import shlex

import pytest

from stabletrain.beside.slurm.request import read_cluster
from stabletrain.beside.slurm.runs import data_notes, environment_notes
from stabletrain.errors import ConfigError

UNHINTED = ("stability=v100", "precision=fp32", "experiment=resnet_digits")
"""What a user chooses that makes the preset for a V100 needless."""


@pytest.mark.slow
def test_a_v100_is_told_of_its_preset_unless_it_has_chosen(launch):
    hint = "v100 trains in fp16: stability=v100 is the preset"
    assert hint in launch("--dry-run", "--gpu", "v100")[2]
    assert hint in launch("--dry-run", "-m", "--gpu", "a100,v100", "seed=0,1")[2]
    for card, typed in [*(("v100", each) for each in UNHINTED), ("a100", "precision=bf16")]:
        (cost,) = launch("--dry-run", "--gpu", card, typed)[2].splitlines()
        assert cost.startswith(f"cost     {card}: ")


@pytest.mark.slow
def test_a_card_without_fp8_is_told_that_it_will_be_emulated(launch):
    told = launch("--dry-run", "--gpu", "a100,h100", "-m", "precision=fp8", "seed=0,1")[2]
    assert told.count("note") == 1
    assert "a100 has no fp8 (compute capability 8.0): it is emulated, slower than precision=bf16" in told
    assert "fp8" not in launch("--dry-run", "--gpu", "a100", "precision=bf16")[2]


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("[v100]", True),
        ("[DEFAULT]\nenvironment = source a\n[v100]", True),
        ("[DEFAULT]\nenvironment = source a\n[v100]\nenvironment = source b", False),
        ("[v100]\npython = ~/v100/bin/python", False),
        ("[v100]\nmodules = pytorch/2.14-cu126", False),
        ("[t4]", False),
        ("[p100]", True),
    ],
)
def test_a_card_without_a_default_build_needs_an_environment_of_its_own(tmp_path, section, told):
    (tmp_path / "cluster.conf").write_text(section)
    card = section.rpartition("[")[2].partition("]")[0]
    notes = environment_notes([read_cluster(tmp_path / "cluster.conf", card)])
    assert bool(notes) is told
    if card == "v100" and told:
        assert notes == [
            "note     v100 has compute capability 7.0, which PyTorch's default builds no longer support: make an "
            'environment with pip install "torch<2.15" torchvision --index-url https://download.pytorch.org/whl/cu126, '
            "and activate it in the section [v100] of cluster.conf"
        ]


def test_a_dry_run_tells_of_the_environment(launch, tmp_path):
    file = tmp_path / "cluster.conf"
    assert "note " not in launch("--dry-run", "--gpu", "v100", "stability=v100")[2]
    file.write_text(file.read_text().replace("environment = source ~/v100/bin/activate", ""))
    assert launch("--dry-run", "--gpu", "v100", "stability=v100")[2].startswith("note     v100 has compute capability")


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


def test_a_pipe_as_the_cluster_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "cluster.conf")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cluster(tmp_path / "cluster.conf", "a100")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (None, "data.path is not set: data=text needs data.path="),
        ("my.txt", ""),
        ("*.txt", ""),
        ("[b].txt", ""),
        ("my.tx", "data.path=my.tx does not exist: did you mean my.txt?"),
        ("*.md", "note     data.path=*.md was not found here: it must be there on the nodes"),
        ("/nope", "data.path=/nope does not exist"),
        ("/scratch/mine/corpus", "note     data.path=/scratch/mine/corpus was not found here"),
    ],
)
def test_the_path_of_the_data_is_looked_at_if_it_must_lie_here(tmp_path, monkeypatch, path, told):
    monkeypatch.chdir(tmp_path)
    for name in ("my.txt", "[b].txt"):
        (tmp_path / name).write_text("text")
    try:
        found = "".join(data_notes("text", {"path": path}))
    except ConfigError as error:
        found = str(error)
    assert found.startswith(told)
    assert bool(found) == bool(told)
    assert data_notes("stdlib", {}) == []
