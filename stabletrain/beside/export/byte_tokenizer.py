"""The tokenizer of byte-level data in the format of transformers: the ids of a text are its UTF-8 bytes.

transformers has no such tokenizer (ByT5's ids are shifted by 3). Its byte-level BPE with the 256 single bytes and no
merges is one. That format writes each byte as a printable character: itself where it is one in Latin-1, else the next
unused character from U+0100 on.
"""

from typing import Any

PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that stand for themselves."""


def characters() -> list[str]:
    """Returns the character that stands for each byte, by its value."""
    others = [byte for byte in range(256) if byte not in PRINTABLE]
    return [chr(byte) if byte in PRINTABLE else chr(0x100 + others.index(byte)) for byte in range(256)]


def files(length: int) -> dict[str, dict[str, Any]]:
    """Returns the content of `tokenizer.json` and `tokenizer_config.json`.

    Args:
        length: the largest number of tokens that the model reads.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(characters())}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocabulary, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": level, "model": model}
    return {
        "tokenizer.json": {**tokenizer, "post_processor": None, "decoder": level, "truncation": None, "padding": None},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
        },
    }
