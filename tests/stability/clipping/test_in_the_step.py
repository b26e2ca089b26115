"""Every kind in a real step: after unscaling, with accumulation, compiled, skipped, and resumed from disk."""

import copy

import pytest
import torch

from stabletrain.checkpoint.capture import capture, restore
from stabletrain.stability.optimizers import StableAdamW
from stabletrain.step import train_step
from tests.laws.test_resume import newest, trained
from tests.reliability.ends import metrics
from tests.runs import TINY_GPT, TINY_RESNET
from tests.stability.clipping.given import TIGHT, equal_trees
from tests.test_step import PRECISIONS, batch, bits, fresh, same
from tests.workloads import build_tools

WITH_MEMORY = ["zclip", "adagc", "update_norm"]


def tools(precision="fp32", *, clipping):
    return build_tools(PRECISIONS[precision](), clipping=clipping)


def fresh_for(name):
    """Returns a new state, with an optimizer that shows its update if this kind needs it."""
    state = fresh()
    if name == "update_norm":  # without momentum, whose first updates are longer than all later ones
        state.optimizer = StableAdamW(1e-2, [0.0, 0.99], 1e-8, 0.1)(state.model)
    return state


def length(state):
    return torch.cat([p.grad.flatten() for p in state.model.parameters()]).norm().item()


def eval_mode(state):
    state.model.eval()  # BatchNorm and dropout see the batch, not the sample
    return state


@pytest.mark.parametrize("name", TIGHT)
@pytest.mark.parametrize("steps", [1, 4])
def test_the_clipped_norm_is_the_same_in_every_precision(name, steps):
    """Clipping before unscaling would cut fp16's gradients 1024 times too short."""
    lengths, shares = {}, {}
    for precision in PRECISIONS:
        state, acting = eval_mode(fresh()), tools(precision, clipping=TIGHT[name]())
        for number in range(steps):
            reading = train_step(state, [batch(number)], acting)
        lengths[precision], shares[precision] = length(state), reading.clip_active
        assert lengths[precision] == pytest.approx(reading.clip_coef * reading.grad_norm, rel=1e-3)
    assert name in ("none", "update_norm") or shares["fp32"] > 0
    assert lengths["bf16"] == pytest.approx(lengths["fp32"], rel=0.03)
    assert lengths["fp16"] == pytest.approx(lengths["fp32"], rel=0.01)


@pytest.mark.parametrize("name", TIGHT)
def test_accumulation_clips_the_gradient_of_the_whole_batch(name):
    whole, parts = eval_mode(fresh_for(name)), eval_mode(fresh_for(name))
    one = train_step(whole, [batch(1)], tools(clipping=TIGHT[name]()))
    four = train_step(parts, batch(1).split(4), tools(clipping=TIGHT[name]()))
    assert four.clip_coef == pytest.approx(one.clip_coef, rel=1e-4)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.slow(unless=lambda name: name in ("norm", "per_module", "adagc"))
@pytest.mark.parametrize("name", TIGHT)
def test_a_compiled_model_is_clipped_alike(name):
    plain, compiled = eval_mode(fresh_for(name)), eval_mode(fresh_for(name))
    compiled.model.compile(backend="aot_eager")
    kinds = TIGHT[name](), TIGHT[name]()
    for number in range(4):
        readings = [
            train_step(state, [batch(number)], tools(clipping=kind))
            for state, kind in zip((plain, compiled), kinds, strict=True)
        ]
    assert readings[1].clip_coef == pytest.approx(readings[0].clip_coef, rel=1e-4)
    assert kinds[1].state_dict().get("names") == kinds[0].state_dict().get("names"), "the plain names"


def paired(*places):
    """Whether a case is one of a half in which each two parameters still meet in every combination."""
    return sum(places) % 2 == 0


@pytest.mark.slow(
    unless=lambda name, precision, bad: paired(
        [*TIGHT].index(name), [*PRECISIONS].index(precision), bad == float("inf")
    )
)
@pytest.mark.parametrize("name", TIGHT)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_step_changes_nothing(name, precision, bad):
    """Neither the statistics nor the clipping of later steps change."""
    skipping, plain = fresh_for(name), fresh_for(name)
    for state, numbers in ((skipping, range(6)), (plain, (0, 2, 3, 5))):
        acting = tools(precision, clipping=TIGHT[name]())
        for number in numbers:
            state.step, given = number, batch(number)
            if number in (1, 4):
                given.inputs[3, 0, 1, 1] = bad
            train_step(state, [given], acting)
        if state is skipping:
            left = acting.clipping.state_dict()
    assert equal_trees(acting.clipping.state_dict(), left)
    assert same(bits(skipping), bits(plain))


@pytest.mark.parametrize("name", TIGHT)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_restored_state_continues_bitwise(name, precision):
    state, acting = fresh_for(name), tools(precision, clipping=TIGHT[name]())
    for number in range(3):
        train_step(state, [batch(number)], acting)
    parts = {"clipping": acting.clipping, "precision": acting.precision}
    tree = copy.deepcopy(capture(state, parts))
    again, acting_again = fresh_for(name), tools(precision, clipping=TIGHT[name]())
    restore(tree, again, {"clipping": acting_again.clipping, "precision": acting_again.precision})
    for number in range(3, 6):
        readings = [train_step(each, [batch(number)], tool) for each, tool in ((state, acting), (again, acting_again))]
        assert readings[0] == readings[1]
    assert same(bits(state), bits(again))
    assert equal_trees(acting.clipping.state_dict(), acting_again.clipping.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize("tiny", [TINY_GPT, TINY_RESNET], ids=["gpt", "resnet"])
def test_a_run_resumed_from_disk_ends_as_if_it_had_never_stopped(tmp_path, name, tiny):
    bound = "clipping.z_threshold=0.1" if name == "update_norm" else "clipping.max_norm=0.5"
    chosen = [*tiny, f"clipping={name}", "clipping.warmup_steps=4", bound, "steps=8", "optimizer=adamw"]
    chosen += ["eval_every=8", "checkpoint.every=5", "log_every=1", "precision=fp32"]
    trained(tmp_path / "whole", *chosen)
    trained(tmp_path / "cut", *chosen, crash_at=7)
    trained(tmp_path / "cut", *chosen, "resume=auto")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    one, other = newest(tmp_path / "cut"), newest(tmp_path / "whole")
    assert equal_trees(one, other) if isinstance(one, dict) else one == other


@pytest.mark.slow(unless=lambda name, tiny: paired([*TIGHT].index(name), tiny is TINY_GPT))
@pytest.mark.parametrize("name", TIGHT)
@pytest.mark.parametrize("tiny", [TINY_GPT, TINY_RESNET], ids=["gpt", "resnet"])
def test_every_option_composes_and_trains(tmp_path, name, tiny):
    chosen = [*tiny, f"clipping={name}", "steps=2", "checkpoint=off", "log_every=1", "monitors=none", "report=false"]
    chosen += ["model.depth=8"] if tiny is TINY_RESNET else []
    chosen += ["optimizer=adamw"] if name == "update_norm" else []
    job = trained(tmp_path / "run", *chosen)
    assert type(job.tools.clipping) is type(TIGHT[name]())
    assert [line["step"] for line in metrics(tmp_path / "run")][-1] == 2
