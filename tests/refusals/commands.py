"""Types the commands of the table of refusals in this process, up to the point where training would begin."""

import contextlib
import io
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core import utils
from PIL import Image
from torch import nn

from stabletrain import Guard, api
from stabletrain.cli.commands import main
from stabletrain.config import composed
from stabletrain.data import text
from stabletrain.errors import ConfigError
from stabletrain.guard.policy import SkipGuard
from stabletrain.trainer import loop

FIXTURES = Path(__file__).parent.parent / "fixtures"


def not_refused(*_: Any, **__: Any) -> None:
    """Stands for the training loop."""
    raise AssertionError("this command is not refused: it would train")


@contextlib.contextmanager
def place(folder: Path) -> Iterator[None]:
    """Context with a working folder in which the names of the table exist, and with no training loop."""
    shutil.copytree(FIXTURES / "one_process", folder / "run")
    shutil.copytree(FIXTURES / "incident" / "incidents" / "step-00000002", folder / "incident")
    shutil.copytree(FIXTURES / "sweep", folder / "sweep")
    shutil.copy(FIXTURES / "text.txt", folder)
    (folder / "library").mkdir()
    shutil.copy(FIXTURES / "text.txt", folder / "library" / "text.py")
    (folder / "notes.txt").write_text("a note\n")
    (folder / "empty").mkdir()
    for name in ("cats", "dogs"):
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (4, 4)).save(folder / "pictures" / name / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        patch.setattr("sys.orig_argv", ["stabletrain", "train"])
        patch.setattr(loop, "train", not_refused)
        patch.setattr(text, "sysconfig", SimpleNamespace(get_paths=lambda: {"stdlib": folder / "library"}))
        save_time(patch)
        yield


def save_time(patch: pytest.MonkeyPatch) -> None:
    """Leaves out what takes most of the time of a refusal and does not decide about it."""
    usual, search, known = composed.compose, ConfigLoaderImpl._process_config_searchpath, {}
    read, files = ConfigRepository.load_config, {}

    def compose_once(name: str, chosen: list[str], **more: Any) -> Any:
        """Composes the defaults of the same options once."""
        given = (name, *chosen, *more)
        if given not in known:
            known[given] = usual(name, chosen, **more)
        return known[given]

    def search_if_typed(loader: Any, name: Any, overrides: Any, repo: Any) -> None:
        """Reads `conf/config.yaml` once more only if a search path is typed; it names none itself."""
        if any(each.get_key_element() == "hydra.searchpath" for each in overrides):
            search(loader, name, overrides, repo)

    def read_once(repository: Any, config_path: str) -> Any:
        """Reads a YAML file of the options once."""
        if config_path not in files:
            files[config_path] = read(repository, config_path)
        return files[config_path]

    patch.setattr(ConfigRepository, "load_config", read_once)
    patch.setattr(composed, "compose", compose_once)
    patch.setattr(ConfigLoaderImpl, "_process_config_searchpath", search_if_typed)
    patch.setattr(utils, "_save_config", lambda *_: None)  # Hydra's record of a run's options, in YAML


def refusal(command: str) -> str:
    """Returns what a command prints on stderr when it is refused with exit code 2, without the program's name.

    Args:
        command: as it is typed after `stabletrain`; or a call of `Guard` in Python.
    """
    if command.startswith("Guard"):
        with pytest.raises(ConfigError) as refused:
            eval(command, names_of_a_loop())
        return str(refused.value)
    words = shlex.split(command)
    if words[:1] == ["train"]:  # the command itself sets up signals, and ends the process
        with pytest.raises(ConfigError) as refused:
            api.train(words[1:])
        return here(str(refused.value))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = code_of(lambda: main(words))
    assert code == ConfigError.exit_code, said.getvalue()
    # argparse prints its usage first
    return here(said.getvalue().removeprefix("stabletrain: ").rpartition(" error: ")[2].removesuffix("\n"))


def names_of_a_loop() -> dict[str, Any]:
    """Returns the names that the calls of `Guard` use: those of a loop of a user's own."""
    model, another = nn.Linear(4, 3), nn.Linear(4, 3)
    return {
        "Guard": Guard,
        "SkipGuard": SkipGuard,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "lbfgs": torch.optim.LBFGS(model.parameters()),
        "of_another_model": torch.optim.SGD(another.parameters(), lr=0.1),
        "scaler": torch.amp.GradScaler("cpu"),
        "loss_fn": nn.functional.cross_entropy,
    }


def here(message: str) -> str:
    """Returns a message in which `<here>` stands for the working folder."""
    return message.replace(str(Path.cwd()), "<here>")


def code_of(command: Callable[[], int]) -> Any:
    """Returns the exit code of a command; argparse exits by itself."""
    try:
        return command()
    except SystemExit as end:
        return end.code
