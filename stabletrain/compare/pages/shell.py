"""The frame of a page of HTML, and the parts that all pages share.

A page of HTML that needs nothing but itself: scripts, styles and numbers are in one file, and it may load nothing.

A policy in its head lets only the scripts run that were put in here, by their SHA-256, and forbids every request.
So a name or a text in the data that looks like a script stays text, whatever a library makes of it.

Parts of the pages that are words and tables, and need no script: incidents, settings, throughput, facts.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from stabletrain.compare.reading.settings import shown
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


MOST = 200
"""Lines of a list at most."""

HELP = (
    "Drag across a picture to look closer, double-click to come back. With the keyboard: arrows, + and −, 0. "
    "All pictures show the same steps."
)


def section(title: str, body: str, name: str = "") -> str:
    """A heading and what is under it; nothing where there is nothing."""
    return f"<section{f' id={name!r}' if name else ''}><h2>{words(title)}</h2>{body}</section>" if body else ""


def sentences(found: Sequence[str]) -> str:
    """The first one large, the others as a list."""
    first, *rest = found or [""]
    items = "".join(f"<li>{words(sentence)}</li>" for sentence in rest)
    return f'<p class="verdict">{words(first)}</p>' + (f'<ul class="words">{items}</ul>' if items else "")


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """The numbers that are read first, large, each with its name."""
    items = "".join(f"<div><dt>{words(name)}</dt><dd>{words(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="figures">{items}</dl>' if items else ""


def facts(pairs: Mapping[str, Any]) -> str:
    """Names and values in columns."""
    items = "".join(
        f"<div><dt>{words(name)}</dt><dd>{words(value if isinstance(value, str) else shown(value))}</dd></div>"
        for name, value in pairs.items()
    )
    return f'<dl class="settings">{items}</dl>' if items else ""


def folded(title: str, body: str) -> str:
    """A part that opens when it is asked for."""
    return f"<details><summary>{words(title)}</summary>{body}</details>" if body else ""


def incidents(found: Sequence[tuple[str | None, Mapping[str, Any]]]) -> str:
    """A table of incidents: where, why, what to do.

    Args:
        found: each with the name of its run, or None where the page is of one run.
    """
    if not found:
        return ""
    named = any(name is not None for name, _ in found)
    head = ["run"] * named + ["step", "cause", "what was found", "fix"]
    lines = ["<tr>" + "".join(f"<th>{each}</th>" for each in head) + "</tr>"]
    for name, one in found[:MOST]:
        step = f"{one['step']:,}"
        place = f'<a href="{words(one["link"])}">{step}</a>' if one.get("link") else step
        cause = words(one.get("cause") or one.get("kind") or "not looked into")
        fixes = "<br>".join(f"<span class='code'>{words(fix)}</span>" for fix in one.get("fix") or [])
        cells = [f"<td>{words(name)}</td>"] * named + [
            f'<td class="number">{place}</td>',
            f'<td class="short">{cause}</td>',
        ]
        cells += [f'<td class="wide">{words(one.get("verdict") or "")}</td>', f'<td class="wide">{fixes}</td>']
        lines.append(f"<tr>{''.join(cells)}</tr>")
    more = f'<p class="soft">{len(found) - MOST:,} more are not shown.</p>' if len(found) > MOST else ""
    return f'<div class="box" tabindex="0"><table class="plain">{"".join(lines)}</table></div>{more}'


def throughputs(groups: Sequence[Mapping[str, Any]]) -> str:
    """A table of cards and precisions, each with a bar."""
    if not groups:
        return ""
    units = {str(group["unit"]) for group in groups}
    longest = {unit: max(group["median"] for group in groups if group["unit"] == unit) for unit in units}
    names = ("card", "precision", "a second, median", "lowest to highest", "runs", "")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    lines = []
    for group in groups:
        share = 100 * group["median"] / longest[group["unit"]]
        lines.append(
            f'<tr><td>{words(group["card"])}</td><td class="short">{words(group["precision"])}</td>'
            f'<td class="number">{group["median"]:,.0f} {words(group["unit"])}</td>'
            f'<td class="number">{group["lowest"]:,.0f} to {group["highest"]:,.0f}</td>'
            f'<td class="number">{group["runs"]:,}</td>'
            f'<td class="wide"><span class="share"><i style="width:{share:.1f}%"></i></span></td></tr>'
        )
    return f'<div class="box" tabindex="0"><table class="plain">{head}{"".join(lines)}</table></div>'


def pictures(more: str = "") -> str:
    """Where the scripts draw, and what chooses how."""
    smooth = '<label>smooth <input type="range" id="smooth" min="0" max="0.98" step="0.02" value="0"></label>'
    return (
        f'<p class="soft">{HELP}</p><div class="bar">{more}{smooth}</div>'
        '<ul class="legend" id="legend"></ul><div class="pictures" id="pictures"></div>'
        "<noscript><p>The pictures need JavaScript; nothing is loaded from anywhere.</p></noscript>"
    )
