"""Preflight's proof set: each planted fault is silent and real, and each clean program is clean; the checks tell them.

Tables: `python -m tests.reliability.preflight` has the programs, `... .preflight.score` what is found, of all of them.
Here each variant is planted in one loop, and the checks look at one variant of each kind and at half of the clean ones.
"""

import inspect
from collections import Counter

import pytest

from tests.reliability.preflight import evidence
from tests.reliability.preflight.clean import CLEAN, SkipsNotFinite
from tests.reliability.preflight.faults import FAULTY, GROUPS, KINDS
from tests.reliability.preflight.faults.fault import Fault, Program
from tests.reliability.preflight.loops import LOOPS
from tests.reliability.preflight.score import checked

QUICK = ("wrong_factor", "last_partial", "scaler_not_restored", "label_range", "near_range", "zero_gradient")
"""Kinds of the fast tier."""

QUICK_CLEAN = ("gpt", "FirstOverflows")
"""Clean programs of the fast tier."""

WORDS = (
    *(
        "backward",
        "micro",
        "loss",
        "clip",
        "hook",
        "scaler",
        "zero_grad",
        "gradient",
        "eps",
        "model",
        "layers",
        "scale",
    ),
    *("batch", "data", "rank", "input", "target", "label", "ignore", "position", "random", "torch", "noise"),
    *("generator", "softmax", "cross_entropy"),
)
"""What a check can point at that is no name of a state or a class."""


def test_three_variants_of_each_kind_and_thirty_clean_programs():
    kinds = Counter(fault.kind for faults in GROUPS.values() for fault in faults)
    assert set(kinds.values()) == {3}
    assert len(kinds) >= 40
    assert len({program.name for program in FAULTY}) == len(FAULTY)
    assert len({program.name for program in CLEAN}) == len(CLEAN) >= 30
    assert len(LOOPS) == 10


@pytest.mark.slow(unless=lambda kind: kind in QUICK)
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_silent_and_real(kind):
    for program in (each for each in FAULTY if each.fault.kind == kind):
        loop, losses = evidence.trained(program)
        assert evidence.sound(loop, losses), program.name
        assert evidence.real(program, loop), program.name


@pytest.mark.parametrize("kind", ["wrong_factor", "optimizer_not_restored", "ranks_same", "zero_gradient", "nan_stays"])
def test_a_fault_that_changes_nothing_is_none(kind):
    nothing = type("Nothing", (Fault,), {"kind": kind})
    program = Program("nothing", SkipsNotFinite, {}, nothing)
    assert not evidence.real(program, evidence.trained(program)[0])


@pytest.mark.slow(unless=lambda fault: fault.kind in QUICK)
@pytest.mark.parametrize("fault", [each for faults in GROUPS.values() for each in faults])
def test_a_fault_says_where_it_is(fault):
    """What it points at is part of the loop's state or names a class or a word."""
    assert fault.says
    assert inspect.getdoc(fault) != inspect.getdoc(Fault)
    names = {*WORDS, *vars(inspect.getmodule(fault))}
    for program in (each for each in FAULTY if each.fault is fault):
        with evidence.warned(program):
            loop = program.make()
        names |= {name for name, _ in loop.model.named_modules()} | evidence.state(loop).keys()
    for point in fault.points_at:
        assert any(name.startswith(point) for name in names), point


@pytest.mark.slow(unless=lambda kind: kind in QUICK)
@pytest.mark.parametrize("kind", [kind for kind, group in KINDS.items() if group == "resume"])
def test_right_after_the_load_nothing_differs_but_what_a_fault_points_at(kind):
    for program in (each for each in FAULTY if each.fault.kind == kind):
        wrong = evidence.resumed(program, evidence.trained(program)[0], 0)
        assert wrong or kind == "generator_not_restored", program.name
        assert all(name.startswith(program.fault.points_at) for name in wrong), (program.name, wrong)


@pytest.mark.slow(unless=lambda program: program.name in QUICK_CLEAN)
@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program.name)
def test_a_clean_program_trains_and_resumes_bit_for_bit(program):
    loop, losses = evidence.trained(program)
    assert evidence.sound(loop, losses)
    assert evidence.differ(evidence.state(program.make()), evidence.state(loop))
    assert evidence.resumed(program, loop, 1) == []
    assert loop.compiled or evidence.survives_all(program)  # an optimizer is not compiled


@pytest.mark.slow(unless=lambda kind: kind in ("wrong_factor", "scaler_not_restored"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_checks_find_a_planted_fault(kind):
    variants = {each.fault: each for each in reversed(FAULTY) if each.fault.kind == kind}
    program = [*variants.values()][[*KINDS].index(kind) % len(variants)]  # the first, of the next kind the second
    found = checked(program)
    assert found.found, (program.name, found.findings)


@pytest.mark.slow(unless=lambda program: program.name in QUICK_CLEAN)
@pytest.mark.parametrize(
    "program",
    [program for number, program in enumerate(CLEAN) if number % 2 == 0 or program.name in QUICK_CLEAN],
    ids=lambda program: program.name,
)
def test_the_checks_call_nothing_of_a_clean_program_a_fault(program):
    assert checked(program).faults == []
