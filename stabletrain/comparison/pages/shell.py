"""The frame of an HTML page, and the parts that all pages share.

A page is one self-contained file: scripts, styles and data are embedded. Its Content Security Policy allows only the
embedded scripts, by their SHA-256, and forbids every request. Text in the data that looks like a script therefore stays
text, whatever a library does with it.
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

from stabletrain.comparison.reading.settings import shown
from stabletrain.tracking.metrics import replace

WEB = Path(__file__).parent / "web"
"""Folder of the scripts and styles; see its `README.md`."""

ICON = "<link rel='icon' href='data:,'>"
"""An empty icon, so that no browser requests one."""


def mark(inputs: str) -> str:
    """Returns the element that says what a page was made from."""
    return f'<meta name="stabletrain-inputs" content="{inputs}">'


def page(title: str, body: str, data: Any, *, scripts: Sequence[str], styles: Sequence[str], inputs: str = "") -> str:
    """Returns the whole page.

    Args:
        title: title of the window, plain text.
        body: HTML; the caller has escaped all outside text with `words`.
        data: plain JSON values that the scripts read.
        scripts, styles: names of files in `web/`, in the order they are embedded.
        inputs: identifies what the page was made from.
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
            mark(inputs),
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
    """Writes a page atomically; raises OSError if that fails."""
    replace(file, text.encode("utf-8", "replace").decode("utf-8"))  # file names may contain invalid Unicode


def words(text: Any) -> str:
    """Escapes text for HTML, and replaces control characters."""
    shown = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", str(text))
    return html.escape(shown, quote=True)


def embedded(data: Any) -> str:
    """Returns JSON without `<`, so that it cannot end a script element; raises ValueError on NaN and infinities."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def fingerprint(code: str) -> str:
    """Returns the SHA-256 of a script in base64, as a Content Security Policy needs it."""
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def credits(scripts: Sequence[str]) -> str:
    """Returns the footer: the libraries that the page uses, and their licences."""
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


MOST = 200
"""Maximum number of rows in a list."""

HELP = (
    "Drag across a chart to zoom in; double-click to zoom out. Keyboard: arrow keys move the cursor, + and − zoom, "
    "0 shows all steps. All charts show the same range of steps."
)


def section(title: str, body: str, name: str = "") -> str:
    """Returns a section with a heading; empty if the body is empty."""
    return f"<section{f' id={name!r}' if name else ''}><h2>{words(title)}</h2>{body}</section>" if body else ""


def sentences(found: Sequence[str]) -> str:
    """Returns the first sentence in large type, and the others as a list."""
    first, *rest = found or [""]
    items = "".join(f"<li>{words(sentence)}</li>" for sentence in rest)
    return f'<p class="verdict">{words(first)}</p>' + (f'<ul class="words">{items}</ul>' if items else "")


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns the key numbers of a page in large type, each with its name."""
    items = "".join(f"<div><dt>{words(name)}</dt><dd>{words(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="figures">{items}</dl>' if items else ""


def facts(pairs: Mapping[str, Any]) -> str:
    """Returns names and values in columns."""
    items = "".join(
        f"<div><dt>{words(name)}</dt><dd>{words(value if isinstance(value, str) else shown(value))}</dd></div>"
        for name, value in pairs.items()
    )
    return f'<dl class="settings">{items}</dl>' if items else ""


def folded(title: str, body: str) -> str:
    """Returns a part that is collapsed at first; empty if the body is empty."""
    return f"<details><summary>{words(title)}</summary>{body}</details>" if body else ""


def incidents(found: Sequence[tuple[str | None, Mapping[str, Any]]]) -> str:
    """Returns a table of incidents, each given with the name of its run, or None on the page of a single run."""
    if not found:
        return ""
    named = any(name is not None for name, _ in found)
    head = ["run"] * named + ["step", "cause", "finding", "fix"]
    lines = ["<tr>" + "".join(f"<th>{each}</th>" for each in head) + "</tr>"]
    for name, one in found[:MOST]:
        step = f"{one['step']:,}"
        place = f'<a href="{words(one["link"])}">{step}</a>' if one.get("link") else step
        cause = words(one.get("cause") or one.get("kind") or "not investigated")
        fixes = "<br>".join(f"<span class='code'>{words(fix)}</span>" for fix in one.get("fix") or [])
        cells = [f"<td>{words(name)}</td>"] * named + [
            f'<td class="number">{place}</td>',
            f'<td class="short">{cause}</td>',
        ]
        cells += [f'<td class="wide">{words(one.get("verdict") or "")}</td>', f'<td class="wide">{fixes}</td>']
        lines.append(f"<tr>{''.join(cells)}</tr>")
    more = f'<p class="soft">{len(found) - MOST:,} more are not shown.</p>' if len(found) > MOST else ""
    return f'<div class="box" tabindex="0"><table class="plain">{"".join(lines)}</table></div>{more}'


def forecasts(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of a run's forecasts."""
    if not found:
        return ""
    lines = ["<tr><th>step</th><th>signal</th><th>forecast</th></tr>"]
    for one in found[:MOST]:
        signal, text = words(one.get("signal") or ""), words(one.get("text") or "")
        cells = f'<td class="number">{one["step"]:,}</td><td class="short">{signal}</td><td class="wide">{text}</td>'
        lines.append(f"<tr>{cells}</tr>")
    more = f'<p class="soft">{len(found) - MOST:,} more are not shown.</p>' if len(found) > MOST else ""
    return f'<div class="box" tabindex="0"><table class="plain">{"".join(lines)}</table></div>{more}'


def whatifs(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of what a run tried after its halts."""
    if not found:
        return ""
    heads = ("halted at step", "because", "arms tried", "steps spent", "went on with", "from step")
    lines = ["<tr>" + "".join(f"<th>{each}</th>" for each in heads) + "</tr>"]
    for one in found[:MOST]:
        step, arms = f"{one['step']:,}", len(one["arms"])
        place = f'<a href="{words(one["link"])}">{step}</a>' if one.get("link") else step
        won = f'<span class="code">{words(one["arm"])}</span>' if one["arm"] else f"none: {words(one.get('why') or '')}"
        tried = f"<details><summary>{arms}</summary>{words(', '.join(one['arms']))}</details>" if arms else "0"
        cells = [
            f'<td class="number">{place}</td>',
            f'<td class="wide">{words(one.get("reason") or "")}</td>',
            f'<td class="short">{tried}</td>',
            f'<td class="number">{one["steps"]:,}</td>',
            f'<td class="short">{won}</td>',
            f'<td class="number">{one["to"]:,}</td>' if one["arm"] else "<td></td>",
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    more = f'<p class="soft">{len(found) - MOST:,} more are not shown.</p>' if len(found) > MOST else ""
    return f'<div class="box" tabindex="0"><table class="plain">{"".join(lines)}</table></div>{more}'


def throughputs(groups: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of throughput by card and precision, each with a bar."""
    if not groups:
        return ""
    units = {str(group["unit"]) for group in groups}
    longest = {unit: max(group["median"] for group in groups if group["unit"] == unit) for unit in units}
    names = ("card", "precision", "median per second", "lowest to highest", "runs", "")
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
    """Returns the elements that the scripts draw charts in, and their controls."""
    smooth = '<label>smooth <input type="range" id="smooth" min="0" max="0.98" step="0.02" value="0"></label>'
    return (
        f'<p class="soft">{HELP}</p><div class="bar">{more}{smooth}</div>'
        '<ul class="legend" id="legend"></ul><div class="pictures" id="pictures"></div>'
        "<noscript><p>The charts need JavaScript. The page loads nothing from the network.</p></noscript>"
    )
