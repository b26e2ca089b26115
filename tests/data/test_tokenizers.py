"""A byte-pair vocabulary is used; if it is missing, one message reports it."""

import pytest

from stabletrain.data.prepare import prepare
from stabletrain.data.tokens import Tokens
from stabletrain.errors import ConfigError


def test_a_byte_pair_vocabulary_is_used_and_stored_in_16_bits(tmp_path, text, monkeypatch):
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)} | {b"li": 256, b"ne": 257, b"line": 258}
    tiny = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 259})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: tiny)
    meta = prepare(str(text), str(tmp_path / "out"), tokenizer="gpt2", val_fraction=0.2)
    assert (meta["dtype"], meta["vocab_size"], meta["tokenizer"]) == ("uint16", 260, "gpt2")
    data = Tokens(str(tmp_path / "out"), block_size=32, seed=0)
    assert 258 in data.batch(0, 4, "train").inputs
    assert data.decode(data.batch(0, 1, "val").inputs[0].tolist()) in text.read_text()


def test_a_vocabulary_that_cannot_be_fetched_is_one_message(tmp_path, text, monkeypatch):
    import tiktoken

    def unreachable(name):
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(ConfigError, match="tokenizer=gpt2: its vocabulary could not be downloaded.*TIKTOKEN_CACHE_DIR"):
        prepare(str(text), str(tmp_path / "out"), tokenizer="gpt2")
