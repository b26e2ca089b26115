"""Parts of the pages that are words and tables, and need no script: incidents, settings, throughput, facts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stabletrain.compare.pages.shell import words
from stabletrain.compare.reading.settings import shown

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
    head = ["run"] * named + ["step", "cause", "what was found", "do this"]
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
