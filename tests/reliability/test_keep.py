"""The comparison of runs that keep the rest of their bad steps, at a small size."""

import re

import pytest

from tests.reliability import keep

pytestmark = pytest.mark.beside


@pytest.mark.parametrize("case", ["GPT, a label out of range", "ResNet, a pixel of 1e6"])
@pytest.mark.slow
def test_bad_steps_are_skipped_or_applied_without_their_samples(case):
    found = {policy: [keep.trained(case, policy, 0, steps=30, bad=6)] for policy in keep.POLICIES}
    (clean,), (skipped,), (kept,) = (found[policy] for policy in keep.POLICIES)
    assert (clean.updates, skipped.updates, kept.updates) == (30, 24, 30)
    assert (clean.left_out, skipped.left_out, kept.left_out) == (0, 0, 6)
    assert abs(kept.loss - clean.loss) < abs(skipped.loss - clean.loss)
    assert re.fullmatch(rf"\| {case} \| [^|]+ \| nan \| [^|]+ \| 24 \| [^|]+ \| 30 \| 6 \|", keep.row(case, found))
