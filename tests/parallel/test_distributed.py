"""The same run on one, two and four ranks: the same global batches, and losses that agree within fp32 rounding."""

import itertools

import pytest

from tests.parallel.launches import on_demand
from tests.parallel.worker import numbers, perform
from tests.runs import ROOT, TINY_GPT, TINY_RESNET

pytestmark = pytest.mark.timeout(600)

PLAIN = ["forensics=off", "checkpoint=off", "precision=fp32", "monitors=none", "log_every=1", "schedule=constant"]
GPT = [*TINY_GPT, *PLAIN, "batch_size=8", "steps=6", "eval_every=3", "eval_batches=5", "zloss=palm"]
GPT += ["report=false"]
RESNET = [*TINY_RESNET, *PLAIN, "model.depth=8", "steps=6", "eval_every=3", "eval_batches=3", "optimizer.lr=1e-3"]
NUMBERS = [f"hydra.searchpath=[{ROOT / 'examples' / 'conf'}]", "experiment=regression", "device=cpu", "compile=false"]
NUMBERS += [*PLAIN, "wandb=disabled", "report=false", "steps=6", "eval_every=3", "model.dropout=0.0"]
UNEVEN = ["data._target_=tests.parallel.given.Uneven", "zloss=palm", "zloss.coefficient=0.1"]

MUON = ["optimizer=muon", "optimizer.per_head=true", "optimizer.cautious_decay=true"]
SHAPE = ["norm_placement=sandwich", "model.mlp=swiglu", "model.swiglu_limit=0.01", "model.n_kv_head=1"]
LOOKS = ["monitors=default", "monitors.every=2"]

BOTH = {
    "gpt": GPT,
    "zclip": [
        *GPT,
        *("clipping=zclip", "clipping.warmup_steps=3", "clipping.z_threshold=0.5", "clipping.max_norm=0.5"),
        *("averaging=ema", *SHAPE),
    ],
    "norm": [
        *GPT,
        *("clipping.max_norm=0.1", "optimizer.decay=corrected", "softmax=sink", "attention_gate=sigmoid"),
        *(*LOOKS, "monitors.margin_every=2"),
    ],
    "uneven": [*GPT, *UNEVEN],
    "one_sided": [
        *GPT,
        *("data._target_=tests.parallel.given.OneSided", "zloss=palm", "zloss.coefficient=0.1"),
        *("clipping=value", "clipping.clip_value=1e-4"),
    ],
    "uneven_accumulated": [*GPT, *UNEVEN, "grad_accum_steps=2"],
    "sgd": [
        *GPT,
        *("optimizer=sgd", "optimizer.lr=0.1", "optimizer.no_decay=[norms]", "schedule.weight_decay=cosine"),
        *("model.dropout=0.0", "activation_checkpointing=blocks", "grad_accum_steps=2"),
    ],
    "resnet": RESNET,
    "numbers_accumulated": [*NUMBERS, "grad_accum_steps=2"],
    "kimi": [
        *GPT,
        *(*MUON, "qkclip=kimi", "qkclip.max_logit=1e-3", "activation_checkpointing=selective"),
    ],
    "own_loss": [*NUMBERS, "objective._target_=tests.parallel.given.absolute_error", "grad_accum_steps=2"],
}
"""What ddp and fsdp can both do. Each run has several options that do not touch each other, of each group one."""

ESSENTIAL = (
    *("ddp/gpt", "auto/gpt"),
    "fsdp/uneven_accumulated",
)
"""Cases of the fast tier."""

WHOLE = {
    "update_norm": [
        *GPT,
        *("clipping=update_norm", "clipping.warmup_steps=2", "clipping.z_threshold=0.01", "clipping.alpha=0.1"),
        *("optimizer.betas=[0,0.99]", "optimizer.cautious_decay=true"),
        *("loss_chunk=7", "grad_accum_steps=2", *LOOKS),
    ],
    "mu": [
        *GPT,
        *(*UNEVEN[:1], "zloss=mu", "zloss.coefficient=10", "loss_chunk=7", "grad_accum_steps=2"),
        *("clipping=agc", "clipping.clipping=1e-3", "optimizer=stable_adamw"),
    ],
    "centered": [
        *GPT,
        *("zloss=mu_centering", "clipping=adagc", "clipping.warmup_steps=2", "clipping.max_norm=0.1"),
        *("optimizer=spam", "optimizer.reset_interval=3", "optimizer.warmup_steps=2"),
    ],
    "per_module": [
        *GPT,
        *("clipping=per_module", "clipping.max_norm=0.05", "monitors=full", "monitors.every=2"),
        *("zloss=mu_centering", "optimizer=muon"),
    ],
}
"""Options that need whole tensors, or sums over their shards."""

ON_SHARDS = ("update_norm", "mu", "centered")
"""Those tried with fsdp, too; `test_shards.py` has the others."""

NARROW = {
    "bf16": [*GPT, "precision=bf16"],
    "bf16_params": [*GPT, "precision=bf16_params"],
    "bf16_chunks": [*GPT, "precision=bf16", "loss_chunk=7", "activation_checkpointing=selective", *LOOKS],
    "fp8": [*GPT, "precision=fp8"],
    "fp8_rowwise": [*GPT, "precision=fp8", "precision.recipe=rowwise", "grad_accum_steps=2"],
    "fp16": [*GPT, "precision=fp16", "precision.init_scale=1024"],
}

CALIBRATING = [*GPT, "precision=fp16", "precision.init_scale=3e5", "precision.growth_interval=2"]
"""The scale falls and rises. The gradients of a rank's part of the batch overflow at a lower scale."""

WITH_ONE = {
    *("fsdp/norm", "ddp/one_sided", "fsdp/sgd", "ddp/own_loss", "fsdp/numbers_accumulated"),
    *("fsdp/bf16", "fsdp/bf16_chunks", "fsdp/bf16_params", "fsdp/fp8", "ddp/fp8_rowwise"),
}
"""Options that are tried with ddp or with fsdp: nothing in them depends on it."""

COVERED = ("uneven",)
"""Its run is a part of that of uneven_accumulated."""


def is_tried(kind, name):
    """Whether an option is tried with a kind of parallel run."""
    both = f"{kind}/{name}" in WITH_ONE or not {f"ddp/{name}", f"fsdp/{name}"} & WITH_ONE
    return both and name not in COVERED


KINDS = {
    **{
        f"{kind}/{name}": [*chosen, f"parallel={kind}"]
        for name, chosen in (BOTH | NARROW).items()
        for kind in ("ddp", "fsdp")
        if is_tried(kind, name)
    },
    **{f"ddp/{name}": [*chosen, "parallel=ddp"] for name, chosen in WHOLE.items()},
    **{f"fsdp/{name}": [*WHOLE[name], "parallel=fsdp", "guard.recheck_every=3"] for name in ON_SHARDS},
    "fsdp/kimi": [*BOTH["kimi"], "parallel=fsdp", "guard.recheck_every=3"],
    "ddp/dropout": [*GPT, "parallel=ddp", "model.dropout=0.5"],
    **{f"{kind}/fp16_calibrating": [*CALIBRATING, f"parallel={kind}"] for kind in ("ddp", "fsdp")},
    "fsdp/kept": [*GPT, "parallel=fsdp", "parallel.reshard_after_forward=false"],
    "auto/gpt": GPT,
}
UNUSED = [*RESNET, "model._target_=tests.parallel.given.Unused", "init=torch"]
CASES = {name: {"overrides": chosen} for name, chosen in KINDS.items()}
CASES["ddp/chunks_of_some"] = {
    "overrides": [*GPT, "parallel=ddp", "parallel.find_unused_parameters=true", "loss_chunk=7"]
}
CASES["ddp/bf16_params"] = {"overrides": [*GPT, "parallel=ddp", "precision=bf16_params"]}
CASES |= {
    f"{kind}/other_data": {"overrides": [*GPT, f"parallel={kind}", "data.seed='${oc.decode:${oc.env:RANK}}'"]}
    for kind in ("ddp", "fsdp")
}
CASES |= {
    "found": {"overrides": [*UNUSED, "parallel=ddp", "parallel.find_unused_parameters=true"]},
    "sharded": {"overrides": [*UNUSED, "parallel=fsdp"]},
    "not_found": {"overrides": [*UNUSED, "parallel=ddp"]},
}
FOUR = {f"{kind}/gpt": {"overrides": [*GPT, f"parallel={kind}"]} for kind in ("ddp", "fsdp")}
FEW_ROWS = [*GPT, "precision=bf16", "model.n_embd=3", "model.n_head=1", "model.position=learned", "loss_chunk=7"]
"""Most tensors have 3 rows, so that the last of four ranks holds nothing of them."""
FOUR["fsdp/few_rows"] = {"overrides": [*FEW_ROWS, "parallel=fsdp"]}


@pytest.fixture(scope="module")
def two(shared_place):
    fast = [*ESSENTIAL, "ddp/other_data"]
    slow = [name for name in CASES if name not in fast]
    return on_demand(shared_place / "agreement_two", 2, CASES, [fast, slow])


@pytest.fixture(scope="module")
def four(shared_place):
    return on_demand(shared_place / "agreement_four", 4, FOUR, [[*FOUR]])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run in this process, by its overrides."""
    known = {}

    def seen(*overrides):
        if overrides not in known:
            known[overrides] = perform(tmp_path_factory.mktemp("one"), "run", {"overrides": [*overrides]})
            assert known[overrides]["error"] is None, known[overrides]["message"]
        return known[overrides]

    return seen


def agree(seen, alone, rel=2e-5):
    """Losses, gradient norms and the norms left by clipping, step by step, and the validation loss."""
    assert seen["error"] is None, seen["message"]
    assert numbers(seen, "loss") == pytest.approx(numbers(alone, "loss"), rel=rel)
    for field in (*alone["readings"][0]["terms"], "grad_norm", "clip_coef"):
        assert numbers(seen, field) == pytest.approx(numbers(alone, field), rel=20 * rel, abs=1e-9), field
    assert seen["val"] == pytest.approx(alone["val"], rel=rel)


@pytest.mark.slow(unless=lambda name: name in ESSENTIAL)
@pytest.mark.parametrize("name", [name for name in KINDS if name.partition("/")[2] in {*BOTH} - {"resnet"}])
def test_two_ranks_compute_what_one_does(two, one, name):
    for seen in two:
        agree(seen[name], one(*BOTH[name.partition("/")[2]]))
        assert not any(numbers(seen[name], "recheck_update")), "shards have the same bits again"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_batchnorms_statistics_are_those_of_a_micro_batch(two, one, kind):
    """So two ranks are one rank with two micro-batches, and not one with one."""
    alone = one(*RESNET, "grad_accum_steps=2")
    for seen in two:
        assert numbers(seen[f"{kind}/resnet"], "loss") == pytest.approx(numbers(alone, "loss"), rel=1e-4)
    assert numbers(two[0]["ddp/resnet"], "loss") != pytest.approx(numbers(one(*RESNET), "loss"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"ddp/{name}" for name in WHOLE), *(f"fsdp/{name}" for name in ON_SHARDS)])
def test_what_looks_at_whole_tensors_does_so_on_several_ranks(two, one, name):
    for seen in two:
        agree(seen[name], one(*WHOLE[name.partition("/")[2]]), rel=1e-4)
        assert not any(numbers(seen[name], "recheck_update")), "shards have the same bits again"


@pytest.mark.slow
def test_chunks_of_a_loss_are_refused_where_ddp_looks_for_unused_parameters(two):
    for seen in two:
        assert seen["ddp/chunks_of_some"]["error"] == "ConfigError"
        wanted = "use loss_chunk=auto or none, or parallel.find_unused_parameters=false"
        assert wanted in seen["ddp/chunks_of_some"]["message"]


@pytest.mark.slow(unless=lambda kind: kind == "ddp")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_that_read_different_data_are_refused_on_every_rank(two, kind):
    for seen in two:
        assert seen[f"{kind}/other_data"]["error"] == "ConfigError"
        message = seen[f"{kind}/other_data"]["message"]
        assert message.startswith("data: rank 1 reads other data than rank 0: inputs of batch 0 differ (sha256 ")


@pytest.mark.slow
def test_weights_that_are_replaced_for_the_update_are_refused_with_ddp(two):
    """DDP holds on to the tensors it was given: without this check it raised in the second step."""
    for seen in two:
        assert seen["ddp/bf16_params"]["error"] == "ConfigError"
        assert "precision=bf16_params trains in one process only" in seen["ddp/bf16_params"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name.partition("/")[2] in NARROW])
def test_narrow_precisions_agree_within_their_rounding(two, one, name):
    alone = one(*NARROW[name.partition("/")[2]])
    for seen in two:
        assert numbers(seen[name], "loss") == pytest.approx(numbers(alone, "loss"), rel=5e-3)
        for field in ("loss_scale", "applied", "overflow"):
            assert numbers(seen[name], field) == numbers(alone, field), field


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_four_ranks_compute_what_one_does(four, one, kind):
    for seen in four:
        agree(seen[f"{kind}/gpt"], one(*GPT))


@pytest.mark.slow
def test_ranks_that_hold_nothing_of_a_tensor_gather_it_in_bf16(four, one):
    alone = one(*FEW_ROWS)
    for seen in four:
        assert seen["fsdp/few_rows"]["error"] is None, seen["fsdp/few_rows"]["message"]
        assert numbers(seen["fsdp/few_rows"], "loss") == pytest.approx(numbers(alone, "loss"), rel=5e-3)


@pytest.mark.slow(unless=lambda name: name in ESSENTIAL)
@pytest.mark.parametrize("name", KINDS)
def test_every_rank_reads_the_same_numbers(two, name):
    """Bitwise, so that all ranks decide alike."""
    first, second = (seen[name] for seen in two)
    assert first["error"] is None, first["message"]
    for field in ("readings", "verdicts", "weights", "parts", "val"):
        assert first[field] == second[field], field


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_lower_and_raise_the_loss_scale_together(two, kind):
    """The readings are compared bitwise above."""
    scales, applied = (numbers(two[0][f"{kind}/fp16_calibrating"], field) for field in ("loss_scale", "applied"))
    assert {a < b for a, b in itertools.pairwise(scales) if a != b} == {False, True}
    assert 0 < sum(applied) < len(applied)


@pytest.mark.slow(unless=lambda name: name in ESSENTIAL)
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_read_the_batches_of_one(two, one, name):
    alone = one(*(RESNET if "resnet" in name else NUMBERS if "numbers" in name or "own_loss" in name else GPT))
    both = [[step, a + b] for (step, a), (_, b) in zip(*(seen[name]["ids"] for seen in two), strict=True)]
    if "uneven" not in name:
        assert all(ids for _, ids in both)
        assert both == alone["ids"]


@pytest.mark.slow
def test_four_ranks_read_the_batches_of_one(four, one):
    steps = zip(*(seen["ddp/gpt"]["ids"] for seen in four), strict=True)
    assert [[ranks[0][0], [id_ for _, ids in ranks for id_ in ids]] for ranks in steps] == one(*GPT)["ids"]


@pytest.mark.slow
def test_dropout_draws_differ_between_ranks_and_between_steps(two, one):
    draws = [seen["ddp/dropout"]["draws"] for seen in two]
    assert len({*draws[0], *draws[1]}) == len(draws[0]) + len(draws[1])
    assert draws[0] == one(*GPT, "model.dropout=0.5")["draws"], "rank 0 draws what one process draws"


@pytest.mark.slow
def test_gathered_weights_are_given_up_or_kept_and_no_bit_depends_on_it(two):
    kept, given_up = (two[0][name]["gathered"] for name in ("fsdp/kept", "fsdp/gpt"))
    assert min(kept) > max(given_up)
    assert two[0]["fsdp/kept"]["weights"] == two[0]["fsdp/gpt"]["weights"]


def test_several_ranks_without_a_choice_are_ddp(two):
    assert two[0]["auto/gpt"]["weights"] == two[0]["ddp/gpt"]["weights"]


def test_uneven_targets_make_a_difference(one):
    """With equal numbers of targets, the test above could not tell a mean of means from the mean over targets."""
    assert numbers(one(*BOTH["uneven"]), "loss") != pytest.approx(numbers(one(*GPT), "loss"), rel=1e-3)


@pytest.mark.slow
def test_a_model_with_a_parameter_that_a_step_leaves_out(two, one):
    """DDP would not reduce that parameter's bucket, and each rank would continue with its own gradients."""
    for seen in two:
        for name in ("found", "sharded"):
            agree(seen[name], one(*UNUSED))
        assert seen["not_found"]["error"] == "ConfigError"
        assert "parallel.find_unused_parameters=false, but 'spare.weight'" in seen["not_found"]["message"]
        assert seen["not_found"]["readings"] == [], "refused before the first update"
