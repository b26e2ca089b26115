"""What a cluster calls things: partitions, cards, accounts, read from `slurm/cluster.conf`."""

import configparser
import difflib
from dataclasses import dataclass, fields
from pathlib import Path

from stabletrain.errors import ConfigError
from stabletrain.slurm.request import seconds


@dataclass(frozen=True)
class Card:
    """How to ask for one kind of card; an empty string asks for nothing.

    Attributes:
        name: the section's.
        partition, account, qos, constraint, memory: as `sbatch` takes them.
        gres: the cards of a node, `{gpus}` standing for their number; empty on nodes without cards.
        gpus_per_node: where `--gpus-per-node` does not say it.
        cpus_per_gpu: cores for each card's process.
        time: where `--time` does not say it.
        notice: seconds before the time limit at which a job is told to save.
        modules: to be loaded.
        environment: shell lines that make the environment, run on the first node of each job.
        python: the interpreter on the nodes; empty: the one that submits.
        sbatch: more options of `sbatch`, one a line.
    """

    name: str
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    memory: str = ""
    gres: str = ""
    gpus_per_node: str = "1"
    cpus_per_gpu: str = ""
    time: str = ""
    notice: str = "120"
    modules: str = ""
    environment: str = ""
    python: str = ""
    sbatch: str = ""


KEYS = [field.name for field in fields(Card) if field.name != "name"]

COUNTS = {"gpus_per_node": 1, "cpus_per_gpu": 1, "notice": 30}
"""Keys that are whole numbers, and their lowest value: Slurm looks at time limits every 30 seconds."""


def read(file: Path, name: str) -> Card:
    """One card's section, with what [DEFAULT] says for every card.

    Raises:
        ConfigError: there is no such file or section, or a key or value in it that cannot be.
    """
    config = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    try:
        with file.open(encoding="utf-8") as lines:
            config.read_file(lines)
    except OSError as error:
        raise ConfigError(f"--cluster {file} cannot be read ({error.strerror}): see slurm/README.md") from error
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    if name not in config:
        raise ConfigError(f"--gpu {name} is not in {file}, which has {', '.join(config.sections())}: add it there")
    for key, value in config[name].items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KEYS)}"
            raise ConfigError(f"{file}: [{name}] {key}: there is no such key; {hint}")
        if value and key in COUNTS and (not value.isdecimal() or int(value) < COUNTS[key]):
            raise ConfigError(f"{file}: [{name}] {key} = {value} is not a whole number of at least {COUNTS[key]}")
    card = Card(name, **{key: value for key, value in config[name].items() if value})
    if card.time:
        seconds(card.time)
    return card
