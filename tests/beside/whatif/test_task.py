"""The file of an arm that a task of an array runs."""

import json

import pytest

from stabletrain.beside.whatif.arm_run import ArmRun, read_arm_run, write_arm_run
from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.base import read_base
from stabletrain.stored.json_files import DamagedFile


def test_a_leg_is_read_as_it_was_written(shared_run, tmp_path):
    arm = Arm("a=1,b='x, y'", ("a=1", "b='x, y'"), edit="skip", named="you", refused="no", about="a b")
    run = ArmRun(read_base(shared_run, 60), arm, shared_run / "checkpoints" / "step-00000060", tmp_path / "arm", 64)
    write_arm_run(run, 3, tmp_path / "arm_run.json")
    assert read_arm_run(tmp_path / "arm_run.json") == (run, 3)
    assert isinstance(read_arm_run(tmp_path / "arm_run.json")[0].arm.overrides, tuple)
    text = json.loads((tmp_path / "arm_run.json").read_text())
    (tmp_path / "arm_run.json").write_text(json.dumps({**text, "stop": "64"}))
    with pytest.raises(DamagedFile, match='stop is "64", not an integer'):
        read_arm_run(tmp_path / "arm_run.json")
