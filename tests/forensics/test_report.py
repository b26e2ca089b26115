"""report.md gives the fix before the evidence, and each number in its section."""

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt  # rich brings it

from stabletrain.forensics.diagnosis.cause_table import CAUSES, Diagnosis
from stabletrain.forensics.facts import Outcome
from stabletrain.forensics.investigate import Findings
from stabletrain.forensics.probes.underflow import LostGradient, Underflow
from stabletrain.forensics.report import (
    BAR_WIDTH,
    bars,
    command_to_try_fix,
    full_sentence,
    is_override,
    replay_table,
    report,
    update_result,
)
from stabletrain.forensics.trace.origin import Link
from stabletrain.forensics.trace.values import Values
from stabletrain.records import RankPart
from tests.forensics.diagnosis.given import FINE, NAN, READING, SPIKE, origin

FIX = ["add eps to what is divided by", "precision.growth_interval=200", "zloss=palm"]


def page(
    evidence=SPIKE, cause="bad_batch", fix=(), samples=(), lines=(), failures=(), also=(), folder="/runs/incidents/x"
):
    """Returns the page of an incident in the folder."""
    diagnosis = Diagnosis(cause, 0.875, "it is this batch", [*fix], [*lines])
    record = {"step": 50, "cause": cause, "confidence": 0.875, "verdict": "it is this batch", "fix": [*fix]}
    record |= {"samples": [*samples], "evidence": [*lines], "also": [*also]}
    return report(record, Findings(evidence, diagnosis, 1.5, [*failures]), Path(folder))


def headings(text):
    return re.findall(r"^#+ (.*)$", text, re.MULTILINE)


def test_a_page_has_no_empty_sections():
    text = page(replace(SPIKE, outcomes={}))
    assert headings(text) == ["Step 50: the batch is unlike the others", "Replay it yourself"]
    assert "**It is this batch.**" in text
    assert "`bad_batch`, 88% sure. The step measured loss 9 and gradient norm 80." in text
    assert text.endswith("    stabletrain replay /runs/incidents/x\n")


def test_a_folder_with_a_space_is_quoted_in_the_commands():
    text = page(fix=["zloss=palm"], folder="/my runs/it's $x")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("    stabletrain")]
    assert commands == [["stabletrain", "replay", "/my runs/it's $x", *more] for more in (["zloss=palm"], [])]


def test_the_fix_comes_before_the_evidence():
    found = origin()
    found = replace(found, chain=(Link("head", "forward", "float32", 1.0),))
    lost = Underflow(1024.0, 0.5, 0.25, 0.5, (LostGradient("head.weight", 8, 0.75, 0.25, 0.6),))
    evidence = replace(SPIKE, origin=found, underflow=lost)
    text = page(evidence, "unsafe_op", FIX, [{"index": 3, "loss": math.nan}], ["a line"], ["largest input: no time"])
    assert headings(text) == [
        "Step 50: an operation has no finite result for its inputs",
        "Fix",
        "Where it began",
        "Gradients lost to underflow",
        "Magnitudes leading up to it",
        "Samples",
        "Replays of the step",
        "More evidence",
        "What could not be checked",
        "Replay it yourself",
    ]
    for line in (
        "1. add eps to what is divided by",
        "2. `precision.growth_interval=200`",
        "3. `zloss=palm`",
        "    stabletrain replay /runs/incidents/x 'zloss=palm'",
        "| `head.weight` | 8 | 75.0% | 25.0% |",
        "| the whole model | | 50.0% | 25.0% |",
        '- {"index": 3, "loss": "NaN"}',
        "- a line",
        "- largest input: no time",
    ):
        assert f"\n{line}\n" in text


def test_contributing_causes_come_after_the_fix_each_with_its_own():
    other = {
        "cause": "unsafe_op",
        "confidence": 0.9,
        "verdict": "exp overflows",
        "fix": ["model.py:7: clamp", "zloss=palm"],
    }
    text = page(
        fix=FIX, also=[other, {**other, "cause": "lr_too_high", "fix": []}], evidence=replace(SPIKE, outcomes={})
    )
    assert headings(text)[1:] == ["Fix", "What contributed", "Replay it yourself"]
    assert (
        "- `unsafe_op`, 90% sure: exp overflows.\n   1. model.py:7: clamp\n   2. `zloss=palm`\n- `lr_too_high`" in text
    )


def test_the_origin_is_shown_with_its_inputs_and_outputs():
    found = replace(
        origin(module=""),
        inputs=(Values((2, 3), "float32", 1.5), Values((2,), "int64", None)),
        outputs=(Values((2, 3), "float32", math.inf),),
    )
    text = page(replace(SPIKE, origin=found))
    assert "`aten.div` in the model, forward, float32, at `model.py:7`:\n\n> words\n" in text
    assert "| in | float32 | [2, 3] | 1.5 | finite |\n| in | int64 | [2] |  | finite |" in text
    assert "| out | float32 | [2, 3] | inf | **not finite** |" in text
    assert "at `an unknown line`" in page(replace(SPIKE, origin=replace(found, source="")))


def test_each_replay_is_a_row_with_its_result():
    outcomes = {
        "same": replace(NAN, bitwise_equal_to_reading=False),
        "fp32": Outcome(True, 4.25, 1.0),
        "fresh_batch": Outcome(not_run="the time limit was reached"),
    }
    assert replay_table(replace(SPIKE, outcomes=outcomes))[2:] == [
        "| unchanged | **no** | nan | nan | not bitwise equal to the step |",
        "| in fp32 | yes | 4.25 | 1 |  |",
        "| another batch, same weights | | | | not run: the time limit was reached |",
    ]
    applied = replace(SPIKE, reading=READING._replace(applied=True))
    assert "with the weights after the update, so not comparable bitwise" in replay_table(applied)[2]
    assert "| bitwise equal to the step |" in replay_table(SPIKE)[2]


def test_on_several_ranks_the_replays_stand_below_the_numbers_of_the_ranks_own_part():
    evidence = replace(SPIKE, part=RankPart(1, 17.5, 1.25), outcomes={"same": FINE})
    assert replay_table(evidence)[2:] == [
        "| the step, rank 1's part | yes | 17.5 | 1.25 | |",
        "| unchanged | yes | 4 | 1 |  |",
    ]
    assert "The step measured loss 9 and gradient norm 80 over all ranks." in page(evidence)
    other = replace(evidence, outcomes={"same": replace(FINE, bitwise_equal_to_reading=False)})
    assert replay_table(other)[3] == "| unchanged | yes | 4 | 1 | differs from the step |"
    unknown = replace(evidence, part=RankPart(1, math.nan))
    assert replay_table(unknown)[2] == "| the step, rank 1's part | **no** | nan | unknown | |"


def test_the_page_says_whether_the_update_was_applied():
    assert "the weights are unchanged, and nothing is lost" in update_result(SPIKE)
    assert "its update was applied" in update_result(replace(SPIKE, reading=READING._replace(applied=True)))


def test_the_bars_have_a_logarithmic_scale():
    links = [Link(f"blocks.{i}", "forward", "float16", size) for i, size in enumerate((1.0, 10.0, 100.0))]
    links += [Link("head", "backward", "float16", 0.0), Link("objective", "forward", "float16", math.inf)]
    lines = bars(links)
    widths = [line.count("#") for line in lines]
    assert widths[:3] == [round(BAR_WIDTH / 4), round(BAR_WIDTH / 2), round(3 * BAR_WIDTH / 4)]
    assert lines[3].split() == ["head", "backward", "0"]
    assert lines[4].endswith("inf  " + "!" * BAR_WIDTH)
    assert len({line.index("backward" if "backward" in line else "forward") for line in lines}) == 1


def test_the_longest_bar_fills_the_width_if_all_values_are_finite():
    assert bars([Link("a", "forward", "float32", 3.0)])[0].endswith("  " + "#" * BAR_WIDTH)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("it is so", "It is so."),
        ("aten.div in part", "aten.div in part."),
        ("loss_scale fell", "loss_scale fell."),
        ("Enough.", "Enough."),
    ],
)
def test_a_verdict_is_capitalised_unless_it_starts_with_an_identifier(words, said):
    assert full_sentence(words) == said


def test_an_override_is_distinguished_from_a_fix_by_hand():
    assert is_override("optimizer.lr=0.001")
    assert not is_override("add eps=1e-6 inside the root")
    assert not is_override("clean sample 41")


def test_only_a_fix_that_one_replay_can_show_is_proposed_for_a_trial():
    assert command_to_try_fix(["clean sample 41", "optimizer.lr=0.1", "precision.growth_interval=200"], "x") == []
    assert command_to_try_fix(["optimizer.lr=0.1", "precision=bf16", "zloss=palm"], "x")[-1] == (
        "    stabletrain replay x 'precision=bf16'"
    )


@pytest.mark.parametrize("cause", CAUSES)
def test_the_heading_holds_the_title_of_the_cause(cause):
    assert headings(page(cause=cause))[0] == f"Step 50: {CAUSES[cause].title}"


NAMES = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "&lt;b&gt;",
    "[b](https://x.y)",
    "![b](https://x.y)",
    "[b]",
    "\\[b\\](https://x.y)",
    "[b]: https://x.y",
    "<https://x.y>",
    "`[b](https://x.y)",
    "``<b>```<b>`<b>",
    "a`<b>",
    "a\n# heading\n\n<b>",
    "a\r# heading",
    "~~~\n<b>",
    "a | b | <b>",
    "\x1b[2J\u202e",
    "```\n<b>",
]
"""Names of files, modules and parameters that are no plain words."""

TAGS = set("h1 h2 p strong code ol ul li pre blockquote table thead tbody tr th td".split())  # noqa: SIM905
"""What the page itself is made of."""


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_name_holds_the_page_has_no_html_no_link_and_no_heading_of_it(name):
    link = Link(name, "forward", "float32", 1.0)
    found = replace(origin(), module=name, op=name, source=name, called_from=name, reason=name, chain=(link,))
    lost = Underflow(1024.0, 0.5, 0.25, 0.5, (LostGradient(name, 8, 0.75, 0.25, 0.6),))
    outcomes = {**SPIKE.outcomes, "fp32": Outcome(not_run=name)}
    evidence = replace(SPIKE, origin=found, underflow=lost, outcomes=outcomes)
    given = [name, f"{name}=1", f"correct {name}"]
    also = [{"cause": "bad_batch", "confidence": 0.5, "verdict": name, "fix": given}]
    diagnosis = Diagnosis("bad_batch", 0.875, name, given, given)
    record = {"step": 50, "cause": "bad_batch", "confidence": 0.875, "verdict": name, "fix": given, "also": also}
    record |= {"samples": [{"source": name}], "evidence": given, "not_replayable": name}
    plain = {**record, "verdict": "x", "fix": ["x", "x=1", "x"], "evidence": ["x"] * 3, "not_replayable": "x"}
    text = report(record, Findings(evidence, diagnosis, 1.5, given), Path("/runs") / name.replace("/", "_"))
    known = report(plain, Findings(evidence, diagnosis, 1.5, given), Path("/runs"))
    tags = set(re.findall(r"<(\w+)", MarkdownIt("commonmark").enable("table").render(text)))
    assert tags <= TAGS
    assert headings(text) == headings(known)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)
