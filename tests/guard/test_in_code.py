"""In a loop of the user's own, no fix and no message names a key of `train.py`."""

import ast
import re
from dataclasses import dataclass

import pytest

from stabletrain.guard.in_code import in_code
from stabletrain.guard.options import make_policy
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.guard.policy.rollback import LOWER_LR_FIXES
from stabletrain.records import Verdict
from tests.guard.policy.given import reading
from tests.runs import CONF, ROOT

GROUPS = "|".join(path.name for path in CONF.iterdir() if path.is_dir())
OVERRIDE = re.compile(rf"(?<!\()\b(?:{GROUPS}|resume)(?:\.\w+)?=")
"""A key or a group of `train.py`, with its value."""


def fixes():
    """Every override in the code of the diagnosis: strings that begin with one, and pairs of a group and an option."""
    found = set()
    for folder in ("diagnosis", "probes"):
        for path in (ROOT / "stabletrain" / "forensics" / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    text = "".join(part.value if isinstance(part, ast.Constant) else "7" for part in node.values)
                    found |= {text} if OVERRIDE.match(text) else set()
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OVERRIDE.match(node.value):
                    found |= {node.value}
                elif isinstance(node, ast.Tuple) and all(isinstance(each, ast.Constant) for each in node.elts):
                    pair = [each.value for each in node.elts]
                    if len(pair) == 2 and (CONF / str(pair[0]) / f"{pair[1]}.yaml").exists():
                        found |= {"=".join(pair)}
    return sorted(found)


FIXES = fixes()


def test_the_code_of_the_diagnosis_holds_overrides():
    assert {"qknorm=layernorm", "clipping=zclip", "precision=bf16", "precision.recipe=rowwise"} <= {*FIXES}


@pytest.mark.parametrize("fix", [*FIXES, "precision=tf32", "precision=fp32"])
def test_no_fix_names_a_key_of_train_py(fix):
    assert not OVERRIDE.search(in_code(fix))


def test_a_rollback_knows_a_lower_learning_rate_in_both_kinds_of_loop():
    assert in_code("optimizer.lr=0.1").startswith(LOWER_LR_FIXES)


@dataclass
class Known:
    """An incident, as far as a policy reads it."""

    cause: str = "lr_too_high"
    verdict: str = "every batch fails"
    fix: tuple[str, ...] = (in_code("optimizer.lr=0.1"),)
    mistake: tuple[str, ...] = ("lr_too_high",)


def skipped_until_the_end(policy):
    """The reasons of the guard until it halts."""
    reasons = []
    for step in range(1, 60):
        verdict = policy.judge(reading(float("nan"), applied=False, step=step))
        reasons.append(policy.reason)
        if verdict is Verdict.HALT:
            return reasons
        if verdict is Verdict.ROLLBACK:
            policy.begin_rollback(step, 0)
    raise AssertionError("it never halts")


def damaged_until_the_end(policy):
    """The reasons of the guard until it halts, if the state is damaged again and again."""
    reasons = []
    for step in (1, 2, 3, 4, 5):
        verdict = policy.on_machine_fault(step, "weights have changed", damaged=True)
        reasons.append(policy.reason)
        if verdict is Verdict.HALT:
            return reasons
    raise AssertionError("it never halts")


@pytest.mark.parametrize("until_the_end", [skipped_until_the_end, damaged_until_the_end])
@pytest.mark.parametrize(
    "policy",
    [SkipGuard(max_consecutive=4), RollbackGuard(patience=2), RollbackGuard(patience=2, max_rollbacks=0)],
    ids=["skip", "rollback", "no rollback"],
)
def test_no_halt_names_a_key_of_train_py(policy, until_the_end):
    reasons = until_the_end(make_policy(policy))
    assert not [each for each in reasons if OVERRIDE.search(each) or re.search(r"\b(optimizer|warmup)\.\w", each)]
    in_a_run = type(policy)(**{name: getattr(policy, name) for name in ("max_consecutive", "patience", "max_rollbacks")
                               if hasattr(policy, name)})  # fmt: skip
    assert OVERRIDE.search(until_the_end(in_a_run)[-1])


def test_a_rollback_for_the_learning_rate_may_be_followed_by_another():
    """Each further one goes further back, with a lower learning rate."""
    policy, verdicts = make_policy(RollbackGuard(patience=2)), []
    for step in range(1, 8):
        policy.note_mistake(Known())
        verdicts.append(policy.judge(reading(float("nan"), applied=False, step=step)))
        if verdicts[-1] is Verdict.ROLLBACK:
            policy.begin_rollback(step, 0)
    assert verdicts.count(Verdict.ROLLBACK) == 3
