"""Token shards: memory-mapped files that `stabletrain prepare` writes. See `files.py` for the format."""

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from stabletrain.data.files import existing, read_meta, required
from stabletrain.data.tokenizers import NO_TOKENIZER, LazyTokenizer, check_name
from stabletrain.data.windows import LengthWarmup, Windows
from stabletrain.errors import ConfigError

OPEN = 256
"""Maximum number of open shards of a split: each takes a file descriptor, of which a process often has 1,024."""


class Shards:
    """A `Stream` over the shards of one split. Those beyond `OPEN` are opened when they are read.

    Args:
        shards: file name and number of tokens of each shard, in order.
        dtype: dtype of a token id.

    Raises:
        ConfigError: a shard is missing, or its size differs from the manifest.
    """

    def __init__(self, folder: Path, shards: list[tuple[str, int]], dtype: np.dtype) -> None:
        self._itemsize = dtype.itemsize
        for name, tokens in shards:
            file = folder / name
            size = file.stat().st_size if file.is_file() else -1
            if size != tokens * dtype.itemsize:
                found = "is missing" if size < 0 else f"has {size:,} bytes"
                wanted = tokens * dtype.itemsize
                raise ConfigError(
                    f"data.path: shard {file} {found}, but the manifest says {wanted:,}: prepare the data again"
                )
        self._files = [folder / name for name, tokens in shards if tokens]
        sizes = [tokens for _, tokens in shards if tokens]
        self._starts = np.cumsum([0, *sizes])
        self._map = lru_cache(OPEN)(lambda shard: np.memmap(self._files[shard], dtype, "r", shape=(sizes[shard],)))
        for shard in range(min(len(sizes), OPEN)):  # so that these stay what they are, even if the files are deleted
            self._map(shard)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens `start ... stop - 1`; the range may cross shards."""
        pieces = []
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        for shard in range(first, len(self._files)):
            begin = int(self._starts[shard])
            if begin >= stop:
                break
            pieces.append(self._map(shard)[max(start - begin, 0) : stop - begin])
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]

    def locate(self, position: int) -> str:
        """Returns `<shard> at byte <offset>` of a token."""
        shard = int(np.searchsorted(self._starts, position, "right")) - 1
        return f"{self._files[shard]} at byte {(position - int(self._starts[shard])) * self._itemsize}"


class Tokens(Windows):
    """Batches of windows over memory-mapped token shards.

    Args:
        path: the folder that `stabletrain prepare` wrote.
        length_warmup, length_start: see `LengthWarmup`.

    Attributes:
        vocab_size: size of the tokenizer's vocabulary.
        prompt: default prompt for generated text.

    Raises:
        ConfigError: the path is not set, it has no valid manifest, its tokenizer is unknown, a shard is invalid, or
            there are too few tokens.
    """

    prompt = "\n"

    def __init__(
        self, path: str | None, block_size: int, seed: int, length_warmup: int = 0, length_start: int = 8
    ) -> None:
        path = required(path, "data=tokens", "folder that stabletrain prepare wrote")
        folder = existing(path, "data.path")
        meta = read_meta(folder)
        check_name(meta["tokenizer"], f"data.path: {folder / 'meta.json'}")
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        train, val = (
            Shards(folder, [(shard["file"], shard["tokens"]) for shard in meta["splits"][split]], dtype)
            for split in ("train", "val")
        )
        super().__init__(
            train,
            val,
            block_size=block_size,
            seed=seed,
            where=f"data.path={path}",
            unit="tokens",
            length_warmup=LengthWarmup(length_warmup, length_start),
        )
        self.vocab_size: int = meta["vocab_size"]
        self._tokenizer = LazyTokenizer(meta["tokenizer"])
        self._folder, self._meta = folder, meta

    @property
    def summary(self) -> str:
        """Name, number of tokens and tokenizer."""
        return f"{self._folder.name}, {len(self._train) + len(self._val):,} tokens of {self._tokenizer.name}"

    def fingerprint(self) -> dict:
        """Identifies the data by the manifest's numbers and hash; does not read the tokens."""
        digest = hashlib.sha256((self._folder / "meta.json").read_bytes()).hexdigest()
        sizes = {"train_tokens": len(self._train), "val_tokens": len(self._val)}
        return {"name": self._folder.name, "tokenizer": self._tokenizer.name, **sizes, "meta_sha256": digest}

    def why_no_text(self, seconds: float) -> str:
        """Returns why tokens cannot be shown as text; empty if they can. Loads the tokenizer, for at most `seconds`."""
        try:
            self._tokenizer.get(seconds)
        except ConfigError as error:
            return "" if self._tokenizer.name == NO_TOKENIZER else str(error)
        return ""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; raises ConfigError if the tokenizer cannot be loaded."""
        return self._tokenizer.get().encode(text)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids; raises ConfigError if the tokenizer cannot be loaded."""
        return self._tokenizer.get().decode(ids)
