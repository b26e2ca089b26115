"""The tokenizer that is written for byte-level data; `tests/beside/export/test_command.py` loads it in transformers."""

from stabletrain.beside.export.byte_tokenizer import characters, files


def test_each_byte_has_a_character_of_its_own_that_is_printable():
    found = characters()
    assert len(set(found)) == 256
    assert all(character.isprintable() and not character.isspace() for character in found)
    assert "".join(found[byte] for byte in b"a b\n") == "aĠbĊ", "as in GPT-2's vocabulary"


def test_ids_are_bytes():
    vocabulary = files(16)["tokenizer.json"]["model"]["vocab"]
    assert [vocabulary[character] for character in characters()] == list(range(256))
