"""A resumed run records the keys it has changed, and refuses a checkpoint that was trained on other data."""

import json
import shutil
from types import SimpleNamespace

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from stabletrain.errors import ConfigError
from stabletrain.tracking.run_folder import NoRunFolder
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.changes import check_data_of_checkpoint, option_fingerprint, record_changes
from tests.runs import ROOT, composed


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


def changed(folder, now, step=10, choices=None, **record):
    (folder / ".hydra").mkdir(exist_ok=True)
    OmegaConf.save(
        OmegaConf.create(
            {
                "steps": 10,
                "optimizer": {"_target_": "stabletrain.old_place.AdamW", "lr": 0.1, "gone_since": 1},
                "clipping": {"_target_": "stabletrain.clipping.Norm", "max_norm": 1.0},
                "resume": "none",
            }
        ),
        folder / ".hydra/config.yaml",
    )
    OmegaConf.save(
        OmegaConf.create({"hydra": {"runtime": {"choices": {"clipping": "norm", "hydra/launcher": "basic"}}}}),
        folder / ".hydra/hydra.yaml",
    )
    (folder / "run.json").write_text(json.dumps(record))
    run_folder, tracker = Folder(folder), Listening()
    cfg = OmegaConf.create({"resume": "auto", **now})
    record_changes(cfg, choices or {"clipping": "norm"}, step, folder, run_folder, tracker)
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


def test_what_another_version_has_moved_added_or_removed_is_no_change(tmp_path):
    optimizer = {"_target_": "stabletrain.new_place.AdamW", "lr": 0.1, "new_since": True}
    now = {"steps": 10, "new_group": {"key": 1}, "optimizer": optimizer}
    heard = changed(tmp_path, now, choices={"clipping": "norm", "new_group": "default"})
    assert (heard.changes, heard.events, heard.notes) == ([], [], [])


def test_another_option_is_recorded_by_its_name_with_the_keys_it_brings(tmp_path):
    now = {"steps": 10, "clipping": {"_target_": "stabletrain.clipping.AGC", "threshold": 0.3}}
    heard = changed(tmp_path, now, choices={"clipping": "agc"})
    assert heard.changes == [(10, {"clipping": ["norm", "agc"], "clipping.threshold": [None, 0.3]})]
    assert heard.notes == ["changed  clipping norm -> agc"]
    recorded = [{"step": 5, "keys": heard.changes[0][1]}]
    assert changed(tmp_path, now, choices={"clipping": "agc"}, changes=recorded).changes == []


def test_a_run_of_an_older_version_is_resumed_without_a_change(tmp_path):
    shutil.copytree(ROOT / "tests/fixtures/rollback", tmp_path / "run")
    first = OmegaConf.load(tmp_path / "run/.hydra/hydra.yaml").hydra
    run_folder, tracker = Folder(tmp_path / "run"), Listening()
    with composed(*first.overrides.task, "resume=auto") as cfg:
        choices = {group: option for group, option in HydraConfig.get().runtime.choices.items() if "hydra" not in group}
        record_changes(cfg, choices, 8, tmp_path / "run", run_folder, tracker)
    assert (run_folder.changes, tracker.notes) == ([], [])


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
