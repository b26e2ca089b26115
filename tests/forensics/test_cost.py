"""No code of forensics runs in a step without an incident."""

import sys
from pathlib import Path

import pytest

from stabletrain import forensics
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import TINY_GPT, TINY_RESNET, composed

ROOM = str(Path(forensics.__file__).parent)
MODELS = {"gpt": TINY_GPT, "resnet": [*TINY_RESNET, "model.depth=8"]}


def called(folder, *overrides):
    """The functions of forensics that a run calls once it is built."""
    with composed("checkpoint=off", "steps=3", *overrides) as cfg:
        job = build(cfg, folder)
    found = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOM):
            found.add(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        train(job)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_nothing_of_forensics_runs_before_an_update_is_withheld(tmp_path, model):
    assert called(tmp_path / "clean", *MODELS[model]) == set()
    assert "handler.handle" in called(tmp_path / "faulty", *MODELS[model], "faults=activation", "faults.at=[1]")
