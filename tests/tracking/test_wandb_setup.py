"""Whether W&B can be reached, and where a run is filed there: group, name, job type, tags."""

import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest

from stabletrain.errors import ConfigError
from stabletrain.tracking.wandb_setup import (
    LONGEST_NAME,
    LONGEST_TAG,
    cache_folder,
    card_of,
    check_reach,
    has_key,
    name_of,
    sweep_of,
    tags_of,
)


@pytest.mark.parametrize(
    ("folder", "sweep"),
    [
        ("multirun/2026-11-21/16-45-39/3", "2026-11-21_16-45-39"),
        ("multirun/2026-11-21/16-45-39/a100/3", "2026-11-21_16-45-39"),
        ("mine/grid/3", "grid"),
        (f"mine/{'x' * 250}/3", "x" * LONGEST_NAME),
    ],
    ids=["hydra", "cards", "own", "long"],
)
def test_a_sweep_is_known_by_its_folder(tmp_path, folder, sweep):
    folder = tmp_path / folder  # and not in the working folder, which may hold anything
    folder.mkdir(parents=True)
    assert sweep_of(folder, sweeping=True) == sweep
    assert sweep_of(folder, sweeping=False) is None


def test_a_job_of_an_array_is_part_of_a_sweep_though_hydra_does_not_know(tmp_path):
    (tmp_path / "multirun.yaml").touch()
    assert sweep_of(tmp_path / "3", sweeping=False) == tmp_path.name


def test_a_run_of_a_sweep_is_named_by_what_is_its_own(tmp_path):
    (tmp_path / "multirun.yaml").write_text(
        "hydra:\n  overrides:\n    task:\n    - steps=40\n    - 'faults.at=[30]'\n    - qknorm=none,layernorm\n"
    )
    typed = ["steps=40", "faults.at=[30]", "qknorm=layernorm", "+wandb.tags=[x]", "hydra.verbose=true", "seed=1"]
    assert name_of(tmp_path / "3", typed) == "3 qknorm=layernorm seed=1"
    assert len(name_of(tmp_path / "3", ["data.path=" + "x" * 300])) == LONGEST_NAME


def test_tags_are_choices_by_name_and_never_longer_than_wandb_takes():
    choices = {"precision": "bf16", "model": "team/" + "x" * 100, "wandb": "offline", "extra": None, "zloss": "none"}
    tags = tags_of(choices, ["mine", "precision:bf16", "y" * 100])
    assert tags[:2] == ["mine", "precision:bf16"]
    assert tags[-1] == "zloss:none"
    assert len(tags) == 5
    assert all(1 <= len(tag) <= LONGEST_TAG for tag in tags)


def test_the_card_is_the_one_it_ran_on():
    assert card_of({"name": "NVIDIA H200", "device": "cuda:0"}) == "NVIDIA H200"
    assert card_of({"name": "cpu"}) == card_of({}) == "cpu"


@pytest.mark.parametrize(
    ("netrc", "found"),
    [
        ("machine api.wandb.ai\n  login user\n  password 0123456789\n", True),
        ("machine example.org\n  login user\n  password 0123456789\n", False),
        ("mach", False),
    ],
)
def test_a_key_stored_by_wandb_login_is_found(tmp_path, monkeypatch, netrc, found):
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text(netrc)
    assert has_key(wandb) is found


class Settings(SimpleNamespace):
    """The library's settings, as far as the code reads them."""

    model_fields: ClassVar = {"base_url": SimpleNamespace(default="https://api.wandb.ai")}


@pytest.fixture
def library(monkeypatch):
    """Stands in for the library: it is set to a server at this address, and to this key."""

    def library(url, key="0123456789"):
        chosen = SimpleNamespace(settings=Settings(base_url=url, api_key=key))
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=Settings, setup=lambda settings: chosen))

    return library


class Refusing(BaseHTTPRequestHandler):
    """Answers every request with a refusal."""

    def do_GET(self):
        self.send_error(404)

    def log_message(self, *words):
        """Nothing."""


def test_a_server_that_answers_is_in_reach_even_if_it_refuses(library):
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.handle_request).start()
        library(f"http://127.0.0.1:{server.server_port}")
        check_reach()


def test_a_server_that_does_not_answer_is_refused_by_its_address(library):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # no server listens there
        library(url)
        with pytest.raises(ConfigError, match=f"{url} cannot be reached .*run this on a machine with a network"):
            check_reach()


def test_without_a_key_no_server_is_contacted(library, monkeypatch, tmp_path):
    library("http://127.0.0.1:9", key=None)
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("a request was sent"))
    with pytest.raises(ConfigError, match="no API key was found: log in once with `wandb login`"):
        check_reach()


def test_without_the_library_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb cannot be imported .*pip install 'wandb>="):
        check_reach()


@pytest.mark.parametrize(
    ("home", "cache", "used"),
    [
        (None, None, "run"),
        ("", None, "run"),
        ("home", None, None),
        ("file", None, "run"),
        (None, "own", "own"),
        ("home", "file", "run"),
    ],
)
def test_wandb_gets_a_cache_folder_that_it_can_write(tmp_path, monkeypatch, home, cache, used):
    (tmp_path / "file").write_text("")
    for name, value in (("HOME", home), ("XDG_CACHE_HOME", cache)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    before = os.environ.get("XDG_CACHE_HOME")
    with cache_folder(tmp_path / "run"):
        assert os.environ.get("XDG_CACHE_HOME") == (None if used is None else str(tmp_path / used))
    assert os.environ.get("XDG_CACHE_HOME") == before
