"""Slurm's commands, with scripts in place of Slurm's."""

import os

import pytest

from stabletrain.errors import StabletrainError
from stabletrain.machine.slurm import has_slurm, sbatch, scancel, states
from tests.beside.slurm.stand_ins import stand_in


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_the_states_are_those_of_jobs_and_of_array_tasks(place, monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    stand_in(
        place,
        "squeue",
        f'echo "$*|$SQUEUE_PARTITION" > {place}/asked; printf "7 0 RUNNING\\n7 12 FAILED\\n8 N/A RUNNING\\n"',
    )
    assert states() == {("7", 0): "RUNNING", ("7", 12): "FAILED", ("8", None): "RUNNING"}
    assert (place / "asked").read_text() == f"-h -r -u {os.getuid()} -t all -o %F %K %T|\n"
    states(everyone=True)
    assert (place / "asked").read_text() == "-h -r -t all -o %F %K %T|\n"


def test_what_slurm_refuses_is_raised_with_its_reason(place):
    stand_in(place, "sbatch", "echo 'sbatch: error: no such\n partition' >&2; exit 1")
    with pytest.raises(StabletrainError, match="^no such partition$"):
        sbatch(place / "slurm.sh")
    stand_in(place, "scancel", "echo 'scancel: error: Invalid job id' >&2; exit 1")
    with pytest.raises(StabletrainError, match="^Invalid job id$"):
        scancel("7")


def test_a_command_that_is_missing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_slurm()
    with pytest.raises(StabletrainError, match="^squeue: No such file or directory$"):
        states()


def test_the_number_of_a_job_is_read_and_ctrl_c_does_not_reach_the_submission(place):
    stand_in(place, "sbatch", f'echo "7;cluster"; ps -o sid= -p $$ > {place}/session')
    assert sbatch(place / "slurm.sh") == "7"
    assert int((place / "session").read_text()) != os.getsid(0)
    assert has_slurm()
