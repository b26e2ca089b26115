"""The command line: parsing, what `resume` becomes, and the command that continues a run."""

import json
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from stabletrain.config import trust
from stabletrain.config.arguments import (
    LAUNCH_VARIABLE,
    Arguments,
    check_folders,
    job_overrides,
    parse_arguments,
    program,
    quoted,
    recorded_arguments,
    resolve_resume,
    resume_command,
    sweep_arguments,
)
from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks
from tests.runs import composed


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder in which the commands are typed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_folder(folder, *overrides, options=(), checkpoint=True):
    """A run folder as `train.py` leaves it: `run.json`, and a checkpoint of step 4."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"options": list(options), "overrides": list(overrides)}))
    trust.remember_arguments(options, [each for each in overrides if not each.startswith("resume=")])
    if checkpoint:
        (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
        (folder / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")


def sweep_folder(folder, *overrides, options=("-m",)):
    """A sweep's folder with its `sweep.json`."""
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"options": list(options), "overrides": list(overrides)}))
    trust.remember_arguments([option for option in options if option != "-m"], overrides)


def resolved(*typed):
    """What `resume` becomes in a command line."""
    return resolve_resume(parse_arguments(list(typed)))


# ---- taken apart


def test_options_keep_their_values_wherever_they_stand():
    typed = ["seed=1", "--config-dir", "my_conf", "steps=5", "-m", "--cfg=job", "-cn", "other"]
    found = parse_arguments(typed)
    assert found == Arguments(["--config-dir", "my_conf", "-m", "--cfg=job", "-cn", "other"], ["seed=1", "steps=5"])
    assert found.sweeps
    assert not parse_arguments(["seed=1,2"]).sweeps


def test_the_last_override_of_a_key_wins_and_takes_the_last_place():
    assert parse_arguments(["+a=1", "b=2", "a=3"]).overrides == ["b=2", "a=3"]
    assert parse_arguments(["~guard", "guard=off"]).overrides == ["guard=off"]


def test_an_option_without_its_value_is_kept():
    assert parse_arguments(["seed=1", "--config-dir"]) == Arguments(["--config-dir"], ["seed=1"])


def test_a_value_has_no_quotes_and_may_hold_an_equals_sign():
    found = parse_arguments(["data.path='a=b'", "~guard"])
    assert found.value("data.path") == "a=b"
    assert found.value("guard") is None
    assert found.value("steps") is None
    assert found.without("data.path").overrides == ["~guard"]


def test_order_resume_and_hydras_keys_do_not_change_the_identity_of_a_command():
    one = parse_arguments(["seed=1", "steps=5", "resume=auto", "hydra.run.dir=run"])
    assert one.identity() == parse_arguments(["steps=5", "hydra/launcher=joblib", "seed=1"]).identity()
    assert one.identity() != parse_arguments(["steps=6", "seed=1"]).identity()


# ---- resume


@pytest.mark.parametrize("typed", [["seed=1"], ["seed=1", "resume=none"], ["-m", "seed=1,2"]])
def test_without_resume_the_command_line_stays_as_it_is(place, typed):
    run_folder(place / "outputs" / "day" / "time", "seed=1")
    assert resolved(*typed) == parse_arguments(typed)


def test_auto_continues_the_newest_run_of_the_same_overrides_that_has_checkpoints(place):
    outputs = place / "outputs" / "2026-01-01"
    run_folder(outputs / "10-00-00", "seed=1", "steps=5")
    run_folder(outputs / "11-00-00", "seed=1", "steps=5")
    run_folder(outputs / "12-00-00", "seed=1", "steps=5", checkpoint=False)
    run_folder(outputs / "13-00-00", "seed=2", "steps=5")
    found = resolved("steps=5", "seed=1", "resume=auto")
    assert found.value("hydra.run.dir") == "outputs/2026-01-01/11-00-00"
    assert found.value("resume") == "auto"
    assert found.value("hydra.output_subdir") == "null", "Hydra keeps its record of the first start"


def test_auto_continues_a_run_whose_steps_were_raised_unless_the_very_same_command_ran(place):
    outputs = place / "outputs" / "2026-01-01"
    run_folder(outputs / "10-00-00", "seed=1", "steps=5")
    run_folder(outputs / "11-00-00", "seed=1", "steps=9")
    assert resolved("steps=20", "seed=1", "resume=auto").value("hydra.run.dir") == "outputs/2026-01-01/11-00-00"
    assert resolved("steps=5", "seed=1", "resume=auto").value("hydra.run.dir") == "outputs/2026-01-01/10-00-00"
    assert resolved("steps=5", "seed=2", "resume=auto").value("hydra.run.dir") is None


def test_auto_starts_a_new_run_if_there_is_none_and_says_so(place, capsys):
    run_folder(place / "outputs" / "day" / "time", "seed=2")
    assert resolved("seed=1", "resume=auto").overrides == ["seed=1", "resume=none"]
    assert "starting a new run" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_auto_takes_the_folder_that_is_typed():
    found = resolved("hydra.run.dir=mine", "resume=auto")
    assert found.value("hydra.run.dir") == "mine"
    assert found.value("hydra.output_subdir") is None, "nothing was recorded there"


@pytest.mark.parametrize("name", ["run", "run/checkpoints"])
def test_a_run_folder_brings_its_arguments_and_typed_ones_take_precedence(place, name):
    run_folder(place / "run", "seed=1", "steps=5", "resume=none", options=["--config-dir", "mine"])
    found = resolved("steps=9", f"resume={name}")
    assert found.options == ["--config-dir", "mine"]
    assert (found.value("seed"), found.value("steps")) == ("1", "9")
    assert (found.value("resume"), found.value("hydra.run.dir")) == ("auto", "run")


NAMES = ["it's", 'say "hi"', "a\\'b\\", "a b", "a=b,c", "$HOME", "[1]", "{a}", "a#b", "ü", "back\\\\"]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_folder_is_typed_as_hydra_reads_it(place, name):
    """Hydra's own parser gives the name back, and so do we; Hydra must read the option that a resume becomes."""
    run_folder(place / name, "seed=1")
    found = resolved(f"resume={quoted(name)}")
    assert found.value("hydra.run.dir") == name
    [override] = [each for each in found.overrides if each.startswith("hydra.run.dir=")]
    [parsed] = OverridesParser.create().parse_overrides([override])
    assert parsed.value() == name


def test_a_checkpoint_is_continued_in_a_new_folder_with_the_runs_arguments(place):
    run_folder(place / "run", "seed=1")
    found = resolved("resume=run/checkpoints/step-00000004", "steps=9")
    assert found.value("resume") == "run/checkpoints/step-00000004"
    assert (found.value("seed"), found.value("steps"), found.value("hydra.run.dir")) == ("1", "9", None)


def test_recorded_keys_that_an_option_typed_now_does_not_have_are_left_out(place):
    run_folder(place / "run", "clipping=norm", "clipping.max_norm=2", "optimizer.lr=0.1", "optimizer.betas=[0.8,0.9]")
    found = resolved("resume=run", "clipping=agc", "optimizer=sgd")
    assert [found.value(key) for key in ("clipping", "clipping.max_norm")] == ["agc", None]
    assert [found.value(key) for key in ("optimizer", "optimizer.lr", "optimizer.betas")] == ["sgd", "0.1", None]
    assert resolved("resume=run", "clipping=zclip").value("clipping.max_norm") == "2"
    (place / "own" / "clipping").mkdir(parents=True)
    (place / "own" / "clipping" / "mine.yaml").write_text("most: 1\n")
    assert resolved("--config-dir", "own", "resume=run", "clipping=mine").value("clipping.max_norm") is None


def test_options_typed_again_are_not_taken_twice(place):
    run_folder(place / "run", "seed=1", options=["--config-dir", "mine"])
    assert resolved("--config-dir", "mine", "resume=run").options == ["--config-dir", "mine"]


def test_a_sweep_folder_is_continued_as_a_sweep(place):
    sweep_folder(place / "sweep", "seed=0,1", "steps=5", options=["-m", "-cn", "other"])
    found = resolved("resume=sweep", "steps=9")
    assert found.options == ["-m", "-cn", "other"]
    assert (found.value("seed"), found.value("steps")) == ("0,1", "9")
    assert (found.value("resume"), found.value("hydra.sweep.dir")) == ("auto", "sweep")


def test_with_m_the_folder_of_a_sweep_is_enough(place):
    sweep_folder(place / "sweep", "seed=0,1")
    assert resolved("-m", "seed=0,1", "hydra.sweep.dir=sweep").value("resume") == "auto"
    assert resolved("-m", "seed=0,1", "hydra.sweep.dir=other").value("resume") is None


def test_resume_auto_finds_the_newest_sweep_of_the_same_command(place):
    for clock, overrides in (("10-00-00", ["seed=0,1"]), ("11-00-00", ["seed=0,1"]), ("12-00-00", ["seed=2,3"])):
        sweep_folder(place / "multirun" / "2026-01-01" / clock, *overrides)
    found = resolved("-m", "seed=0,1", "hydra/launcher=joblib", "resume=auto")
    assert found.value("hydra.sweep.dir") == "multirun/2026-01-01/11-00-00"
    assert found.value("resume") == "auto"


# ---- records


def test_a_damaged_record_gives_no_arguments(tmp_path):
    for text in ("{", "[1]", '{"options": 3}'):
        (tmp_path / "run.json").write_text(text)
        assert recorded_arguments(tmp_path) == Arguments([], [])
    (tmp_path / "sweep.json").write_text('{"options": []}')
    assert sweep_arguments(tmp_path) is None
    assert sweep_arguments(tmp_path / "nowhere") is None


def test_a_job_arrays_record_is_read_too(tmp_path):
    (tmp_path / "multirun.yaml").write_text("hydra:\n  overrides:\n    task: [seed=1, resume=auto]\n")
    assert sweep_arguments(tmp_path) == Arguments([], ["seed=1"])


# ---- the command that continues


@pytest.fixture
def typed(monkeypatch):
    """A start by `python train.py seed=1 resume=none`, outside of torchrun and Slurm."""
    for name in (LAUNCH_VARIABLE, "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "train.py", "seed=1", "resume=none"])
    return monkeypatch


def test_one_process_is_continued_by_python(typed):
    assert resume_command(Ranks(), Path("run")) == "python train.py seed=1 resume=auto"


@pytest.mark.parametrize("resume", ["outputs/other", "outputs/other/checkpoints/step-00000004"])
def test_a_run_that_was_resumed_by_name_is_continued_in_its_folder(typed, resume):
    typed.setattr(sys, "orig_argv", ["/usr/bin/python3", "train.py", f"resume={resume}", "guard=skip"])
    assert resume_command(Ranks(), Path("run")) == "python train.py guard=skip resume=run"


def test_several_ranks_are_continued_by_torchrun(typed):
    ranks = Ranks(1, 4, 1, launched=True)
    assert program(ranks) == ["torchrun", "--nproc_per_node=4", "train.py"]
    for name, value in {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}.items():
        typed.setenv(name, value)
    assert resume_command(ranks, Path("run")) == (
        "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29400 --nproc_per_node=2 train.py seed=1 "
        "resume=auto"
    )


def test_a_slurm_job_is_continued_by_its_launcher(typed):
    typed.setenv(LAUNCH_VARIABLE, "slurm/launch.sh 'my cluster'")
    assert resume_command(Ranks(), Path("run")).endswith("otherwise: slurm/launch.sh 'my cluster' resume=run")


def test_a_damaged_record_of_a_sweep_counts_as_none(tmp_path):
    (tmp_path / "multirun.yaml").write_text("hydra: [unclosed")
    assert sweep_arguments(tmp_path) is None


@pytest.mark.parametrize("typed", ["hydra.run.dir=", "hydra.run.dir=''", "hydra.sweep.dir=' '"])
def test_an_empty_run_folder_is_refused(typed):
    with pytest.raises(ConfigError, match=r"^hydra\.(run|sweep)\.dir= has no value: .*write hydra\."):
        check_folders(parse_arguments([typed]))
    check_folders(parse_arguments(["hydra.run.dir=.", "seed="]))


def test_the_overrides_of_a_job_are_those_that_were_typed():
    with composed("seed='${steps}'"):
        assert job_overrides() == ["seed='${steps}'"]
        assert job_overrides("hydra") == []


@pytest.mark.parametrize("option", ["--config-dir", "-cd", "--config-name", "--config-path"])
@pytest.mark.parametrize("joined", [True, False])
def test_an_empty_option_of_hydra_is_refused(option, joined):
    typed = [f"{option}="] if joined else [option, ""]
    with pytest.raises(ConfigError, match=f"^{option} has no value"):
        check_folders(parse_arguments([*typed, "seed=1"]))
    with pytest.raises(ConfigError, match=f"^{option} has no value"):
        check_folders(parse_arguments(["seed=1", *typed]))
    check_folders(parse_arguments(["seed=1", option, "own"]))
