"""Makes an HTML page from its Jinja template, which extends `templates/base.html`.

A page is one self-contained file: scripts, styles and data are embedded. Its Content Security Policy allows only the
embedded scripts, by their SHA-256, and forbids every request. Text in the data that looks like a script therefore stays
text, whatever a library does with it.
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

from stabletrain.beside.comparison.pages.headline import plural
from stabletrain.beside.comparison.reading.settings import setting_text
from stabletrain.tracking.metrics import replace

WEB = Path(__file__).parent / "web"
"""Folder of the scripts and styles; see its `README.md`."""

PACKAGE = Path(__file__).parents[2]

MOST_ROWS = 200
"""Maximum number of rows in a list."""


def page(
    template: str, *, scripts: Sequence[str], styles: Sequence[str], data: Any, inputs: str = "", **more: Any
) -> str:
    """Returns the whole page.

    Args:
        template: of the page, which extends `templates/base.html`; its path in the package.
        scripts, styles: names of files in `web/`, in the order they are embedded.
        data: plain JSON values that the scripts read.
        inputs: identifies what the page was made from.
        more: what the template shows.
    """
    codes = [script(name) for name in scripts]
    allowed = " ".join(f"'sha256-{fingerprint(code)}'" for code in codes)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    libraries = [library for name, library in json.loads(read("libraries.json")).items() if f"{name}.min.js" in scripts]
    shown = templates().get_template(template)
    return shown.render(
        more,
        inputs=inputs,
        policy=policy,
        styles=map(style, styles),
        scripts=codes,
        data=script_json(data),
        libraries=" and ".join(f"{library['name']} {library['release']}" for library in libraries),
        licences="\n\n".join(f"{library['name']}\n\n{read(library['licence'])}" for library in libraries),
    )


@cache
def templates() -> Any:
    """Returns Jinja's environment. It escapes every text, and refuses names that a page does not give."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    made: Any = Environment(
        loader=FunctionLoader(template_text),
        autoescape=True,
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["MOST_ROWS"] = MOST_ROWS
    made.filters |= {"plural": plural, "fact_text": fact_text}
    return made


def template_text(name: str) -> str:
    """Reads a template of the package. Line breaks before indentation are for its reader, and not in the page."""
    return re.sub(r"\n +", "", (PACKAGE / name).read_text(encoding="utf-8"))


def fact_text(value: Any) -> str:
    """Returns a text unchanged, and another value as on the command line."""
    return value if isinstance(value, str) else setting_text(value)


def write(text: str, file: Path) -> None:
    """Writes a page atomically; raises OSError if that fails."""
    replace(file, text.encode("utf-8", "replace").decode("utf-8"))  # file names may contain invalid Unicode


def escaped(text: Any) -> Any:
    """Escapes text for HTML, and replaces control characters; markup stays as it is."""
    from markupsafe import Markup

    if isinstance(text, Markup):
        return text
    printable = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", str(text))
    return Markup(html.escape(printable, quote=True))


def script_json(data: Any) -> str:
    """Returns JSON without `<`, so that it cannot end a script element; raises ValueError on NaN and infinities."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def fingerprint(code: str) -> str:
    """Returns the SHA-256 of a script in base64, as a Content Security Policy needs it."""
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


@cache
def read(name: str) -> str:
    """Reads a file of `web/`, with normalized newlines: browsers hash a script in that form."""
    return (WEB / name).read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def style(name: str) -> str:
    """Returns a style sheet of `web/` without its source map comment."""
    code = re.sub(r"/\*# sourceMappingURL=.*?\*/", "", read(name))
    assert not re.search(r"</style|@import", code, re.IGNORECASE), (
        f"web/{name} would end its own element, or load another"
    )
    return code


@cache
def script(name: str) -> str:
    """Returns a script of `web/` without the comments that contain addresses: home page and source map."""
    code = re.sub(r"\A\s*/\*.*?\*/", "", read(name), flags=re.DOTALL) if name.endswith(".min.js") else read(name)
    code = re.sub(r"^//# sourceMappingURL=.*$", "", code, flags=re.MULTILINE)
    assert not re.search(r"</script|<!--", code, re.IGNORECASE), f"web/{name} would end its own element"
    return code
