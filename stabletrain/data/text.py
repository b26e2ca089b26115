"""Byte-level text: each byte of a file is a token, so no tokenizer is needed."""

import hashlib
import math
import os
import re
import sysconfig
from pathlib import Path

import numpy as np

from stabletrain.data.files import find_text, required
from stabletrain.data.order import split_hash
from stabletrain.data.tokenizers import Bytes
from stabletrain.data.windows import LengthWarmup, Windows
from stabletrain.errors import ConfigError

MANY_FILES = 20  # from this many files on, whole files are held out
NAMES_OF_SPLITS = frozenset({"test", "val", "valid", "validation"})
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Pieces:
    """A `Stream` over the concatenated bytes of files.

    Args:
        pieces: (file, offset in the file, bytes) of each piece, in order.
    """

    def __init__(self, pieces: list[tuple[str, int, bytes]]) -> None:
        self._bytes = np.frombuffer(b"".join(content for _, _, content in pieces), np.uint8)
        self._where = [(name, offset) for name, offset, _ in pieces]
        self._starts = np.cumsum([0] + [len(content) for _, _, content in pieces])

    def __len__(self) -> int:
        return len(self._bytes)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns bytes `start ... stop - 1`, uint8."""
        return self._bytes[start:stop]

    def locate(self, position: int) -> str:
        """Returns `<file> at byte <offset>`."""
        piece = int(np.searchsorted(self._starts, position, "right")) - 1
        name, offset = self._where[piece]
        return f"{name} at byte {offset + position - int(self._starts[piece])}"  # a colon would read as a line number


class Corpus(Windows):
    """Byte-level text of a list of files.

    With 20 or more files, whole files are held out for validation: those whose name hashes below `val_fraction`, at
    least one. With fewer files, the last `val_fraction` of each file is held out. Neither depends on the seed, so runs
    with different seeds validate on the same text.

    Args:
        name: name of the data set.
        where: the user's key and its value, for errors.
        root: folder of the files.
        files: names relative to `root`.
        block_size: bytes in a sample.
        val_fraction: share held out for validation, in (0, 1).
        seed: seed of the sample order.
        prompt: default prompt for generated text.
        length_warmup: sequence-length warmup of training samples.
        skip_unreadable: ignore files that cannot be read, instead of raising.

    Raises:
        ConfigError: a value is out of range, a file cannot be read, or there is too little text.
    """

    vocab_size = Bytes.vocab_size

    def __init__(
        self,
        *,
        name: str,
        where: str,
        root: Path,
        files: list[str],
        block_size: int,
        val_fraction: float,
        seed: int,
        prompt: str,
        length_warmup: LengthWarmup,
        skip_unreadable: bool = False,
    ) -> None:
        if not 0 < val_fraction < 1:
            raise ConfigError(f"data.val_fraction={val_fraction} is not between 0 and 1: 0.1 holds out a tenth")
        contents: list[tuple[str, bytes]] = []
        for file in files:
            try:
                contents.append((file, (root / file).read_bytes()))
            except OSError as error:
                if not skip_unreadable:
                    raise ConfigError(
                        f"{where}: {root / file} cannot be read ({error.strerror}): change its permissions or move it"
                    ) from None
        train: list[tuple[str, int, bytes]] = []
        val: list[tuple[str, int, bytes]] = []
        held_out = f"the last {100 * val_fraction:g} % of {'each file is' if len(contents) > 1 else 'the file is'}"
        if len(contents) >= MANY_FILES:
            # The limit is above the lowest hash, so that validation is never empty.
            limit = max(val_fraction, math.nextafter(min(split_hash(file) for file, _ in contents), 1))
            for file, content in contents:
                (val if split_hash(file) < limit else train).append((str(root / file), 0, content))
            held_out = f"{len(val)} of {len(contents)} files are"
        else:
            for file, content in contents:
                cut = len(content) - round(len(content) * val_fraction)
                train.append((str(root / file), 0, content[:cut]))
                val.append((str(root / file), cut, content[cut:]))
        super().__init__(
            Pieces(train),
            Pieces(val),
            block_size=block_size,
            seed=seed,
            where=where,
            unit="bytes",
            length_warmup=length_warmup,
        )
        self.name, self.prompt, self._held_out = name, prompt, held_out
        self._files, self._sizes = [file for file, _ in contents], [len(content) for _, content in contents]

    @property
    def summary(self) -> str:
        """Name, size and number of files."""
        number = f"{len(self._files):,} file{'s' if len(self._files) != 1 else ''}"
        size = sum(self._sizes)
        shown = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
        return f"{self.name}, {shown}, {number}"

    def fingerprint(self) -> dict[str, str | int]:
        """Identifies the data by its name, sizes and a BLAKE2b hash of file names, file sizes and all bytes."""
        digest = hashlib.blake2b(repr(list(zip(self._files, self._sizes, strict=True))).encode(), digest_size=16)
        for stream in (self._train, self._val):
            digest.update(np.ascontiguousarray(stream.read(0, len(stream))).data)
        return {
            "name": self.name,
            "files": len(self._files),
            "train_tokens": len(self._train),
            "val_tokens": len(self._val),
            "hash": digest.hexdigest(),
        }

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`."""
        return Bytes().encode(text)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of bytes."""
        return Bytes().decode(ids)


class Text(Corpus):
    """The user's text: a file, all text files in a folder, or all that match a glob (see `find_text`).

    Args:
        path: file, folder or glob, relative to the current folder.
        length_warmup, length_start: see `LengthWarmup`.

    Raises:
        ConfigError: see `Corpus`; or the path is not set or does not exist.
    """

    def __init__(
        self,
        path: str | None,
        block_size: int = 256,
        val_fraction: float = 0.1,
        seed: int = 0,
        length_warmup: int = 0,
        length_start: int = 8,
    ) -> None:
        path = required(path, "data=text", "file, folder or glob")
        root, files = find_text(path, "data.path")
        super().__init__(
            name=Path(path).name or str(path),
            where=f"data.path={path}",
            root=root,
            files=files,
            block_size=block_size,
            val_fraction=val_fraction,
            seed=seed,
            prompt="\n",
            length_warmup=LengthWarmup(length_warmup, length_start),
        )

    @property
    def split(self) -> str:
        """How the text is split; if a file name contains the name of a split, also that file names do not matter."""
        named = next((f for f in self._files if NAMES_OF_SPLITS & {*re.split(r"[\W_]+", f.lower())}), None)
        hint = "" if named is None else f"; the name {named} does not choose a split: data.path=<glob> can leave it out"
        return f"{self._held_out} for validation (data.val_fraction){hint}"


class Stdlib(Corpus):
    """The source of the Python standard library: about 11 MB of text that every machine with Python has.

    Excludes tests, installed packages and files that cannot be read. The text and `fingerprint` depend on the Python
    version.

    Args:
        length_warmup, length_start: see `LengthWarmup`.

    Raises:
        ConfigError: see `Corpus`; for example if Python's library is in an archive.
    """

    def __init__(
        self,
        block_size: int = 128,
        val_fraction: float = 0.04,
        seed: int = 0,
        length_warmup: int = 0,
        length_start: int = 8,
    ) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = []
        for folder, below, names in os.walk(root):
            below[:] = [n for n in below if n not in NOT_THE_LIBRARY]
            files += [Path(folder, n).relative_to(root).as_posix() for n in names if n.endswith(".py")]
        super().__init__(
            name="stdlib",
            where=f"data=stdlib ({root})",
            root=root,
            files=sorted(files),
            block_size=block_size,
            val_fraction=val_fraction,
            seed=seed,
            prompt="def ",
            length_warmup=LengthWarmup(length_warmup, length_start),
            skip_unreadable=True,
        )
