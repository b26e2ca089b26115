"""Tokenizers: text to numbers and back; bytes need nothing, byte-pair vocabularies need tiktoken. Needs no torch."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from stabletrain.errors import ConfigError


@runtime_checkable
class Tokenizer(Protocol):
    """What turns text into numbers below `vocab_size`; `separator` is the number put after each document."""

    name: str
    vocab_size: int
    separator: int

    def encode(self, text: str) -> list[int]:
        """Numbers of `text`; never the separator's by way of special words in the text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; what is no valid UTF-8 becomes U+FFFD."""
        ...


class Bytes:
    """Every byte of the UTF-8 text is a token; byte 0, which text does not hold, separates documents."""

    name = "bytes"
    vocab_size = 256
    separator = 0

    def encode(self, text: str) -> list[int]:
        """The bytes of `text` in UTF-8."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of bytes; ids past them, which a model with a larger vocabulary may draw, become U+FFFD."""
        return bytes(i if i < 256 else 0xFF for i in ids).decode(errors="replace")


class BytePair:
    """A byte-pair vocabulary by its tiktoken name, such as `gpt2` (Sennrich et al., arXiv 1508.07909).

    Args:
        name: tiktoken's name of the encoding.

    Raises:
        ConfigError: tiktoken is missing, does not know the name, or cannot get the vocabulary.
    """

    def __init__(self, name: str) -> None:
        try:
            import tiktoken
        except ImportError:
            raise ConfigError(
                f"tokenizer={name} needs the package tiktoken, which is not installed: "
                "pip install 'stabletrain[bpe]', or use the tokenizer bytes"
            ) from None
        if name not in (known := tiktoken.list_encoding_names()):
            raise ConfigError(f"tokenizer={name} is none of bytes, {', '.join(known)}: choose one of them")
        try:
            self._encoding: Any = tiktoken.get_encoding(name)
        except Exception as error:  # whatever the network layer raises
            raise ConfigError(
                f"tokenizer={name}: its vocabulary could not be downloaded ({type(error).__name__}): run once where "
                "there is a network with TIKTOKEN_CACHE_DIR set to a folder, and set the same folder here"
            ) from error
        self.name = name
        self.vocab_size: int = self._encoding.n_vocab
        self.separator: int = self._encoding.eot_token

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special words in it are ordinary text."""
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`."""
        return self._encoding.decode(list(ids), errors="replace")


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: `bytes`, or a tiktoken encoding.

    Raises:
        ConfigError: it cannot be had; the message says why and what to do.
    """
    return Bytes() if name == "bytes" else BytePair(name)
