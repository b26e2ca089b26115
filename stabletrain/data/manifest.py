"""The manifest of a folder of token shards: what `stabletrain prepare` writes and `data=tokens` reads. Needs no torch.

meta.json     {"version", "tokenizer", "vocab_size", "dtype", "splits": {"train": [{"file", "tokens"}], "val": ...}}
*.bin         raw little-endian token ids of that dtype
"""

import json
from pathlib import Path

from stabletrain.errors import ConfigError

VERSION = 1
DTYPES = ("uint8", "uint16", "uint32")


def read_meta(folder: Path) -> dict:
    """The manifest of a folder of shards.

    Raises:
        ConfigError: it is missing, is no such manifest, or is of another version.
    """
    file = folder / "meta.json"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        shards = [shard for split in ("train", "val") for shard in meta["splits"][split]]
        whole = all(isinstance(s["file"], str) and isinstance(s["tokens"], int) for s in shards)
        whole = whole and isinstance(meta["vocab_size"], int) and isinstance(meta["tokenizer"], str)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"data.path={folder} has no meta.json: write the folder with `stabletrain prepare <text> {folder}`, "
            "or use data=text for plain text"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"data.path: {file} is no manifest of token shards ({error!r}): prepare the data again"
        ) from None
    if not whole or meta.get("version") != VERSION or meta.get("dtype") not in DTYPES:
        raise ConfigError(
            f"data.path: {file} is of version {meta.get('version')} with dtype {meta.get('dtype')}, "
            f"this program reads version {VERSION} with {', '.join(DTYPES)}: prepare the data again"
        )
    return meta
