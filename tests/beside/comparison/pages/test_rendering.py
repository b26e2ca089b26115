"""A page runs only its own scripts, and escapes all text."""

import base64
import hashlib
import html
import json
import re

import pytest
from jinja2 import UndefinedError

from stabletrain.beside.comparison.pages import rendering
from stabletrain.beside.comparison.pages.rendering import (
    MOST_ROWS,
    escaped,
    page,
    script_json,
    template_text,
    templates,
    write,
)

SCRIPTS = ["uplot.min.js", "numbers.js", "run.js"]
HOSTILE = '</script><b onclick="x">\'&\x00\x1b'
BASE = "comparison/pages/templates/base.html"


def part(name, *arguments):
    """A part that several pages share, as HTML."""
    return getattr(templates().get_template("comparison/pages/templates/parts.html").module, name)(*arguments)


def test_text_and_data_cannot_close_their_element():
    assert escaped(HOSTILE) == "&lt;/script&gt;&lt;b onclick=&quot;x&quot;&gt;&#x27;&amp;\ufffd\ufffd"
    assert "<" not in script_json({HOSTILE: [HOSTILE]})
    assert json.loads(script_json({HOSTILE: [HOSTILE]})) == {HOSTILE: [HOSTILE]}
    assert HOSTILE not in page(BASE, data=HOSTILE, scripts=["run.js"], styles=[])
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json(float("nan"))


def test_every_text_in_a_template_is_escaped_once_and_markup_is_not():
    made = templates().from_string("{% macro bold(text) %}<b>{{ text }}</b>{% endmacro %}{{ bold(text) }}{{ 1 < 2 }}")
    assert made.render(text=HOSTILE) == f"<b>{escaped(HOSTILE)}</b>True"
    with pytest.raises(UndefinedError, match="'misspelt' is undefined"):
        templates().from_string("{{ misspelt }}").render()


def test_indentation_of_a_template_is_not_in_the_page():
    assert re.search(r"\n +<p", (rendering.PACKAGE / BASE).with_name("parts.html").read_text())
    assert not re.search(r"\n ", template_text(BASE.replace("base", "parts")))
    assert "\n<body>\n" in template_text(BASE)


def test_the_policy_allows_only_the_embedded_scripts_by_hash():
    text = page(BASE, data={"a": 1}, scripts=SCRIPTS, styles=["page.css"])
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    codes = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(codes) == len(SCRIPTS)
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes]
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [f"'sha256-{each}'" for each in hashes]
    assert rules.keys() == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}


def test_a_page_contains_its_data_and_the_licences_of_its_libraries():
    text = page(BASE, data={"a": [1, None]}, scripts=SCRIPTS, styles=["page.css"])
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert json.loads(data) == {"a": [1, None]}
    libraries = json.loads(rendering.read("libraries.json"))
    for name, library in libraries.items():
        assert (library["name"] in text.split("<footer>")[1]) == (f"{name}.min.js" in SCRIPTS)


def test_a_page_is_valid_utf_8_even_if_a_file_name_is_not(tmp_path):
    write("é \udcff", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == "é ?".encode()


def test_the_first_sentence_is_large_and_the_others_form_a_list():
    assert part("sentences", ["a < b"]) == '<p class="verdict">a &lt; b</p>'
    assert part("sentences", ["a", "b", "c"]) == '<p class="verdict">a</p><ul class="words"><li>b</li><li>c</li></ul>'


def test_facts_show_text_unchanged_and_values_as_on_the_command_line():
    found = re.findall(
        r"<dt>(.*?)</dt><dd>(.*?)</dd>", part("facts", {"lr": 0.001, "fused": True, "path": "<a b>", "no": None})
    )
    assert found == [("lr", "0.001"), ("fused", "true"), ("path", "&lt;a b&gt;"), ("no", "-")]


def incident(step, **more):
    return {"step": step, "cause": "bad_batch", "verdict": "a < b", "fix": ["lr=1", "<b>"], "link": None, **more}


def test_an_incidents_row_shows_its_step_cause_finding_and_fix():
    table = part("incidents", [("run 7", incident(1200, link="7/report.md"))])
    assert re.findall(r"<th>(.*?)</th>", table) == ["run", "step", "cause", "finding", "fix"]
    assert '<a href="7/report.md">1,200</a>' in table
    cells = [html.unescape(re.sub(r"<br>", " | ", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", table)]
    assert cells[0] == "run 7"
    assert cells[2:4] == ["bad_batch", "a < b"]
    assert [*re.findall(r"class='code'>(.*?)</span>", table)] == ["lr=1", "&lt;b&gt;"]
    alone = part("incidents", [(None, incident(3, cause=None, kind="spike", fix=[]))])
    assert re.findall(r"<th>(.*?)</th>", alone) == ["step", "cause", "finding", "fix"]
    assert '<td class="short">spike</td>' in alone
    assert "<a " not in alone


def test_incidents_beyond_the_maximum_are_counted():
    table = part("incidents", [(None, incident(step)) for step in range(MOST_ROWS + 1234)])
    assert table.count("<tr>") == MOST_ROWS + 1
    assert "1,234 more are not shown." in table
    assert "more are not shown" not in part("incidents", [(None, incident(step)) for step in range(MOST_ROWS)])
