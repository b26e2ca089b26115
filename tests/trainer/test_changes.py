"""A resumed run records the keys it has changed, and refuses a checkpoint that was trained on other data."""

import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from stabletrain.errors import ConfigError
from stabletrain.tracking.run_folder import NoRunFolder
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.changes import check_data_of_checkpoint, option_fingerprint, record_changes


class Folder(NoRunFolder):
    """Keeps the changes that are recorded."""

    def __init__(self, path):
        super().__init__(path)
        self.changes = []

    def change(self, step, keys):
        self.changes.append((step, dict(keys)))


class Listening(NoTracker):
    """Keeps events and notes."""

    def __init__(self):
        self.events, self.notes = [], []

    def event(self, kind, step, /, **fields):
        self.events.append((kind, step, fields))

    def note(self, text):
        self.notes.append(text)


def changed(folder, now, step=10, **record):
    (folder / ".hydra").mkdir(exist_ok=True)
    OmegaConf.save(
        OmegaConf.create({"steps": 10, "optimizer": {"lr": 0.1}, "resume": "none"}), folder / ".hydra/config.yaml"
    )
    (folder / "run.json").write_text(json.dumps(record))
    run_folder, tracker = Folder(folder), Listening()
    record_changes(OmegaConf.create({"resume": "auto", **now}), step, folder, run_folder, tracker)
    return SimpleNamespace(changes=run_folder.changes, events=tracker.events, notes=tracker.notes)


def test_changed_keys_are_recorded_logged_and_shown(tmp_path):
    heard = changed(tmp_path, {"steps": 20, "optimizer": {"lr": 0.2}})
    keys = {"optimizer.lr": [0.1, 0.2], "steps": [10, 20]}
    assert heard.changes == [(10, keys)]
    assert heard.events == [("changed", 10, {"keys": keys})]
    [note] = heard.notes
    assert note.startswith("changed  optimizer.lr 0.1 -> 0.2, steps 10 -> 20; the learning-rate schedule now ends")


def test_a_change_is_recorded_once_and_not_again_by_the_next_resume(tmp_path):
    earlier = [{"step": 5, "keys": {"optimizer.lr": [0.1, 0.2]}}]
    assert changed(tmp_path, {"steps": 10, "optimizer": {"lr": 0.2}}, changes=earlier).changes == []
    back = changed(tmp_path, {"steps": 10, "optimizer": {"lr": 0.1}}, changes=earlier)
    assert back.changes == [(10, {"optimizer.lr": [0.2, 0.1]})]


@pytest.mark.parametrize(
    "now", [{"steps": 10, "optimizer": {"lr": 0.1}}, {"steps": 10, "optimizer": {"lr": 0.1}, "device": "cpu"}]
)
def test_an_unchanged_run_and_another_device_are_no_change(tmp_path, now):
    heard = changed(tmp_path, now)
    assert (heard.changes, heard.events, heard.notes) == ([], [], [])


def test_before_the_first_step_nothing_can_have_changed(tmp_path):
    assert changed(tmp_path, {"steps": 20, "optimizer": {"lr": 0.2}}, step=0).changes == []


def test_a_checkpoint_of_other_data_is_refused_and_one_of_the_same_taken(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run.json").write_text(json.dumps({"data": {"name": "stdlib", "hash": "aaaa"}}))
    check_data_of_checkpoint(str(checkpoint), {"name": "stdlib", "hash": "aaaa"})
    check_data_of_checkpoint("auto", {"name": "own", "hash": "bbbb"})
    with pytest.raises(ConfigError, match="was trained on stdlib"):
        check_data_of_checkpoint(str(checkpoint), {"name": "own", "hash": "bbbb"})


def test_data_without_a_fingerprint_are_identified_by_their_keys():
    cfg = OmegaConf.create({"data": {"_target_": "mine.Data", "path": "/a"}})
    assert option_fingerprint(cfg, {"data": "mine"}) == {
        "name": "mine",
        "keys": {"_target_": "mine.Data", "path": "/a"},
    }
