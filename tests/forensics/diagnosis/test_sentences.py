"""The text that describes the evidence of an incident."""

import math
from dataclasses import replace

from stabletrain.forensics.diagnosis.wording import (
    chain_lines,
    origin_details,
    origin_lines,
    origin_sentence,
    replay_difference,
    sample_name,
    source_line,
)
from stabletrain.forensics.facts import Culprits
from stabletrain.forensics.trace.origin import Link
from stabletrain.records import RankPart
from tests.forensics.diagnosis.given import FINE, SPIKE, origin


def test_the_text_names_the_origin_its_fp64_value_and_the_culprit_samples():
    found = replace(SPIKE, origin=origin(in_fp32=7e4), culprits=Culprits([2, 5], True, 4))
    assert origin_sentence(found) == "aten.div in part (forward, float32): words"
    assert source_line(found) == "model.py:7"
    known = [
        "in fp64, the largest value of aten.div is 70000",
        "samples of the batch that make the step fail: [2, 5]",
    ]
    assert origin_details(found) == known
    assert origin_lines(found) == ["aten.div in part (forward, float32): words, at model.py:7", *known]
    every = replace(found, culprits=Culprits([2, 5], True, 4, others_too=True))
    assert origin_details(every) == known[:1], "if another batch fails too, no sample is to blame"


def test_without_an_origin_the_text_gives_loss_and_gradient_norm():
    assert origin_sentence(SPIKE) == "loss 9, gradient norm 80"
    assert (source_line(SPIKE), origin_details(SPIKE), origin_lines(SPIKE), chain_lines(SPIKE)) == (
        "the code",
        [],
        [],
        [],
    )
    assert source_line(replace(SPIKE, origin=replace(origin(), source=""))) == "part"
    assert source_line(replace(SPIKE, origin=replace(origin(), source="", module=""))) == "the model"


def test_chain_lines_has_one_line_for_each_part_of_the_model():
    chain = (Link("blocks.0", "forward", "float16", 900.0), Link("head", "backward", "float32", math.inf))
    lines = chain_lines(replace(SPIKE, origin=replace(origin(), chain=chain)))
    assert lines == ["blocks.0 (forward, float16): up to 900", "head (backward, float32): up to inf"]


def test_a_sample_is_named_by_its_source_else_its_id_else_its_index():
    sample = {"index": 3, "id": 41, "source": "a.txt:7"}
    assert sample_name(sample, SPIKE) == "a.txt:7"
    assert sample_name({"index": 3, "id": 41}, SPIKE) == "sample 41"
    assert sample_name({"index": 3}, SPIKE) == "sample 3 of the batch"
    assert sample_name({"index": None}, SPIKE) == "the batch"
    of_rank = replace(SPIKE, part=RankPart(1, 9.0))
    assert sample_name({"index": 3}, of_rank) == "sample 3 of rank 1's part of the batch"
    assert (
        "samples of rank 1's part of the batch" in origin_details(replace(of_rank, culprits=Culprits([3], True, 4)))[0]
    )


def test_a_replay_is_compared_with_the_step_or_with_the_part_of_its_rank():
    assert replay_difference(SPIKE, FINE) == (
        "a replay of the step gives loss 4 and gradient norm 1; the step itself gave loss 9 and gradient norm 80"
    )
    replayed = "a replay of rank 1's part of the step gives loss 4 and gradient norm 1; in the step, it gave loss 14"
    part = RankPart(1, 14.0, 160.0)
    assert replay_difference(replace(SPIKE, part=part), FINE) == f"{replayed} and gradient norm 160"
    assert replay_difference(replace(SPIKE, part=part._replace(grad_norm=None)), FINE) == replayed


def test_if_every_part_was_normal_the_sum_over_the_ranks_is_reported():
    normal = replace(SPIKE, part=RankPart(1, 4.0, 1.0), parts_normal=True)
    text, end = (
        "the step gave loss 9 and gradient norm 80, but every rank's own",
        "was normal in the step and in a replay",
    )
    assert replay_difference(normal, FINE) == f"{text} loss and gradient norm {end}"
    sharded = replace(normal, part=RankPart(1, 4.0, None, 2.0))
    assert replay_difference(sharded, FINE) == f"{text} loss {end}"
    bad = replace(normal, part=RankPart(1, 4.0, None, math.nan))
    assert replay_difference(bad, FINE) == (
        f"{text} loss {end}. Rank 1's shard of the summed gradient was not finite: the fault lies with this rank, with "
        "another one, or with the network between them"
    )
