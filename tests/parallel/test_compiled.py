"""`compile=true` on two ranks computes what plain Python does."""

import pytest

from tests.parallel.launches import performed
from tests.parallel.test_distributed import GPT
from tests.parallel.worker import numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("ddp", "fsdp")
CASES = {
    f"{kind}/{how}": {
        "overrides": [*GPT, "model.n_layer=1", f"parallel={kind}", f"compile={how == 'compiled'}".lower()]
    }
    for kind in KINDS
    for how in ("plain", "compiled")
}


@pytest.fixture(scope="module")
def two(shared_place):
    return performed(shared_place / "compiled_two", 2, CASES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_run_computes_what_a_plain_one_does(two, kind):
    for seen in two:
        compiled, plain = seen[f"{kind}/compiled"], seen[f"{kind}/plain"]
        assert compiled["error"] is None, compiled["message"]
        for field in ("loss", "grad_norm"):
            assert numbers(compiled, field) == pytest.approx(numbers(plain, field), rel=1e-4), field
        assert compiled["weights"] == two[0][f"{kind}/compiled"]["weights"]
        assert compiled["val"] == pytest.approx(plain["val"], rel=1e-4)
