"""Tokenizers: bytes, which need no package, and byte-pair encodings, which need tiktoken. Does not import torch."""

from collections.abc import Iterable
from concurrent import futures
from threading import Thread
from typing import Any

from stabletrain.errors import ConfigError, did_you_mean

PATIENCE = 30.0
"""Seconds to wait for a vocabulary that has to be downloaded: tiktoken itself would wait without limit."""

OFFLINE = "run once where there is a network with TIKTOKEN_CACHE_DIR set to a folder, and set the same folder here"

NO_TOKENIZER = "none"
"""Recorded with shards that another program wrote with a tokenizer of its own."""


class Bytes:
    """Each UTF-8 byte is a token; byte 0, which does not occur in text, separates documents."""

    name = "bytes"
    vocab_size = 256
    separator = 0

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of bytes; invalid UTF-8 and ids above 255 become U+FFFD."""
        # A model with a larger vocabulary may sample ids above 255; 0xFF is never valid UTF-8.
        return bytes(i if i < 256 else 0xFF for i in ids).decode(errors="replace")


class BytePair:
    """A byte-pair encoding from tiktoken, such as `gpt2` (Sennrich et al., arXiv 1508.07909).

    Args:
        name: tiktoken's name of the encoding.

    Raises:
        ConfigError: tiktoken is missing, does not know the name, or cannot download the vocabulary.
    """

    def __init__(self, name: str) -> None:
        try:
            import tiktoken
        except ImportError:
            raise ConfigError(
                f"tokenizer={name} needs the package tiktoken, which is not installed: "
                "pip install 'stabletrain[bpe]', or use the tokenizer bytes"
            ) from None
        if name not in (known := ["bytes", *tiktoken.list_encoding_names()]):
            close = did_you_mean(name, known)
            raise ConfigError(f"tokenizer={name} is none of {', '.join(known)}{close or ': choose one of them'}")
        try:
            self._encoding: Any = tiktoken.get_encoding(name)
        except Exception as error:  # the network may raise anything
            raise ConfigError(
                f"tokenizer={name}: its vocabulary could not be downloaded ({type(error).__name__}): {OFFLINE}"
            ) from error
        self.name = name
        self.vocab_size: int = self._encoding.n_vocab
        self.separator: int = self._encoding.eot_token

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`; treats special tokens in it as ordinary text."""
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; replaces invalid UTF-8 by U+FFFD."""
        return self._encoding.decode(list(ids), errors="replace")


Tokenizer = Bytes | BytePair
"""Converts text to token ids below `vocab_size` and back; `separator` is the id that ends each document."""


def load_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer called `name`: `bytes`, or a tiktoken encoding.

    Raises:
        ConfigError: see `BytePair`; or the name is `none`.
    """
    if name == NO_TOKENIZER:
        raise ConfigError(f"tokenizer={name}: the shards name no tokenizer, so their tokens cannot be shown as text")
    return Bytes() if name == "bytes" else BytePair(name)


class LazyTokenizer:
    """A tokenizer that is loaded when it is first needed, once, on a background thread.

    A daemon thread: a network that never answers does not keep the process from exiting.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loading: futures.Future[Tokenizer] | None = None

    def get(self, seconds: float = PATIENCE) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
            ConfigError: see `load_tokenizer`; or it is not loaded after `seconds`.
        """
        if self._loading is None:
            self._loading = futures.Future()
            Thread(target=self._load, args=[self._loading], daemon=True, name=f"tokenizer {self.name}").start()
        try:
            return self._loading.result(seconds)
        except futures.TimeoutError:  # another class than the built-in one in Python 3.10
            raise ConfigError(
                f"tokenizer={self.name}: its vocabulary is not downloaded after {seconds:g} s: {OFFLINE}"
            ) from None

    def _load(self, loading: "futures.Future[Tokenizer]") -> None:
        try:
            loading.set_result(load_tokenizer(self.name))
        except Exception as error:
            loading.set_exception(error)


def check_name(name: str, place: str) -> None:
    """Checks a recorded name of a tokenizer, without loading it. If tiktoken is missing, any name is accepted.

    Args:
        name: the name.
        place: where it is recorded, for the message.

    Raises:
        ConfigError: tiktoken has no encoding of this name.
    """
    try:
        import tiktoken
    except ImportError:
        return
    if name not in (known := ["bytes", NO_TOKENIZER, *tiktoken.list_encoding_names()]):
        raise ConfigError(
            f"{place}: tokenizer={name} is none of {', '.join(known)}{did_you_mean(name, known)}: correct it there "
            f"({NO_TOKENIZER}: tokens of another program, without a text sample)"
        )
