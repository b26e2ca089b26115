"""Runs the example of the guide docs/reference/guard.md."""

import runpy

from tests.runs import ROOT


def test_the_example_withholds_and_explains_its_two_bad_steps(tmp_path, capsys):
    guard = runpy.run_path(str(ROOT / "examples" / "guard_loop.py"))["main"](str(tmp_path))
    assert [(each.path.name, each.cause) for each in guard.incidents] == [
        ("step-00000041", "poison_input"),
        ("step-00000061", "bad_batch"),
    ]
    assert capsys.readouterr().out.splitlines()[-1].endswith("skipped 2")
    page = (ROOT / "docs" / "reference" / "guard.md").read_text()
    assert guard.incidents[0].lines[0] in page
