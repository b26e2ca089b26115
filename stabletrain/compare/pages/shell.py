"""A page of HTML that needs nothing but itself: scripts, styles and numbers are in one file, and it may load nothing.

A policy in its head lets only the scripts run that were put in here, by their SHA-256, and forbids every request.
So a name or a text in the data that looks like a script stays text, whatever a library makes of it.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from stabletrain.tracking.metrics import replace

WEB = Path(__file__).parent / "web"
"""Scripts and styles; `web/README.md` says which are whose."""

ICON = "<link rel='icon' href='data:,'>"
"""An empty picture, so that no browser asks for one."""


def page(title: str, body: str, data: Any, *, scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The whole page.

    Args:
        title: of the window, plain text.
        body: HTML; what comes from outside in it has gone through `words`.
        data: what the scripts read, plain JSON values.
        scripts, styles: names of files of `web/`, in their order.
    """
    codes = [script(name) for name in scripts]
    allowed = " ".join(f"'sha256-{fingerprint(code)}'" for code in codes)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{words(title)}</title>",
            ICON,
            *(f"<style>{style(name)}</style>" for name in styles),
            "</head>",
            "<body>",
            body,
            f"<footer>{credits([*scripts])}</footer>",
            f'<script type="application/json" id="data">{embedded(data)}</script>',
            *(f"<script>{code}</script>" for code in codes),
            "</body>",
            "</html>",
            "",
        ]
    )


def write(text: str, file: Path) -> None:
    """Writes a page, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    replace(file, text.encode("utf-8", "replace").decode("utf-8"))  # names of files may hold what is no Unicode


def words(text: Any) -> str:
    """Text as HTML that shows it and does nothing else."""
    shown = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", str(text))
    return html.escape(shown, quote=True)


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: no `<` in it, so nothing that would end it.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON does not know.
    """
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def fingerprint(code: str) -> str:
    """SHA-256 in base64, as a policy names a script."""
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def credits(scripts: Sequence[str]) -> str:
    """Whose libraries draw the page, and under which licence."""
    libraries = json.loads(read("libraries.json"))
    used = [library for name, library in libraries.items() if f"{name}.min.js" in scripts]
    names = " and ".join(f"{library['name']} {library['release']}" for library in used)
    texts = "\n\n".join(f"{library['name']}\n\n{read(library['licence'])}" for library in used)
    return (
        f"<p>Made by stabletrain. Drawn by {words(names)}.</p>"
        f"<details><summary>Licences</summary><pre>{words(texts)}</pre></details>"
    )


@cache
def read(name: str) -> str:
    """A file of `web/`, with newlines as a browser counts them."""
    return (WEB / name).read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def style(name: str) -> str:
    """A style sheet of `web/`, without the comment that names its source map."""
    code = re.sub(r"/\*# sourceMappingURL=.*?\*/", "", read(name))
    assert not re.search(r"</style|@import", code, re.IGNORECASE), (
        f"web/{name} would end its own element, or load another"
    )
    return code


@cache
def script(name: str) -> str:
    """A script of `web/`, without the comments of a release that hold addresses: of its home, of its source map."""
    code = re.sub(r"\A\s*/\*.*?\*/", "", read(name), flags=re.DOTALL) if name.endswith(".min.js") else read(name)
    code = re.sub(r"^//# sourceMappingURL=.*$", "", code, flags=re.MULTILINE)
    assert not re.search(r"</script|<!--", code, re.IGNORECASE), f"web/{name} would end its own element"
    return code
