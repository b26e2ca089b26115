"""What Hydra does differently for `train.py`, `stabletrain train` and `slurm/launch.sh`, in one place.

Each function says what Hydra does of itself, and why that is wrong here.
"""

import io
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout

from hydra.core.config_store import ConfigStore

from stabletrain.printable import say
from stabletrain.program import SCRIPT, program_name, torchrun_target

CONFIG_PATH = ("--config-path", "-cp")
"""Hydra's option for a configuration folder in place of `conf/`."""


def raise_errors() -> None:
    """Lets Hydra raise its errors.

    Hydra prints an error about the command line itself and exits with code 1. Here it is explained, with what the user
    probably meant, and the code is 2.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def share_config_store() -> None:
    """Keeps Hydra from copying its configuration store.

    Hydra deep-copies the store, which is a singleton and does not change, once for each option that `--help` lists:
    160 times.
    """
    setattr(ConfigStore, "__deepcopy__", lambda store, _: store)  # noqa: B010


@contextmanager
def help_of_command() -> Generator[None]:
    """A context in which the help text of `conf/config.yaml` is printed with the name of the program that was used.

    Hydra prints the text as it is written, so `stabletrain train --help` would propose `python train.py`.
    """
    text = io.StringIO()
    try:
        with redirect_stdout(text):
            yield
    finally:
        target = f" {torchrun_target()} "
        say(text.getvalue().replace(SCRIPT, program_name()).replace(" train.py ", target), end="")


def absolute_config_path(words: Sequence[str]) -> list[str]:
    """Returns a command line whose `--config-path` is absolute.

    Hydra looks for a relative one beside the module of its entry point. For `train.py` that is the checkout, but for
    `stabletrain train` it is this package, and users mean their working folder.
    """
    found, before = [], ""
    for word in words:
        option, equals, value = word.partition("=")
        if equals and option in CONFIG_PATH:
            found.append(f"{option}={os.path.realpath(value)}")
        else:
            found.append(os.path.realpath(word) if before in CONFIG_PATH else word)
        before = word
    return found
