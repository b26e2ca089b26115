"""The files of a path, and the manifest of token shards."""

import json

import pytest

from stabletrain.data.imagefolder import ImageFolder
from stabletrain.data.prepare import prepare
from stabletrain.data.text import Text
from stabletrain.data.tokens import Tokens
from stabletrain.errors import ConfigError
from tests.data.given import texts


def test_a_glob_reads_what_it_matches(tmp_path):
    texts(tmp_path, files=3)
    assert Text(str(tmp_path / "texts" / "00[01].txt"), 16, 0.1, 0).fingerprint()["files"] == 2


def test_a_manifest_of_another_version_is_refused(tmp_path, text):
    prepare(str(text), str(tmp_path / "out"), val_fraction=0.2)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    (tmp_path / "out" / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(ConfigError, match="has version 99"):
        Tokens(str(tmp_path / "out"), block_size=16, seed=0)


@pytest.mark.parametrize("path", [None, ""])
def test_no_path_is_not_the_working_folder(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words " * 1000)
    for made in (
        lambda: Text(path=path, block_size=8, val_fraction=0.1, seed=0),
        lambda: Tokens(path=path, block_size=8, seed=0),
        lambda: ImageFolder(
            path, image_size=8, augment="none", val_fraction=0.1, cache_mb=0, mean=[0], std=[1], seed=0
        ),
    ):
        with pytest.raises(ConfigError, match=r"^data.path is not set"):
            made()
