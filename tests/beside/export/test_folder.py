"""An export's folder appears complete or not at all, and overwrites nothing that it should not."""

import os

import pytest

from stabletrain.beside.export.command import new_folder
from stabletrain.errors import ConfigError


def export_to(path, content="new", **how):
    with new_folder(path, **how) as hidden:
        (hidden / "config.json").write_text(content)


def test_it_appears_whole_with_the_rights_of_the_users_other_files(tmp_path):
    with new_folder(tmp_path / "a" / "b") as hidden:
        (hidden / "config.json").write_text("x")
        (hidden / "config.json").chmod(0o600)
        assert not (tmp_path / "a" / "b").exists()
    assert os.listdir(tmp_path / "a") == ["b"]
    (tmp_path / "file").write_text("")
    assert (tmp_path / "a" / "b" / "config.json").stat().st_mode == (tmp_path / "file").stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ConfigError])
def test_an_error_or_an_interruption_leaves_nothing(error, tmp_path):
    def interrupted(**how):
        with new_folder(tmp_path / "out", **how) as hidden:
            (hidden / "config.json").write_text("half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert not os.listdir(tmp_path)
    export_to(tmp_path / "out", "old")
    with pytest.raises(error):
        interrupted(overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_an_earlier_export_is_replaced_only_if_told(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export_to(out, "old")  # an empty folder may be filled
    with pytest.raises(ConfigError, match="holds an export already: add --overwrite"):
        export_to(out)
    assert (out / "config.json").read_text() == "old"
    export_to(out, overwrite=True)
    assert (out / "config.json").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_other_files_are_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("three years")
    (tmp_path / "config.json").write_text("")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis\.tex\), which are not overwritten"):
        export_to(tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match=r"thesis\.tex is a file or a link"):
        export_to(tmp_path / "thesis.tex", overwrite=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(ConfigError, match="link is a file or a link"):
        export_to(tmp_path / "link", overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "three years"


def test_a_folder_filled_meanwhile_is_not_lost(tmp_path):
    out = tmp_path / "out"

    def while_another_ends():
        with new_folder(out) as hidden:
            (hidden / "config.json").write_text("second")
            export_to(out, "first")

    with pytest.raises(ConfigError, match="holds an export already"):
        while_another_ends()
    assert (out / "config.json").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]
