"""A byte-pair vocabulary is used; if it is missing, one message reports it."""

import json
import threading

import pytest

from stabletrain.data.prepare import prepare
from stabletrain.data.tokens import Tokens
from stabletrain.errors import ConfigError
from stabletrain.trainer.banner import text_note
from tests.runs import TINY_GPT, command


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


@pytest.fixture
def shards_of(tmp_path, text):
    """Writes shards whose manifest names a tokenizer; returns their folder."""

    def make(tokenizer):
        meta = prepare(str(text), str(tmp_path / "out"), val_fraction=0.2)
        (tmp_path / "out" / "meta.json").write_text(json.dumps(meta | {"tokenizer": tokenizer}))
        return str(tmp_path / "out")

    return make


def test_shards_of_an_unknown_tokenizer_are_refused_at_the_start(shards_of):
    with pytest.raises(ConfigError, match=r"meta.json: tokenizer=gtp2 is none of bytes, .*did you mean gpt2\?"):
        Tokens(shards_of("gtp2"), block_size=32, seed=0)


def test_shards_without_a_tokenizer_are_trained_on_without_a_note(shards_of):
    data = Tokens(shards_of("none"), block_size=32, seed=0)
    assert text_note(data) == ""
    with pytest.raises(ConfigError, match="the shards name no tokenizer"):
        data.decode([1])


def test_a_tokenizer_that_cannot_be_fetched_is_a_note_and_is_tried_once(shards_of, monkeypatch):
    import tiktoken

    tries = []

    def unreachable(name):
        tries.append(name)
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    data = Tokens(shards_of("gpt2"), block_size=32, seed=0)
    assert "no text sample at the end: tokenizer=gpt2: its vocabulary could not be downloaded" in text_note(data)
    with pytest.raises(ConfigError, match="could not be downloaded"):
        data.encode("a")
    assert tries == ["gpt2"]


def test_a_network_that_never_answers_is_waited_for_only_so_long(shards_of, monkeypatch):
    import tiktoken

    answer = threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: answer.wait())
    data = Tokens(shards_of("gpt2"), block_size=32, seed=0)
    assert "is not downloaded after 0.01 s" in data.why_no_text(0.01)
    answer.set()


@pytest.mark.beside
@pytest.mark.slow
def test_a_run_without_its_vocabulary_finishes_with_a_report_and_says_why_there_is_no_sample(tmp_path, shards_of):
    arguments = [*TINY_GPT, "data=tokens", f"data.path={shards_of('gpt2')}", "steps=2", "hydra.run.dir=run"]
    proxy = "http://127.0.0.1:9"  # refuses every connection
    done = command(*arguments, cwd=tmp_path, https_proxy=proxy, TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"))
    assert done.returncode == 0, done.stderr
    assert "no text sample at the end: tokenizer=gpt2" in done.stdout
    assert "sample   (none: tokenizer=gpt2" in done.stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    assert (tmp_path / "run" / "report.html").exists()
