"""Preflight's held-out programs: each planted fault is silent and real, and each clean program is clean."""

import pytest

from tests.reliability.preflight.faults import KINDS
from tests.reliability.preflight.held_out import CLEAN, FAULTY, evidence
from tests.reliability.preflight.held_out.loops import QLearning
from tests.reliability.preflight.held_out.program import Fault, Program

QUICK = ("missing_term", "not_zeroed", "optimizer_not_restored", "ranks_same", "zero_weights")
"""Kinds of the fast tier."""

QUICK_CLEAN = ("Recommender", "MasterWeights", "AcrossCalls", "FullBatchLBFGS")
"""Clean programs of the fast tier."""

WORDS = (
    *("backward", "micro", "clip", "skip", "no step", "weights", "running", "scaler", "scheduler", "zero_grad"),
    *("gradient", "model", "others", "batch", "data", "rows", "rank", "input", "features", "target", "label", "ignore"),
    *("position", "random", "generator", "numpy", "augment", "centers", "criterion", "class_center"),
    *("loss", "step", "inner", "hidden", "states", "PerLetter", "Lookup", "Standardized", "Hypergradient", "softmax"),
    *("FusedCrossEntropy", "Recompute", "EmbeddingScale", "UnitLength", "LARS", "Orthogonal", "Projected"),
)
"""What a check can point at that is no name of a state."""


def test_each_kind_of_the_proof_set_and_twenty_clean_programs():
    assert {program.fault.kind for program in FAULTY if "second/" not in program.name} == set(KINDS)
    assert len({program.name for program in FAULTY}) == len(FAULTY) >= 70
    assert len({program.name for program in CLEAN}) == len(CLEAN) >= 52


@pytest.mark.slow(unless=lambda program: program.fault.kind in QUICK)
@pytest.mark.parametrize("program", FAULTY, ids=lambda program: program.name)
def test_a_planted_fault_is_silent_and_real(program):
    with evidence.warned(program):
        assert evidence.sound(evidence.trained(program, evidence.steps_of(program)))
        assert evidence.real(program)
        names = {*WORDS, *evidence.names(program)}
    assert program.fault.says
    for point in program.fault.points_at:
        assert any(name.startswith(point) for name in names), point


@pytest.mark.parametrize("kind", ["wrong_factor", "optimizer_not_restored", "ranks_same", "zero_gradient"])
def test_a_fault_that_changes_nothing_is_none(kind):
    nothing = type("Nothing", (QLearning,), {})
    assert not evidence.real(Program("nothing", nothing, Fault(kind, "", ())))


@pytest.mark.slow(unless=lambda program: program.name in QUICK_CLEAN)
@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program.name)
def test_a_clean_program_trains_and_resumes_bit_for_bit(program):
    made = evidence.trained(program)
    assert evidence.sound(made)
    assert evidence.differ(evidence.state(program.make()), evidence.state(made))
    assert evidence.resumed(program, 0) == []
    assert evidence.resumed(program, 1) == []
    for kind in ("zero_gradient", "huge_gradient", "zero_weights"):
        assert evidence.survives(program, kind), kind
