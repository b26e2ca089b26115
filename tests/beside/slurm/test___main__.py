"""`slurm/launch.sh` without Slurm: the jobs it submits, the folders it creates, and the run it resumes."""

import json
import os
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from stabletrain.beside.slurm import __main__ as launching
from stabletrain.beside.slurm.__main__ import plan_jobs, resumed_arguments, submit
from stabletrain.beside.slurm.request import Card, read_request
from stabletrain.beside.slurm.script import Job, script
from stabletrain.config.arguments import parse_arguments
from stabletrain.errors import ConfigError, StabletrainError
from tests.beside.slurm.given import options
from tests.beside.slurm.stand_ins import stand_in
from tests.runs import composed


def test_a_dry_run_touches_nothing(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch("--dry-run", "-m", "seed=0,1")[0] == 0
    assert not os.listdir()


def test_without_sbatch_the_launch_fails_with_a_message(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = launch()
    assert code == 2
    assert "there is no sbatch here" in err
    assert not os.listdir()


def test_the_error_of_sbatch_is_reported(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition specified: big' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, _, err = launch("--gpu", "a100")
    assert code == 1
    assert err.startswith("slurm/launch.sh: sbatch refused the job on a100: invalid partition specified: big")


def test_a_sweep_runs_on_each_card(launch, tmp_path, monkeypatch):
    submitted = tmp_path / "submitted"
    stand_in(tmp_path, "sbatch", f'echo "$@" >> {submitted}; echo 7')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sweep = ["--gpu", "a100,v100", "--parallel-jobs", "3", "-m", "seed=0,1", "hydra.sweep.dir=s"]
    assert launch(*sweep)[0] == 0
    assert submitted.read_text().split() == [
        w for card in ("a100", "v100") for w in ("--parsable", f"s/{card}/slurm.sh")
    ]
    for card in ("a100", "v100"):
        script = Path(f"s/{card}/slurm.sh").read_text()
        assert options(script)["array"] == "0-1%3"
        assert options(script)["output"] == f"{os.getcwd()}/s/{card}/%a/slurm.log"
        assert sorted(os.listdir(f"s/{card}")) == ["0", "1", "multirun.yaml", "slurm.json", "slurm.sh"]


def test_two_launches_in_the_same_second_take_two_folders(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "echo 7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for typed in (["-m", "seed=0,1", "hydra.sweep.dir=${now:%Y}"], ["seed=0", "hydra.run.dir=${now:%Y}"]):
        assert launch(*typed)[0] == 0
    year, second = sorted(os.listdir())
    assert second == f"{year}-2"
    assert sorted(os.listdir(year)) == ["0", "1", "multirun.yaml", "slurm.json", "slurm.sh"]
    assert "slurm.sh" in os.listdir(second)
    assert f"folder={year}-3" in launch("--dry-run", "seed=0", "hydra.run.dir=${now:%Y}")[1]
    assert sorted(os.listdir()) == [year, second]


def test_a_folder_that_another_launch_takes_in_the_meantime_is_left_to_it(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "echo 7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def taken(job, request):
        job.folder.mkdir(exist_ok=True)
        monkeypatch.setattr(launching, "script", script)
        return script(job, request)

    monkeypatch.setattr(launching, "script", taken)
    assert launch("seed=0", "hydra.run.dir=${now:%Y}")[0] == 0
    year, mine = sorted(os.listdir())
    assert mine == f"{year}-2"
    assert not os.listdir(year)
    assert f"folder={mine}" in Path(mine, "slurm.sh").read_text()


@pytest.mark.slow
def test_resume_finds_the_same_command_and_a_folder_in_use_is_refused(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "echo 7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch("-m", "seed=0,1")[0] == 0
    [folder] = [f"multirun/{day}/{time}" for day in os.listdir("multirun") for time in os.listdir(f"multirun/{day}")]
    assert f"folder={folder}/" in launch("--dry-run", "-m", "seed=0,1", "resume=auto")[1]
    assert f"folder={folder}/" not in launch("--dry-run", "-m", "seed=0,1,2", "resume=auto")[1]
    Path(folder, "0", "run.json").write_text('{"status": "finished"}')
    left = launch("--dry-run", "-m", "seed=0,1", "resume=auto")[1]
    assert options(left)["array"] == "1"
    assert "0) overrides" not in left
    both = launch("--dry-run", "-m", f"resume={folder}", "steps=500")[1]
    assert f"folder={folder}/" in both
    assert "1) overrides=(seed=1 steps=500)" in both
    run = {"overrides": ["seed=5"], "options": []}
    os.makedirs("mine/checkpoints")
    with open("mine/run.json", "w") as file:
        json.dump(run, file)
    assert "overrides=(seed=5 steps=7)" in launch("--dry-run", "resume=mine", "steps=7")[1]
    code, _, err = launch("hydra.run.dir=mine")
    assert code == 2
    assert "mine already holds a run: continue it with resume=auto, or choose another hydra.run.dir" in err


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Changes to an empty folder, with a `sbatch` that accepts every job; returns the folder."""
    stand_in(tmp_path, "sbatch", "echo '7;cluster'")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def write_runs(folder, *statuses):
    """Writes a sweep folder with one run per status; None stands for a run that never started."""
    for number, status in enumerate(statuses):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
        if status:
            (folder / str(number) / "run.json").write_text(json.dumps({"status": status}))


def test_submitting_creates_a_folder_for_each_task_and_keeps_the_script(home, capsys):
    job = Job(Card("a100"), Path("s"), [0, 2], [["seed=0"], ["seed=1"], ["seed=2"]], [], home)
    submit(job, "#!/bin/bash\n", None, before=0)
    assert sorted(os.listdir("s")) == ["0", "2", "slurm.json", "slurm.sh"]
    assert Path("s/slurm.sh").read_text() == "#!/bin/bash\n"
    assert capsys.readouterr().out == "job      7 on a100, 2 tasks, log s/<n>/slurm.log\n"


def test_the_error_of_sbatch_says_how_many_jobs_are_submitted_already(home):
    stand_in(home.parent, "sbatch", "echo 'sbatch: error: no such\n partition' >&2; exit 1")
    job = Job(Card("a100"), Path("r"), None, [["seed=0"]], [], home)
    said = r"on a100: no such partition \(2 of the sweep's jobs are submitted already\); its script is r/slurm.sh"
    with pytest.raises(StabletrainError, match=said):
        submit(job, "", None, before=2)


def test_a_resumed_sweep_leaves_out_the_runs_that_are_done(home, capsys):
    request = read_request(["-m", "seed=0,1", "hydra.sweep.dir=s", "resume=auto"])
    write_runs(home / "s", "finished", "running")
    (job,), runs = plan_jobs(request, [Card("any")])
    assert (job.tasks, len(runs.overrides), job.folders) == ([1], 2, [Path("s/1")])
    (home / "s" / "1" / "run.json").write_text('{"status": "halted"}')
    assert plan_jobs(request, [Card("any")])[0] == []


def test_a_sweep_resumed_by_its_name_queues_what_is_left_or_with_other_settings_all(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "echo 7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch("-m", "seed=0,1,2", "hydra.sweep.dir=s")[0] == 0
    write_runs(Path("s"), "finished", None, "running")
    for typed in ([], ["seed=0,1,2"]):
        assert options(launch("--dry-run", "-m", "resume=s", *typed)[1])["array"] == "1-2"
    assert options(launch("--dry-run", "-m", "resume=s", "steps=2000")[1])["array"] == "0-2"
    code, _, err = launch("resume=s")
    assert (code, err) == (2, "slurm/launch.sh: resume=s is the folder of a sweep: add -m\n")
    write_runs(Path("s"), "finished", "finished", "halted")
    code, out, err = launch("-m", "resume=s")
    assert (code, out, err) == (0, "", "every run in s is done: there is nothing to continue\n")


def test_each_card_gets_the_runs_that_it_can_do_and_none_twice(launch):
    typed = ["--dry-run", "-m", "--gpu", "a100,v100", "precision=auto,bf16,fp16", "seed=0,1", "hydra.sweep.dir=s"]
    code, _, err = launch(*typed)
    assert code == 2
    assert err.rstrip().endswith("; --skip-unsupported leaves out such runs and queues the others")
    code, out, err = launch("--skip-unsupported", "--qos", "high", "--dependency", "afterok:3", *typed)
    assert code == 0
    assert [options(each)["array"] for each in out.split("#!/")[1:]] == ["2-5", "4-5"]
    assert options(out)["qos"] == "high"
    assert options(out)["dependency"] == "afterok:3"
    assert (
        "note     v100: 2 of 6 runs left out, which it cannot do: 2 (precision=bf16 seed=0), 3 (precision=bf16" in err
    )
    assert "note     a100: 2 of 6 runs left out, equal to others there: 0 (precision=auto seed=0), 1 (precision" in err
    typed = ["--dry-run", "-m", "--gpu", "v100", "--skip-unsupported", "precision=bf16,tf32"]
    assert "--gpu v100: none of the 2 runs can be done there" in launch(*typed)[2]
    assert "--skip-unsupported: without -m there is one run" in launch("--dry-run", "--skip-unsupported")[2]


def test_a_sweep_that_is_larger_than_slurm_takes_is_refused_with_its_parts(launch, tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", "exit 9")
    stand_in(tmp_path, "scontrol", "echo 'MaxArraySize            = 3'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, _, err = launch("-m", "seed=range(0,4)", "hydra.run.dir=r")
    assert code == 2
    assert (
        "a sweep of 4 runs is above this cluster's MaxArraySize, 3: submit parts of at most that many runs, such as "
        in err
    )
    assert "seed=range(0,3) and then seed=range(3,4)" in err
    assert not os.listdir()
    stand_in(tmp_path, "sbatch", "echo 7")
    assert launch("-m", "seed=range(0,3)", "hydra.sweep.dir=s")[0] == 0


def test_a_new_run_in_the_folder_of_another_is_refused(home):
    write_runs(home, "finished")
    with pytest.raises(
        ConfigError, match="0 already holds a run: continue it with resume=auto, or choose another hydra"
    ):
        plan_jobs(read_request(["seed=0", "hydra.run.dir=0"]), [Card("any")])


def test_without_a_run_to_resume_a_new_run_starts(home, capsys):
    for typed in (["seed=1"], ["seed=1", "resume=none"]):
        assert resumed_arguments(read_request(typed))[:2] == (parse_arguments(["seed=1"]), None)
    assert resumed_arguments(read_request(["seed=1", "resume=auto"])).folder is None
    assert "resume=auto: no earlier run of this command found here; starting a new run\n" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_arguments_and_adds_the_new_ones(home):
    (home / "mine").mkdir()
    (home / "mine" / "run.json").write_text(json.dumps({"overrides": ["seed=5", "steps=3"], "options": []}))
    arguments, folder, _ = resumed_arguments(read_request(["resume=mine", "steps=7"]))
    assert (arguments.value("seed"), arguments.value("steps"), folder) == ("5", "7", Path("mine"))
    assert resumed_arguments(read_request(["hydra.run.dir=mine", "resume=auto"]))[1] == Path("mine")


@pytest.mark.parametrize(
    ("typed", "mark"), [(["resume=gone"], "gone/run.json"), (["-m", "resume=gone"], "gone/multirun.yaml")]
)
def test_resuming_a_folder_without_a_run_is_refused(home, typed, mark):
    with pytest.raises(ConfigError, match=f"there is no {mark}: use auto, or a folder that was begun"):
        resumed_arguments(read_request(typed))


def test_a_resume_that_the_table_refuses_is_refused_before_anything_is_queued(launch):
    with composed("seed=5") as cfg:
        os.makedirs("mine/checkpoints")
        os.makedirs("mine/.hydra")
        OmegaConf.save(cfg, "mine/.hydra/config.yaml")
        choices = dict(HydraConfig.get().runtime.choices)
    OmegaConf.save({"hydra": {"runtime": {"choices": choices}}}, "mine/.hydra/hydra.yaml")
    Path("mine/run.json").write_text(json.dumps({"overrides": ["seed=5"], "options": []}))
    code, _, err = launch("--dry-run", "resume=mine", "model.n_layer=9")
    assert code == 2
    assert "model.n_layer=9: the run in mine has model.n_layer=4, which a resume cannot change" in err
    code, out, _ = launch("--dry-run", "resume=mine", "optimizer=sgd")
    assert code == 0
    assert "overrides=(seed=5 optimizer=sgd)" in out
