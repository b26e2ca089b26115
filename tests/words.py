"""Fixed text to train on: unlike the Python standard library, it is the same with every version of Python."""

import random
from pathlib import Path

LETTERS = "eeeetttaaaooiinnsshrdlu"


def words(folder: Path, length: int = 60_000) -> list[str]:
    """Writes a file of made-up words into `folder`; returns the overrides that train on it."""
    drawn = random.Random(0)
    known = ["".join(drawn.choice(LETTERS) for _ in range(2 + int(6 * drawn.random()))) for _ in range(400)]
    text = ""
    while len(text) < length:
        text += known[int(400 * drawn.random() ** 2)] + (".\n" if drawn.random() < 0.1 else " ")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "words.txt").write_text(text)
    return ["data=text", f"data.path={folder / 'words.txt'}"]
