"""Healing on two ranks: it goes on as the arm that won, and a killed rank changes nothing."""

import signal

import pytest

from tests.beside.whatif.test_healing import HALTS, events
from tests.beside.whatif.test_interrupted import end
from tests.parallel.launches import finish, forked, start
from tests.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = [*HALTS, "steps=60", "guard.escalate=whatif", "guard.whatif_steps=130", "hydra.run.dir=run"]


def test_two_ranks_heal_and_a_killed_one_changes_nothing(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for place in (whole, cut):
        place.mkdir()
    forked(2, str(ROOT / "train.py"), *RUN, "parallel=fsdp", cwd=whole, logs=whole)
    (heal,) = events(whole / "run", "heal")
    assert len(heal["arms"]) >= 2
    assert heal["arm"] in heal["arms"]
    words = ["-m", "tests.beside.whatif.interrupted", "SIGKILL", "arm:40", "1", *RUN, "parallel=fsdp"]
    killed = finish(start(2, *words, cwd=cut))
    assert killed.returncode != 0
    assert f"interrupted before arm 40, {signal.SIGKILL.name}" in killed.stdout
    assert not events(cut / "run", "heal")
    forked(2, str(ROOT / "train.py"), *RUN, "parallel=fsdp", "resume=auto", cwd=cut, logs=cut)
    assert end(cut / "run") == end(whole / "run")
