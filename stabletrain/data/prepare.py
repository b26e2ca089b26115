"""`stabletrain prepare`: converts text files or a Hugging Face data set to token shards for `data=tokens`.

Documents are streamed: memory holds one document at a time. The tokenizer's separator follows each document. Only a
hash of its name decides whether a document is held out for validation.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stabletrain.data.files import VERSION, find_text
from stabletrain.data.order import split_hash
from stabletrain.data.tokenizers import Tokenizer, load_tokenizer
from stabletrain.errors import ConfigError
from stabletrain.printable import say
from stabletrain.program import program_name

FEW_DOCUMENTS = 20
"""From this many documents on, whole documents are held out; with fewer, the end of each document is."""

TOKENS_PER_LINE = 100_000_000
"""Tokens between two lines of progress."""


class Writer:
    """Writes the tokens of one split into shards of `limit` tokens."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, limit: int) -> None:
        self._folder, self._split, self._dtype, self._limit = folder, split, dtype, limit
        self.shards: list[dict[str, str | int]] = []
        self.tokens = 0
        self._room, self._file = 0, None

    def add(self, ids: Sequence[int]) -> None:
        """Appends tokens; starts new shards as needed."""
        values = np.asarray(ids, dtype=self._dtype)
        while len(values):
            if not self._room:
                self.close()
                name = f"{self._split}-{len(self.shards):05}.bin"
                self.shards.append({"file": name, "tokens": 0})
                self._file, self._room = (self._folder / name).open("wb"), self._limit
            piece, values = values[: self._room], values[self._room :]
            assert self._file is not None
            piece.tofile(self._file)
            self._room -= len(piece)
            self.tokens += len(piece)
            self.shards[-1]["tokens"] = int(self.shards[-1]["tokens"]) + len(piece)

    def close(self) -> None:
        """Flushes the open shard to disk and closes it."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def prepare(
    source: str,
    out: str,
    *,
    tokenizer: str = "bytes",
    val_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    hf: bool = False,
    hf_config: str | None = None,
    hf_split: str = "train",
    column: str = "text",
) -> dict:
    """Writes the shards; returns the manifest.

    Args:
        source: a file, folder or glob of text; with `hf` the name or local folder of a Hugging Face data set.
        out: the folder to write; must not exist, or must be empty.
        tokenizer: `bytes`, or the name of a tiktoken encoding such as `gpt2`.
        val_fraction: share held out for validation, in (0, 1).
        shard_tokens: maximum number of tokens in a shard.
        hf: whether `source` is a Hugging Face data set.
        hf_config, hf_split: configuration and split of a Hugging Face data set.
        column: column of a Hugging Face data set that holds the text.

    Raises:
        ConfigError: a value is out of range, there is nothing to read, or `out` is not empty.
    """
    target = check_arguments(source, out, val_fraction, shard_tokens)
    coder = load_tokenizer(tokenizer)
    few, documents = huggingface(source, hf_config, hf_split, column) if hf else texts(source)
    dtype = np.dtype("uint8" if coder.vocab_size <= 2**8 else "uint16" if coder.vocab_size <= 2**16 else "uint32")
    # Renamed at the end, so that an interrupted run leaves no half-written data.
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    splits = {split: Writer(partial, split, dtype.newbyteorder("<"), shard_tokens) for split in ("train", "val")}
    try:
        write_tokens(documents, few, val_fraction, coder, splits)
        for split, writer in splits.items():
            writer.close()
            if not writer.tokens:
                to = "train" if split == "train" else "validate"
                raise ConfigError(f"{source} has too little text: nothing is left to {to} on; give more text")
        meta = {"version": VERSION, "tokenizer": coder.name, "vocab_size": coder.vocab_size, "dtype": dtype.name}
        meta |= {"source": source, "splits": {split: writer.shards for split, writer in splits.items()}}
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        for writer in splits.values():
            writer.close()
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return meta


NAME_BYTES = 200
"""Bytes that a folder's name may have: file systems allow 255, and `prepare` first writes under a longer name."""


def check_arguments(source: str, out: str, val_fraction: float, shard_tokens: int) -> Path:
    """Validates the arguments; returns the folder to write.

    Raises:
        ConfigError: a value is missing or out of range, or `out` is not an empty folder.
    """
    if not source or not out:
        raise ConfigError(
            "the source or the folder to write is empty, perhaps from a variable that is not set: name it"
        )
    if not 0 < val_fraction < 1:
        raise ConfigError(f"--val-fraction={val_fraction} is not between 0 and 1: 0.01 is customary")
    if shard_tokens < 1:
        raise ConfigError(f"--shard-tokens={shard_tokens} is below 1; fix: --shard-tokens=1 or more")
    target = Path(os.path.abspath(Path(out).expanduser()))
    if (length := len(os.fsencode(target.name))) > NAME_BYTES:
        raise ConfigError(
            f"{out[:40]}...: its name has {length} bytes, but names may have {NAME_BYTES} here: shorten it"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder: choose another, or remove it")
    return target


def write_tokens(
    documents: Iterator[tuple[str, str]], few: bool, val_fraction: float, coder: Tokenizer, splits: dict[str, Writer]
) -> None:
    """Writes the tokens of each document to its split, and prints progress."""
    said = 0
    for name, text in documents:
        for split, piece in split_document(name, text, val_fraction, few):
            for part in pieces(piece):
                splits[split].add(coder.encode(part))
            splits[split].add([coder.separator])
        if (done := sum(writer.tokens for writer in splits.values())) >= said + TOKENS_PER_LINE:
            said = done
            say(f"{done:,} tokens", flush=True)


def texts(source: str) -> tuple[bool, Iterator[tuple[str, str]]]:
    """Returns whether there are few documents, and name and text of each file; replaces invalid UTF-8."""
    root, files = find_text(source, "source")
    return len(files) < FEW_DOCUMENTS, ((file, (root / file).read_bytes().decode(errors="replace")) for file in files)


def split_document(name: str, text: str, val_fraction: float, few: bool) -> Iterator[tuple[str, str]]:
    """Yields split and text: the whole document for one split or, if `few`, its end for `val`, the rest for `train`."""
    if not few:
        yield ("val" if split_hash(name) < val_fraction else "train"), text
        return
    cut = len(text) - round(len(text) * val_fraction)
    for split, piece in (("train", text[:cut]), ("val", text[cut:])):
        if piece:
            yield split, piece


def pieces(text: str, size: int = 1 << 20) -> Iterator[str]:
    """Yields a text in pieces of at most `size` characters, cut after line ends if possible.

    Encoding a long document at once would need several times its memory.
    """
    start = 0
    while start < len(text):
        stop = start + size
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def huggingface(source: str, config: str | None, split: str, column: str) -> tuple[bool, Iterator[tuple[str, str]]]:
    """Returns False (there are many documents), and number and text of each row of a data set, streamed."""
    try:
        import datasets
    except ImportError as error:  # missing, or a dependency is incompatible (pyarrow with an old NumPy)
        raise ConfigError(
            f"--hf needs the package datasets, which cannot be imported ({error}): pip install 'stabletrain[hf]'"
        ) from None
    try:
        rows = datasets.load_dataset(source, config, split=split, streaming=True)
        first = next(iter(rows), None)
    except Exception as error:  # the network or a wrong name may raise anything
        raise unreadable(source, "could not be opened", error) from None
    if first is None or column not in first:
        columns = ", ".join(first) if first else "none, because it is empty"
        raise ConfigError(f"--column={column} is not in {source}: its columns are {columns}")

    def documents() -> Iterator[tuple[str, str]]:
        number = -1
        try:
            for number, row in enumerate(rows):
                if row[column] is not None:
                    yield str(number), str(row[column])
        except Exception as error:  # the network may fail in the middle of the stream
            raise unreadable(source, f"could not be read after row {number}", error) from None

    return False, documents()


def unreadable(source: str, what: str, error: Exception) -> ConfigError:
    """Returns one error message for any error of the library."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"{source}: the data set {what} ({type(error).__name__}: {reason})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `stabletrain prepare`."""
    parser.add_argument("source", help="a file, folder or glob of text; with --hf a Hugging Face data set")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes, or a tiktoken encoding such as gpt2 (default: bytes)"
    )
    parser.add_argument(
        "--val-fraction", type=float, default=0.01, help="share held out for validation (default: 0.01)"
    )
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens per shard (default: 100000000)")
    parser.add_argument(
        "--hf", action="store_true", help="source is a data set on the Hugging Face hub, or a local one"
    )
    parser.add_argument("--hf-config", help="configuration of the data set, such as sample-10BT")
    parser.add_argument("--hf-split", default="train", help="split of the data set (default: train)")
    parser.add_argument("--column", default="text", help="column that holds the text (default: text)")


def run(chosen: argparse.Namespace) -> None:
    """Runs `stabletrain prepare`."""
    names = ("tokenizer", "val_fraction", "shard_tokens", "hf", "hf_config", "hf_split", "column")
    meta = prepare(chosen.source, chosen.out, **{name: getattr(chosen, name) for name in names})
    sizes = {split: sum(shard["tokens"] for shard in shards) for split, shards in meta["splits"].items()}
    say(f"{chosen.out}: {sizes['train']:,} tokens to train on, {sizes['val']:,} to validate on")
    say(f"next     {program_name()} data=tokens data.path={chosen.out}")
