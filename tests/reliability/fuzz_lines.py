"""Random command lines for `fuzz_commands.py`: groups, keys and values from a grammar of values that break programs."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import yaml

from stabletrain.config.make import leaves
from tests.runs import CONF, TINY_GPT, TINY_RESNET

NUMBERS = [
    *("0", "-1", "1", "2", "3", "7", "0.5", "-0.0", "1e-3", "1e3", "1e-320", "5e-324", "1e-46", "1e38", "1e39"),
    *("1e308", "1e400", "-1e400", "nan", "-nan", "inf", "-inf", ".nan", ".inf", "1_000", "0x10", "1e", "--1", "1e3.5"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" + "0" * 40, "1" * 5000),
]

WORDS = [
    *("", "''", '""', "null", "None", "~", "true", "false", "True", "yes", "off", "none", "auto", "default", "a", "."),
    *(
        "cpu",
        "cuda",
        "cuda:0",
        "cuda:99",
        "cpu:0",
        "cpu:99",
        "meta",
        "mps",
        "nowhere/at/all",
        "head",
        "*",
        "**",
        "[",
        "]",
    ),
    *(
        "ä",
        "ß/ü",
        "模型",
        "🚀",
        "a b",
        "'a=b'",
        "a=b",
        "'a,b'",
        "x\ty",
        "'x\ny'",
        "'\x1b[31mred'",
        "'\x07'",
        "'\u202eabc'",
    ),
    *(
        "'\x85'",
        "\\",
        "'\\'",
        "'a\\'b'",
        "%s",
        "{}",
        "{0}",
        "$HOME",
        "`id`",
        "-",
        "--",
        "a" * 300,
        "a" * 5000,
        "../..",
        "\x00",
    ),
]

TREES = [
    *("[]", "{}", "[[]]", "[[0]]", "[1]", "[1,2]", "[a,b]", "[null]", "[nan]", "[inf,-inf]", "[true]", "['']", "[0.9]"),
    *("[0.9,0.95,0.99]", "[-1,2]", "{a:1}", "{a:{b:{c:null}}}", "[{a:1}]", "{_target_:builtins.dict}", "[{kind:x}]"),
    *("{_target_:nowhere.at_all}", "{1:2}", "{null:1}", "[" * 60 + "]" * 60, "[" + ",".join(["0"] * 2000) + "]"),
]

INTERPOLATIONS = [
    *(
        "'${hydra.run.dir}'",
        "'${hydra:run.dir}'",
        "'${nowhere}'",
        "'${seed}'",
        "'${steps}'",
        "'${optimizer}'",
        "'${data}'",
    ),
    *(
        "'${optimizer.lr}'",
        "'${model}'",
        "'${oc.env:HOME}'",
        "'${oc.env:NOT_THERE}'",
        "'${oc.env:NOT_THERE,5}'",
        "'${'",
    ),
    *(
        "'${}'",
        "'${nothing:1}'",
        "'${now:%Y}'",
        "'${now:}'",
        "'${oc.decode:x}'",
        "'${oc.select:a}'",
        "'${.}'",
        "'${..}'",
    ),
    *("'${...a}'", "'${batch_size}'", "'${eval_batches}'", "'a${seed}b'", "'${${seed}}'", "???", "'???'", "'$\\{a\\}'"),
    *(
        "'${oc.create:{a:1}}'",
        "'${oc.dict.keys:optimizer}'",
        "'${python_version:}'",
        "'${guard.sigma}'",
        "'${data.path}'",
    ),
]

SWEEPS = [
    "1,2",
    "choice(1,2)",
    "range(0,3)",
    "interval(0,1)",
    "glob(*)",
    "int(3)",
    "str(3)",
    "float(nan)",
    "sort(3,1)",
    "tag(a,1)",
]

TARGETS = [
    *("builtins.dict", "builtins.int", "builtins.list", "builtins.print", "builtins.None", "builtins.open", "builtins"),
    *("nowhere.at_all", "os", "os.getcwd", "torch.nn.Linear", "torch.nn.Identity", "torch.optim.LBFGS", "torch.zeros"),
    *(
        "stabletrain",
        "stabletrain.errors.ConfigError",
        "stabletrain.guard.SkipGuard",
        "''",
        "null",
        "5",
        "[]",
        "a",
    ),
    *("stabletrain.guard.NoGuard", "stabletrain.stability.clipping.fixed.NoClip", "collections.Counter", "."),
    *(
        "stabletrain.stability.optimizers.sgd.SGD",
        "torch.optim.Adam",
        "types.SimpleNamespace",
        "unittest.mock.Mock",
        "..a",
    ),
    *("stabletrain.data.text.Stdlib", "stabletrain.models.gpt.GPT", "functools.partial", "stabletrain.data.text.Text"),
]

SPECIAL = ["_partial_", "_recursive_", "_convert_", "_args_", "_target_"]

HYDRA = ["hydra.run.dir", "hydra.output_subdir", "hydra.job.chdir", "hydra.verbose", "hydra.job.name", "hydra.mode"]

OPTIONS = [
    *(
        "--config-dir=nowhere",
        "--config-name=nothing",
        "--cfg",
        "--cfg=job",
        "--resolve",
        "--lr=3",
        "-x",
        "--steps",
        "-c",
    ),
    *("--config-path=nowhere", "--info", "--info=config", "--package=a", "--help", "--version", "-h", "--", "-"),
]

LETHAL = {"faults": ["kill"]}
"""Options of groups that end the process on purpose."""


@cache
def groups() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the keys of each option of each group, with their defaults."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for file in sorted(CONF.glob("*/*.yaml")):
        if file.stem in LETHAL.get(file.parent.name, []):
            continue
        keys = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        found.setdefault(file.parent.name, {})[file.stem] = {k: v for k, v in keys.items() if k != "defaults"}
    return found


@cache
def defaults() -> dict[str, Any]:
    """Returns the top-level keys and the options that `conf/config.yaml` chooses."""
    return yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))


def line(seed: int, number: int) -> list[str]:
    """Returns the words of random command line `number`; equal for equal arguments."""
    draw = random.Random(f"{seed}/{number}")
    chosen = {
        name: option for each in defaults()["defaults"] if isinstance(each, dict) for name, option in each.items()
    }
    words = list(TINY_GPT)
    if draw.random() < 0.25:
        words = list(TINY_RESNET)
        chosen |= {"model": "resnet20", "data": "digits"}
    for _ in range(draw.choice((0, 0, 1))):
        group = draw.choice(sorted(groups()))
        option = draw.choice([*sorted(groups()[group])] * 6 + ["", "null", "none", "nothing", "off", "[a]", "{}", "🚀"])
        chosen[group] = option
        words.append(f"{draw.choice(['', '', '', '', '', '+', '++', '~'])}{group}={option}")
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        words.append(override(draw, chosen))
    if draw.random() < 0.1:  # a key a second time
        words.append(override(draw, chosen, key=draw.choice(words).partition("=")[0].lstrip("+~")))
    if draw.random() < 0.04:
        words.insert(draw.randrange(len(words)), draw.choice(OPTIONS))
    return words


def override(draw: random.Random, chosen: dict[str, str], key: str = "") -> str:
    """Returns one random override; `key` is drawn unless it is given."""
    known = key or some_key(draw, chosen)
    prefix = draw.choice([""] * 12 + ["+", "++", "~"])
    if prefix == "~" and draw.random() < 0.7:
        return f"~{known}"
    return f"{prefix}{known}={some_value(draw, known)}"


def some_key(draw: random.Random, chosen: dict[str, str]) -> str:
    """Returns a key of the top level or of a chosen option; rarely one of Hydra's, or one that does not exist."""
    kind = draw.random()
    top = [key for key in defaults() if key not in ("defaults", "hydra")]
    if kind < 0.3:
        return draw.choice(top)
    if kind < 0.36:
        return f"{draw.choice(sorted(groups()))}.{draw.choice(SPECIAL)}"
    if kind < 0.4:
        return draw.choice(HYDRA)
    if kind < 0.44:
        return draw.choice(
            [*sorted(groups()), "modle", "optimizer.lrr", "a.b.c", "a..b", ".", "ä", "seed.x", "data.path.x"]
        )
    held = {group: groups().get(group, {}).get(option, {}) for group, option in chosen.items()}
    keys = [f"{group}.{key}" for group, options in held.items() for key, _ in leaves(options) if key]
    return draw.choice(keys)


def some_value(draw: random.Random, key: str) -> str:
    """Returns a random value for a key."""
    if key.endswith("_target_"):
        return draw.choice(TARGETS)
    if key in ("data.path", "data.root", "init_from", "resume"):  # no folder with other people's files
        kinds: Sequence[Sequence[str]] = (NUMBERS, [w for w in WORDS if w not in (".", "../..")], TREES, INTERPOLATIONS)
    else:
        kinds = (NUMBERS, NUMBERS, NUMBERS, WORDS, WORDS, TREES, INTERPOLATIONS, SWEEPS)
    return draw.choice(draw.choice(kinds))
