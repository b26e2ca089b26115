"""GPU-hours of a request are steps times the time of a step that a run like it has measured, or unknown."""

import json
import os
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from stabletrain.beside.slurm.gpu_hours import agree, deciding, measurements
from stabletrain.config.resuming import Settings
from tests.beside.slurm.given import options
from tests.beside.slurm.stand_ins import stand_in
from tests.runs import composed

A100 = {"name": "NVIDIA A100-SXM4-80GB"}


def measured(folder, *overrides, pace=0.5, steps=20, **record):
    """Writes a finished run on four A100, with a line at each step of `pace` seconds, but for a slow first one."""
    with composed(*overrides, f"steps={steps}") as cfg:
        (folder / ".hydra").mkdir(parents=True)
        OmegaConf.save(cfg, folder / ".hydra" / "config.yaml")
        choices = dict(HydraConfig.get().runtime.choices)
    OmegaConf.save({"hydra": {"runtime": {"choices": choices}}}, folder / ".hydra" / "hydra.yaml")
    whole = {"status": "finished", "hardware": A100, "starts": [{"time": "", "gpus": 4}], "final": {"steps": steps}}
    (folder / "run.json").write_text(json.dumps(whole | record))
    lines = [{"step": step, "time": 100 + pace * step + 60 * (step > 1)} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_dry_run_says_gpu_hours_or_what_to_do(launch):
    typed = ["--dry-run", "--gpu", "a100,h100", "-m", "model=gpt_nano,gpt_mini", "seed=0,1", "steps=900"]
    err = launch(*typed)[2]
    assert "cost     a100: GPU-hours unknown: run one with --test\n" not in err.partition("cost     a100")[0]
    assert "cost     a100: GPU-hours unknown: run one with --test\n" in err
    measured(Path("outputs/2026-01-01/10-00-00"), "model=gpt_nano", "optimizer.lr=0.5", "seed=7")
    err = launch(*typed)[2]
    # 2 runs x 900 steps x 0.5 s x 4 GPUs
    assert "cost     a100: at least 1 GPU-hours, 0.5 s a step in outputs/2026-01-01/10-00-00; unknown for 2 of 4" in err
    assert "such as model=gpt_mini seed=0 steps=900: run one with --test\n" in err
    assert "cost     h100: process-hours unknown: run one with --test\n" in err, "its section requests no gres"
    measured(Path("multirun/2026-01-01/11-00-00/3"), "model=gpt_mini", pace=1.0)
    assert "cost     a100: about 3 GPU-hours without evaluations and checkpoints, " in launch(*typed)[2]


CHANGES = {
    "unfinished": {"status": "running"},
    "another card": {"hardware": {"name": "NVIDIA H100"}},
    "other gpus": {"starts": [{"time": "", "gpus": 1}]},
    "too few steps": {"final": {"steps": 19}},
    "nothing": {},
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_a_finished_run_on_the_same_gpus_counts(tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    measured(Path("outputs/day/time"), **CHANGES[change])
    found = measurements(Path("multirun/day/other"), "a100", 4)
    assert [each.seconds for each in found] == ([pytest.approx(0.5)] if change == "nothing" else [])


def test_the_section_that_a_run_was_submitted_with_counts_more_than_the_name_of_its_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = measured(Path("sweep/3"))
    (folder.parent / "slurm.json").write_text(
        json.dumps({"jobs": [{"job": "7", "gpu": "big", "runs": {}, "tasks": {}}]})
    )
    assert [len(measurements(Path("other"), gpu, 4)) for gpu in ("a100", "big")] == [0, 1]


def test_the_newest_run_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, pace in enumerate((1.0, 2.0)):
        file = measured(Path(f"outputs/day/{number}"), pace=pace) / "run.json"
        os.utime(file, (1e9 + number, 1e9 + number))
    assert measurements(Path("other"), "a100", 4)[0].seconds == 2.0


def test_settings_decide_if_the_time_of_a_step_depends_on_them():
    base = {"model": {"n_embd": 8, "_target_": "A"}, "batch_size": 16, "optimizer": {"lr": 0.1}, "seed": 0}
    known = deciding(Settings({"model": "gpt_nano", "optimizer": "adamw"}, base))
    for same in ({"seed": 1}, {"optimizer": {"lr": 0.2}}, {"steps": 9}, {"model": {"n_embd": 8, "new": 1}}):
        assert agree(known, deciding(Settings({"model": "gpt_nano", "optimizer": "adamw"}, base | same)))
    for other in ({"batch_size": 8}, {"model": {"n_embd": 9}}):
        assert not agree(known, deciding(Settings({"model": "gpt_nano", "optimizer": "adamw"}, base | other)))
    for choices in ({"model": "gpt_mini", "optimizer": "adamw"}, {"model": "gpt_nano", "optimizer": "muon"}):
        assert not agree(known, deciding(Settings(choices, base)))


def test_a_test_is_one_short_job_of_the_first_run_in_a_folder_of_its_own(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "echo 7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sweep = ["-m", "seed=3,4", "hydra.sweep.dir=s", "steps=500", "warmup.steps=100"]
    code, out, _ = launch("--test", "--gpu", "a100", *sweep)
    assert code == 0
    assert "with --dry-run in place of --test" in out
    assert sorted(os.listdir()) == ["outputs"]
    [file] = Path("outputs").glob("*/*/slurm.sh")
    script = file.read_text()
    assert "array" not in options(script)
    assert (
        "overrides=(seed=3 steps=20 log_every=1 eval_every=20 eval_batches=1 wandb=disabled warmup.steps=10)" in script
    )
    assert json.loads(file.with_name("slurm.json").read_text())["jobs"][0]["gpu"] == "a100"
    both = launch("--dry-run", "--test", "--skip-unsupported", "--gpu", "a100,v100", "-m", "precision=bf16,fp16")[1]
    assert ["precision=bf16 " in each for each in both.split("#!/")[1:]] == [True, False]
    code, _, err = launch("--test", "resume=auto")
    assert (code, err) == (2, "slurm/launch.sh: --test: it is a new run: leave out resume\n")
