"""The page of a what-if, `whatif.html`: the ranking, and the curves of all arms over each other from the fork on."""

from pathlib import Path
from typing import Any

from stabletrain.comparison.pages import charts, shell
from stabletrain.comparison.pages.shell import page, words, write
from stabletrain.whatif.report import HEAD, WhatIfResult, about_table, between, command, cut, decimals, rows, signed

SCRIPTS = ["uplot.min.js", "numbers.js", "colors.js", "chart.js", "pictures.js", "arms.js"]
STYLES = ["uplot.min.css", "page.css"]

KINDS = ("number", "short", "wide", "number", "number", "number", "number", "")
"""The style of each column of the ranking."""

LONGEST = 80
"""Longest text in a cell of the ranking."""

POINTS = 400
"""Maximum number of points of a curve."""


def write_whatif_page(found: WhatIfResult) -> Path:
    """Writes the page into the folder of the what-if, and returns its path; raises OSError if that fails."""
    file = found.folder / "whatif.html"
    write(whatif_page(found), file)
    return file


def whatif_page(found: WhatIfResult) -> str:
    """Returns the HTML of the page."""
    places = [*found.ranking.places, *found.first_round_only]
    curves = [
        {
            **charts.chart_data(each.outcome.run, POINTS),
            "name": each.outcome.arm.name,
            "broke": each.outcome.step if each.outcome.broke else None,
        }
        for each in places
        if each.outcome.run is not None
    ]
    data: dict[str, Any] = {"panels": charts.panels(curves), "arms": curves}
    typed, title = command(found), f"{found.base.run.absolute().name} · what if"
    body = "".join(
        [
            f"<h1>{words(f'stabletrain · {title}')}</h1>",
            shell.sentences(
                [
                    found.ranking.verdict,
                    f"The trouble: steps {found.trouble.first:,} to {found.trouble.last:,}, {found.trouble.text}.",
                    f"All arms start from the state after step {found.step:,} of {found.base.run}.",
                ]
            ),
            f'<p>Continue the run with it:</p><p class="code">{words(typed)}</p>' if typed else "",
            shell.section("Ranking", ranking(found)),
            shell.section("Curves from the start on", shell.pictures()) if curves else "",
            shell.section("With each seed", by_seed(found)) if found.seeds else "",
            shell.section("What the arms change", changes(found)),
            shell.section("Arms that do not apply", refusals(found)),
        ]
    )
    return page(f"{title} · stabletrain", body, data, scripts=SCRIPTS, styles=STYLES)


def ranking(found: WhatIfResult) -> str:
    """Returns the table of the ranking."""
    head = "".join(f"<th>{words(name)}</th>" for name in HEAD)
    lines = [f"<tr>{head}</tr>"]
    for each, cells in zip((*found.ranking.places, *found.first_round_only), rows(found), strict=True):
        marked = "".join(cell(kind, text) for kind, text in zip(KINDS, cells, strict=True))
        lines.append(f"{row(each.broke)}{marked}</tr>")
    note = "".join(f'<p class="soft">{words(line)}</p>' for line in about_table(found))
    return f'<div class="box" tabindex="0"><table class="plain">{"".join(lines)}</table></div>{note}'


def row(broke: str) -> str:
    """Returns the beginning of a row; that of an arm that broke is grey, as its curve is."""
    return '<tr class="soft">' if broke else "<tr>"


def cell(kind: str, text: str) -> str:
    """Returns a cell of the ranking; of a long text the beginning, and the whole text as its tooltip."""
    short = cut(text, LONGEST)
    tooltip = f' title="{words(text)}"' if short != text else ""
    return f'<td class="{kind}"{tooltip}>{words(short)}</td>'


def by_seed(found: WhatIfResult) -> str:
    """Returns a table of the arms with each seed."""
    head = "".join(f"<th>{name}</th>" for name in ("arm", "seed", "how it ended", "loss", "95 % interval", "val loss"))
    lines = [f"<tr>{head}</tr>"]
    kinds = ("short", "number", "wide", "number", "number", "number")
    for each in found.ranking.places:
        for repeat in each.repeats:
            outcome = repeat.outcome
            trouble = "; ".join(
                filter(None, (outcome.came_back and f"came back: {outcome.came_back}", repeat.behind_best))
            )
            broke = f"broke at step {outcome.step:,}: {outcome.reason}" if outcome.broke else ""
            cells = (
                outcome.arm.name,
                str(repeat.seed),
                broke or trouble or f"held to step {outcome.step:,}",
                signed(repeat.difference.mean),
                between(repeat.difference),
                decimals(outcome.val_loss),
            )
            marked = "".join(cell(kind, text) for kind, text in zip(kinds, cells, strict=True))
            lines.append(f"{row(outcome.broke)}{marked}</tr>")
    return f'<div class="box" tabindex="0"><table class="plain">{"".join(lines)}</table></div>'


def changes(found: WhatIfResult) -> str:
    """Returns a table of what each arm changes."""
    lines = ["<tr><th>arm</th><th>overrides</th><th>what happens</th><th>named by</th></tr>"]
    for each in (*found.ranking.places, *found.first_round_only):
        arm = each.outcome.arm
        overrides = f'<span class="code">{words(" ".join(arm.overrides))}</span>'
        cells = (
            ("short", words(arm.name)),
            ("wide", overrides),
            ("wide", words(arm.about)),
            ("short", words(arm.named)),
        )
        lines.append(f"<tr>{''.join(f'<td class={kind!r}>{text}</td>' for kind, text in cells)}</tr>")
    return f'<div class="box" tabindex="0"><table class="plain">{"".join(lines)}</table></div>'


def refusals(found: WhatIfResult) -> str:
    """Returns a list of the arms that do not apply, with the reasons; empty if all apply."""
    items = "".join(f"<li>{words(arm.name)}: {words(arm.refused)}</li>" for arm in found.refused)
    return f'<ul class="words">{items}</ul>' if items else ""
