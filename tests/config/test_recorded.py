"""A damaged `.hydra/config.yaml` is refused in one line."""

import pytest

from stabletrain.config.recorded import read_config
from stabletrain.stored.json_files import DamagedFile, MissingFile

WHOLE = "seed: 0\nmodel: {_target_: torch.nn.Linear, seed: '${seed}'}\ndata: {_target_: torch.nn.Identity}\n"


def test_a_configuration_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text(WHOLE)
    assert read_config(tmp_path / "config.yaml").model.seed == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "5",
        "a: [",
        "\x00",
        "[" * 100_000,
        WHOLE.replace("seed}", "gone}"),
        WHOLE.replace("torch.nn.Linear", "5"),
        WHOLE.replace("data:", "other:"),
        "model: 5\ndata: {_target_: torch.nn.Identity}\n",
        WHOLE + 'name: "\\ud800"\n',
        WHOLE + "name: 1" + "0" * 300,
    ],
    ids=lambda text: text[:20],
)
def test_anything_else_is_refused(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(DamagedFile) as raised:
        read_config(file)
    assert str(raised.value).startswith(f"{file} is damaged: ")
    assert "\n" not in str(raised.value)


def test_a_missing_one_is_told_apart(tmp_path):
    with pytest.raises(MissingFile):
        read_config(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(DamagedFile):
        read_config(tmp_path / "config.yaml")
