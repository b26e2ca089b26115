"""Whether Weights & Biases will let us in: is there a key, and does its server answer. Nobody is ever asked for one."""

import netrc
import os
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from stabletrain.errors import ConfigError

PATIENCE = 10.0
"""Seconds after which a server that does not answer counts as out of reach; the library itself would wait for days."""


def check_reach() -> None:
    """Refuses at once what would fail after hours.

    Raises:
        ConfigError: wandb is not installed, there is no key, or the server does not answer.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"wandb cannot be loaded ({error}): pip install 'wandb>=0.31'") from error
    if not has_key(wandb):
        raise ConfigError("no API key was found: log in once with `wandb login`, or set WANDB_API_KEY")
    url = wandb.setup(settings=wandb.Settings(silent=True)).settings.base_url
    try:
        urllib.request.urlopen(url, timeout=PATIENCE).close()
    except urllib.error.HTTPError as answer:  # it is there, and that is enough
        answer.close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{url} cannot be reached ({reason}): run this where there is a network, such as on a login node"
        ) from error


def has_key(wandb: Any) -> bool:
    """Whether the library will find credentials without asking for them: environment, its settings, or ~/.netrc."""
    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    if os.environ.get("WANDB_API_KEY") or settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    hosts = {urlsplit(settings.base_url).netloc}
    if settings.base_url == type(settings).model_fields["base_url"].default:
        hosts.add("api.wandb.ai")  # under which `wandb login` has always filed the key
    for path in [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if path and hosts & netrc.netrc(os.path.expanduser(path)).hosts.keys():
                return True
    return False
