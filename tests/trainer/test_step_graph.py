"""`compile=graph`: steps launched as graphs have the bits of ordinary steps, on a stand-in for CUDA's graphs."""

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.records import range_of
from stabletrain.trainer import step_graph
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from stabletrain.trainer.step_graph import WARM_UP, CudaGraph, GraphedSteps
from tests.devices import CARD
from tests.reliability.ends import difference
from tests.runs import TINY_GPT, TINY_RESNET, composed
from tests.tools.eager_graph import EagerGraph
from tests.tools.fake_card import as_if_on_a_card

STEPS = 14
SHARED = ["compile=false", "report=false", f"steps={STEPS}", "log_every=1", "checkpoint.every=7", "eval_every=5"]
SHARED += ["monitors.every=6", "guard.snapshot_every=4", "warmup.steps=3"]


ROLLBACK = ["guard.patience=2", "guard.healthy_after=2", "guard.skip_batches=1"]


ON_A_CARD = ["device=cuda", "compile=false", "report=false", f"steps={STEPS}", "checkpoint=off", "eval_batches=1"]


class Graph(EagerGraph):
    """Counts its launches."""


class Counted(CudaGraph):
    """Counts its launches."""

    def __init__(self, state):
        del state

    def launch(self):
        type(self).launches += 1
        super().launch()


class Crash(Exception):
    """Stands for a killed process."""


def trained(folder, *overrides, graphed, crash_at=None, spoiled=(), graph=Graph):
    """Trains, with graphs or without, on far too bright images in some steps; returns run and number of launches."""
    graph.launches = 0
    with composed(*SHARED, *overrides) as cfg:
        run = build(cfg, folder)
        if graphed:
            run.compute = GraphedSteps(lambda: graph(run.state))
        get, to_device = run.data.batches.get, run.data.to_device

        def spoiling(batch):
            batch = to_device(batch)
            return replace(batch, inputs=1e25 * batch.inputs) if run.state.executed_steps in spoiled else batch

        def crashing(step):
            if step == crash_at:
                raise Crash
            return get(step)

        run.data.batches.get, run.data.to_device = crashing, spoiling
        try:
            train(run)
        except Crash:
            assert crash_at is not None
    return run, graph.launches


CASES = {
    "gpt": [*TINY_GPT, "model.dropout=0.1", "precision=bf16", "grad_accum_steps=2"],
    "gpt, chunks": [*TINY_GPT, "loss_chunk=8", "zloss=palm", "guard.checksum_every=1", "optimizer=muon"],
    "gpt, centred": [*TINY_GPT, "zloss=mu_centering", "norm_placement=sandwich"],
    "gpt, skipped": [*TINY_GPT, "faults=label", "faults.at=[8]"],
    "gpt, growing samples": [*TINY_GPT, "data.length_warmup=6", "data.length_start=2"],
    "resnet": [*TINY_RESNET, "model.depth=8", "optimizer=sgd", "guard.recheck_every=4"],
    "resnet, rolled back": [*TINY_RESNET, "model.depth=8", *ROLLBACK],
    "resnet, skipped": [*TINY_RESNET, "model.depth=8", "faults=input", "faults.at=[9]"],
}


@pytest.mark.beside(when=lambda case: "skipped" in case)
@pytest.mark.slow(unless=lambda case: case in ("gpt", "resnet, skipped"))
@pytest.mark.parametrize("case", CASES)
def test_graphs_change_no_bit(tmp_path, case):
    spoiled = (8, 9, 10) if "rolled" in case else ()
    ordinary, none = trained(tmp_path / "ordinary", *CASES[case], graphed=False, spoiled=spoiled)
    run, launches = trained(tmp_path / "graphed", *CASES[case], graphed=True, spoiled=spoiled)
    assert none == 0
    assert launches >= STEPS // 3, "steps were launched as graphs"
    assert difference(tmp_path / "ordinary", tmp_path / "graphed") == ""
    assert skipped(run) == skipped(ordinary)
    assert bool(skipped(run)) == ("skipped" in case or "rolled" in case)
    assert (run.state.executed_steps > STEPS) == ("rolled" in case)


def skipped(run):
    """Returns the numbers of skipped steps by kind."""
    return {kind: count for kind, count in run.tools.guard.skips.items() if count}


def test_a_resumed_run_of_graphs_is_the_run_without(tmp_path):
    chosen = [*TINY_GPT, "model.dropout=0.1", "precision=fp32"]
    trained(tmp_path / "ordinary", *chosen, graphed=False)
    trained(tmp_path / "graphed", *chosen, graphed=True, crash_at=9)
    _, launches = trained(tmp_path / "graphed", *chosen, "resume=auto", graphed=True)
    assert launches == STEPS - 7 - WARM_UP
    assert difference(tmp_path / "ordinary", tmp_path / "graphed") == ""


def test_a_step_is_captured_anew_if_a_parameter_has_moved(tmp_path):
    with composed(*TINY_GPT, *SHARED) as cfg:
        run = build(cfg, tmp_path)
    made = []
    steps = GraphedSteps(lambda: made.append(0) or EagerGraph(run.state))
    batches = run.data.load(0).split(1)
    for number in range(WARM_UP + 4):
        if number == WARM_UP + 2:
            moved = next(run.state.model.parameters())
            moved.data = moved.data.clone()
        steps(run.state, batches, run.tools)
        assert len(made) == (0 if number < WARM_UP else 1 if number < WARM_UP + 2 else 2)
    run.data.batches.close()


def test_a_graph_captured_with_a_batch_known_to_be_good_finds_a_bad_one(tmp_path):
    with composed(*TINY_GPT, *SHARED) as cfg:
        run = build(cfg, tmp_path)
    steps, (batch,) = GraphedSteps(lambda: EagerGraph(run.state)), run.data.load(0).split(1)
    ranges = {
        "input_range": range_of(batch.inputs, batch.inputs),
        "target_range": range_of(batch.targets, batch.targets),
    }
    good = replace(batch, counted=batch.targets.numel(), **ranges)
    bad = replace(batch, targets=batch.targets.masked_fill(batch.targets == batch.targets.max(), 10**6))
    for number in range(WARM_UP + 2):
        found = steps(run.state, [good if number <= WARM_UP else bad], run.tools)
        assert bool(found.checks.bad_data) == (number > WARM_UP)
    run.data.batches.close()


def test_a_step_of_graphs_reads_nothing_on_the_host_and_uses_no_host_tensor(tmp_path):
    with as_if_on_a_card() as recorder, composed(*TINY_GPT, *ON_A_CARD) as cfg:
        run = build(cfg, tmp_path)
        run.compute = GraphedSteps(lambda: Graph(run.state))
        Graph.launches = 0
        recorder.restart()
        train(run)
    assert Graph.launches > STEPS // 2
    assert recorder.foreign == []


def test_what_cannot_be_captured_is_refused_by_name(tmp_path):
    with composed(*TINY_GPT, *SHARED, "precision=fp16") as cfg:
        run = build(cfg, tmp_path)
    run.data.batches.close()
    card = torch.device("cuda")
    with pytest.raises(ConfigError, match="compile=graph does not capture the scales of precision=fp16"):
        step_graph.chosen("graph", card, run.tools, run.parallel)
    with pytest.raises(ConfigError, match="compile=graph needs a card, and this run's device is cpu"):
        step_graph.chosen("graph", torch.device("cpu"), run.tools, run.parallel)
    assert type(step_graph.chosen("auto", card, run.tools, run.parallel)) is step_graph.LaunchedSteps


def test_a_capture_refuses_host_reads_and_random_numbers_of_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: contextlib.nullcontext())
    assert CudaGraph().capture(lambda: 1) == 1
    for draw in (lambda: torch.rand(1), lambda: np.random.rand(1), random.random):
        with pytest.raises(ConfigError, match="draws random numbers on the host"):
            CudaGraph().capture(draw)

    def reads():
        raise RuntimeError("operation not permitted when\nstream is capturing")

    with pytest.raises(ConfigError, match=r"cannot be captured \(operation not permitted when stream is capturing\)"):
        CudaGraph().capture(reads)


@pytest.mark.slow
@pytest.mark.parametrize("device", [CARD])
@pytest.mark.parametrize("tiny", [[*TINY_GPT, "model.dropout=0.1"], TINY_RESNET], ids=["gpt", "resnet"])
def test_cudas_graphs_change_no_bit(tmp_path, device, tiny):
    chosen = [*tiny, f"device={device}", "determinism=strict", "precision=bf16"]
    trained(tmp_path / "ordinary", *chosen, graphed=False)
    _, launches = trained(tmp_path / "graphed", *chosen, graphed=True, graph=Counted)
    assert launches > STEPS // 2
    assert difference(tmp_path / "ordinary", tmp_path / "graphed") == ""
