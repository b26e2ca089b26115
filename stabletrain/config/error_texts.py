"""Explains mistakes on the command line: what the user probably meant, which names exist, and what to type.

Imports no torch, so that a mistyped command fails within a second.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from stabletrain.config.arguments import OPTIONS, OPTIONS_WITH_VALUE, Arguments, key_of, parse_arguments
from stabletrain.config.make import leaves
from stabletrain.errors import closest
from stabletrain.program import program_name

EXTRAS = ("joblib", "optuna")
"""Hydra plugins that are installed as extras of the same name."""


def explain(error: Exception, config_dir: Path, typed: Arguments) -> str | None:
    """Turns Hydra's error about a command line into one message; None if the error has another cause.

    Unknown names are looked up in `config_dir` and in the user's own config folders.
    """
    origin = {raising_package(error), type(error).__module__.split(".")[0]}
    text = str(error)
    folders = [config_dir, *own_folders(typed)]
    for folder in folders[1:]:
        if not os.path.isdir(folder):  # also of a name that is too long, unlike `Path.is_dir`
            return f"--config-dir {folder} does not exist: name the folder that holds your groups, such as my_conf"
    if "yaml" in origin:
        return f"a YAML file cannot be read: {' '.join(text.split())}"
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return f"the run folder cannot be created ({error}): choose another hydra.run.dir"
    if not {"hydra", "omegaconf", "antlr4"} & origin:
        return None
    options = options_of(folders)
    if match := re.search(r"Could not override '([^']+)'", text):
        return no_such_key(match[1], typed, folders, options)
    if (match := re.search(r"Could not find 'hydra/(\w+)/(\w+)'", text)) and match[2] in EXTRAS:
        extra = f'pip install "stabletrain[{match[2]}]"'
        return f"hydra/{match[1]}={match[2]} is not installed: {extra}"
    if match := re.search(r"Could not find '(hydra/\w+)/(\w+)'", text):
        if match[2].startswith("submitit"):
            return (
                f"{match[1]}={match[2]}: submit with slurm/launch.sh of a checkout, which takes the same overrides: "
                "slurm/launch.sh --gpu <type> -m ...; its jobs are queued again when they are stopped, and continue"
            )
        return f"{match[1]}={match[2]}: Hydra finds no such plug-in; is its package installed?"
    if match := re.search(r"Could not find '([^'/]+)/([^']+)'", text):
        group, option = match.groups()
        available = sorted(options.get(group, []))
        hint = suggestion(option, available)
        yours = "" if hint or folders[1:] else "; for your own options add --config-dir <folder>"
        return (
            f"{group}={option}: there is no such option{hint or ';'} options of {group}: {', '.join(available)}{yours}"
        )
    for override in typed.overrides:
        if override.partition("=")[2] == "" and not override.startswith("~"):
            return f"{override}: a value is missing: write {key_of(override)}=<value>"
        if key_of(override) in options and override.partition("=")[2] == "null":
            return f"{override}: to turn a group off, use its option that does nothing, such as none or off"
    if "Ambiguous value" in text:
        several = next((o for o in typed.overrides if "," in o.partition("=")[2]), typed.overrides[0])
        return f"{several}: these are several values: to sweep over them, add -m ({program_name()} -m ...)"
    lines = text.strip().splitlines() or [type(error).__name__]
    if "antlr4" in origin or "override_grammar" in text:
        quoting = "quote values with special characters, as in \"data.path='a=b, c.txt'\""
        return f"the command line cannot be read: {lines[0]}; fix: {quoting}"
    return f"the command line cannot be read: {' '.join(lines[:2])}"


def unknown_option(words: list[str], config_dir: Path) -> str | None:
    """Explains the first word that begins with a dash but is no option of Hydra; None if there is none.

    Args:
        words: the command line after the script.
        config_dir: the project's `conf/`.
    """
    after_option = False
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if after_option or not name.startswith("-") or is_option(name):
            after_option = word in OPTIONS_WITH_VALUE and not after_option
            continue
        if not value and not following.startswith("-") and "=" not in following:
            value = following
        typed, key = f"{name} {value}".strip(), name.lstrip("-").replace("-", "_")
        if key.startswith("conf"):
            option = Path(value).stem or "<name>"
            return (
                f"{typed}: write experiment={option} for conf/experiment/{option}.yaml; a file of your own goes into "
                f"<folder>/experiment/: --config-dir <folder> experiment={option}; --config-name {option} replaces "
                "conf/config.yaml as a whole"
            )
        arguments = parse_arguments(words)
        options = options_of([config_dir, *own_folders(arguments)])
        known = [*options, *known_keys(config_dir, arguments, options)]
        if found := key if key in known else closest_key(key, known):
            return f"{typed}: keys are written without dashes: {found}={value or '<value>'}"
        return f"{typed}: there is no such option, and no such key; {program_name()} --help lists the keys"
    return None


def is_option(name: str) -> bool:
    """Returns whether Hydra accepts a word as one of its options: in full, shortened, or with its value attached."""
    if name in OPTIONS or name.removeprefix("-").replace(".", "").isdigit():
        return True
    if name.startswith("--"):
        return sum(option.startswith(name) for option in OPTIONS) == 1
    return any(name.startswith(option) for option in OPTIONS_WITH_VALUE if not option.startswith("--"))


def options_of(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Returns the options of each config group in these folders."""
    options: dict[str, list[str]] = {}
    for file in (file for folder in folders for file in folder.glob("*/*.yaml")):
        options.setdefault(file.parent.name, []).append(file.stem)
    return options


def no_such_key(key: str, typed: Arguments, folders: list[Path], options: dict[str, list[str]]) -> str:
    """Returns the message for an unknown key, with the options that have this key, or the closest known key."""
    group, _, name = key.partition(".")
    if typed.value(f"{group}._target_") is not None:
        return f"{key}: the chosen {group} has no such key; for your own {group}._target_ write +{key}=..."
    having = [file.stem for folder in folders for file in sorted(folder.glob(f"{group}/*.yaml")) if has_key(file, name)]
    if name and having:
        return (
            f"{key}: the chosen {group} has no such key; it belongs to "
            f"{', '.join(f'{group}={option}' for option in having)}"
        )
    known = [name for name in (*options, *known_keys(folders[0], typed, options)) if name != key]
    mine = [name for name in known if name.startswith(f"{group}.") and "_target_" not in name]
    own = sorted(name.removeprefix(f"{group}.") for name in mine)
    # a key below a known group can only be one of that group's keys: propose no others
    hint = suggestion(key, [f"{group}.{name}" for name in own] if group in options and group != key else known)
    if not hint and group in options and group != key:
        keys = f"has the keys {', '.join(own)}" if own else "has no keys"
        hint = f"; the chosen {group} {keys}; options of {group}: {', '.join(sorted(options[group]))}"
    return f"{key}: there is no such key{hint or f'; {program_name()} --help lists them'}"


def has_key(file: Path, name: str) -> bool:
    """Returns whether an option's YAML has this top-level key."""
    return any(line.partition(":")[0] == name for line in file.read_text(encoding="utf-8").splitlines())


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean ...?` with the closest of `known`; empty if none is close."""
    near = closest_key(word, list(known))
    return f"; did you mean {near}?" if near else ""


def closest_key(word: str, known: list[str]) -> str:
    """Returns the closest of `known`, compared as a whole or by its last part; empty if none is close."""
    near = closest(word, known, cutoff=0.75)
    if not near and "." not in word:  # try the last part: lr finds optimizer.lr
        last = {key.rsplit(".", 1)[-1]: key for key in known}
        near = last.get(closest(word, last, cutoff=0.8), "")
    return near


def own_folders(typed: Arguments) -> list[Path]:
    """Returns the user's config folders, given by `--config-dir`."""
    found = [b for a, b in zip(typed.options, typed.options[1:], strict=False) if a in ("--config-dir", "-cd")]
    found += [option.partition("=")[2] for option in typed.options if option.startswith(("--config-dir=", "-cd="))]
    return [Path(name) for name in found]


def raising_package(error: Exception) -> str:
    """Returns the package whose code raised `error`: its type may be a plain ValueError, even from Hydra's parser."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_globals.get("__name__", "").split(".")[0]


def known_keys(config_dir: Path, typed: Arguments, options: dict[str, list[str]]) -> list[str]:
    """Returns all dotted keys of the configuration with the typed group choices; in a sweep, those of its first run."""
    chosen = [f"{key_of(o)}={o.partition('=')[2].split(',')[0]}" for o in typed.overrides if key_of(o) in options]
    chosen = [o for o in chosen if o.partition("=")[2] in options[key_of(o)]]
    own = [f"file://{os.path.realpath(folder)}" for folder in own_folders(typed) if os.path.isdir(folder)]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir.resolve()), version_base="1.3"):
        cfg: Any = compose("config", [*chosen, *([f"hydra.searchpath=[{','.join(own)}]"] if own else [])])
        return [key for key, _ in leaves(OmegaConf.to_container(cfg))]
