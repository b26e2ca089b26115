"""The benchmarks run, write the promised results, and show slowdowns; no test checks an absolute speed."""

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stabletrain import models
from stabletrain.data.imagefolder import ImageFolder
from stabletrain.data.text import Text
from stabletrain.data.tokens import Tokens
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.machine.signals import StopRequest
from stabletrain.stability.optimizers.closed import why_unproven
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.loop import training_loop
from tests import forkserver
from tests.clocks import ToldClock
from tests.runs import ROOT

pytestmark = pytest.mark.slow

SHARED = ["--device", "cpu", "--precision", "fp32", "--rounds", "2", "--json", "results.json"]
CASES = {
    "overhead": (
        ["overhead.py", "--tiny", "--only", "GPT"],
        ["bare", "bare again", "off", "defaults", "monitors=full", "finite hooks", "anomaly mode"],
    ),
    "throughput": (["throughput.py", "--sizes", "gpt_tiny"], ["stabletrain", "plain fp32"]),
    "images_per_second": (
        ["images_per_second.py", "--files", "12", "--batch", "2", "--count", "2", "--workers", "1"],
        [
            *("stabletrain", "stabletrain, CPU time", "complete", "complete, CPU time"),
            *("torchvision", "torchvision, CPU time", "over torchvision"),
        ],
    ),
    "graphs": (["graphs.py", "--turn", "1"], ["false", "false"]),
    "head": (["head.py", "--tiny"], ["unpadded", "padded", "padded, compiled"]),
    "limit": (["limit.py", "--batch", "1"], ["products", "attention"]),
    "reading": (
        ["reading.py", "--runs", "40", "--lines", "20"],
        ["wall time", "user + sys", "peak memory", "peak memory of a helper"],
    ),
}


@pytest.fixture
def benchmark(monkeypatch):
    """Returns a function that imports a module of `benchmarks/`, with its own folder on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def tiny(benchmark, tmp_path):
    """Returns a function that builds a tiny GPT's run from overrides, each in its own folder."""
    jobs, opened = benchmark("jobs"), []

    def make(*overrides):
        opened.append(jobs.built(tmp_path / str(len(opened)), (*TINY(jobs), *overrides)))
        return opened[-1]

    yield make
    for job in opened:
        job.data.batches.close()


def TINY(jobs):
    return (*next(iter(jobs.SIZES["tiny"].values())), "device=cpu", "precision=fp32")


@pytest.mark.parametrize("case", CASES)
def test_a_benchmark_runs_and_writes_what_it_promises(case, tmp_path):
    (file, *options), expected = CASES[case]
    done = subprocess.run(
        [forkserver.python(), str(ROOT / "benchmarks" / file), *options, *SHARED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [each["what"] for each in results] == expected
    rows = [line for line in done.stdout.split("\n\n")[0].splitlines() if line.startswith("| ")]
    assert len(rows) >= 1 + len(expected), done.stdout
    assert all(any(f" {what}" in line for line in rows) for what in expected), done.stdout
    assert all(len(each.get("values") or each.get("seconds") or each["runs"]) == 2 for each in results)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    card = pytest.importorskip("docs.results").CARD  # the page on a card is written from these results
    if case in card:
        assert all(len(card[case].cells(each)) == len(card[case].names) for each in results)


@pytest.mark.parametrize(("model", "smaller"), [("gpt_nano", ()), ("ResNet-20", ("model.depth=14",))])
def test_a_step_launches_few_kernels_beyond_a_bare_loop(benchmark, model, smaller):
    operations, targets = benchmark("operations"), benchmark("targets")
    more = {}
    for kind, chosen in operations.KINDS.items():
        if kind == "guard=skip":  # launches less than a rollback's guard, and more than none
            continue
        ours, bare = operations.both((*operations.MODELS[model], *smaller, *chosen), "bf16")
        assert ours.dispatched - ours.launched >= bare.dispatched - bare.launched > 50, "views launch nothing"
        more[kind] = ours.launched - bare.launched
    assert min(more.values()) > 0
    assert max(more.values()) <= targets.TARGETS["operations/more"].bound


def test_own_time_is_what_lies_outside_of_the_model_and_the_optimizer(benchmark, tmp_path, monkeypatch):
    own_time, jobs, measuring = (benchmark(name) for name in ("own_time", "jobs", "measuring"))
    monkeypatch.setitem(benchmark("overhead").OURS, "defaults", ("monitors=default",))  # W&B starts slowly
    clock = ToldClock()
    monkeypatch.setattr(own_time.time, "perf_counter", clock.now)
    monkeypatch.setattr(RollbackGuard, "judge", clock.slow(RollbackGuard.judge, 0.5))
    with measuring.silence():
        found = own_time.measured(tmp_path, TINY(jobs), 4, "wall", bf16=False)
    ours, bare = found["rest"]["defaults"], found["rest"]["bare"]
    assert len(ours) == len(bare) == 4
    assert all(0.5 < seconds < 0.6 for seconds in ours), "in every round a step is judged"
    assert all(0 < seconds < 0.1 for seconds in bare)
    assert all(whole > rest for whole, rest in zip(found["seconds"]["bare"], bare, strict=True))


def test_a_step_that_is_computed_twice_is_counted_as_such(benchmark, tmp_path, monkeypatch):
    recheck, jobs, measuring = (benchmark(name) for name in ("recheck", "jobs", "measuring"))
    clock = ToldClock()
    monkeypatch.setattr(models.GPT, "forward", clock.slow(models.GPT.forward, 0.5))
    with measuring.silence():
        taken = recheck.measured(tmp_path, TINY(jobs), 3, clock)
    assert taken.keys() == {"plain", "twice"}
    assert all(0.5 < seconds < 0.6 for seconds in taken["plain"])
    assert all(1 < seconds < 1.1 for seconds in taken["twice"])
    assert len(taken["plain"]) == len(taken["twice"]) == 3


def test_a_guarded_loop_of_ones_own_takes_the_plain_loops_steps_and_a_slow_guard_shows(
    benchmark, tmp_path, monkeypatch
):
    own_loop, jobs, measuring = (benchmark(name) for name in ("own_loop", "jobs", "measuring"))
    clock = ToldClock()
    monkeypatch.setattr(own_loop.time, "perf_counter", clock.now)
    monkeypatch.setattr(SkipGuard, "judge", clock.slow(SkipGuard.judge, 0.5))
    with measuring.silence():
        found = own_loop.measured(tmp_path, TINY(jobs), 3, "wall", bf16=False)
    assert found["rest"].keys() == {"bare", "bare again", *own_loop.KINDS}
    assert all(0.5 < seconds < 0.6 for kind in own_loop.KINDS for seconds in found["rest"][kind])
    assert all(0 < seconds < 0.1 for seconds in found["rest"]["bare"])
    losses = {name: [p.sum().item() for p in loop.model.parameters()] for name, loop in found["loops"].items()}
    assert losses["bare"] == losses["guard"] == losses["rollback"]


def test_host_time_is_measured_beside_a_bare_loop(benchmark, capsys):
    operations = benchmark("operations")
    found, values = operations.host_time(2, ToldClock(), loading=True)
    assert {each["what"] for each in found} == {"bare", "bare again", *operations.KINDS}
    assert values.keys() == {name for name in benchmark("targets").TARGETS if name.startswith("operations/host")}
    assert capsys.readouterr().out.count("| bare |") == 2


def test_a_slow_guard_shows_in_the_overhead(benchmark, tmp_path, monkeypatch, capsys):
    overhead, jobs, measuring = (benchmark(name) for name in ("overhead", "jobs", "measuring"))
    monkeypatch.setitem(overhead.OURS, "defaults", ("monitors=default",))  # W&B starts slowly
    monkeypatch.setitem(overhead.OURS, "monitors=full", ())
    clock = ToldClock()
    monkeypatch.setattr(RollbackGuard, "judge", clock.slow(RollbackGuard.judge, 2e-3))
    with measuring.silence():
        found = overhead.measured(tmp_path, TINY(jobs), 4, 1, clock)
    ratio = {each["what"]: each["whole"][0] for each in overhead.show("tiny", "fp32", found)}
    assert ratio["off"] == pytest.approx(1)
    assert ratio["defaults"] == pytest.approx(3)  # a bare step takes a millisecond
    assert f"{ratio['defaults']:.3f}" in capsys.readouterr().out


def test_the_bare_loop_computes_what_the_run_does(benchmark, tiny):
    overhead, jobs = benchmark("overhead"), benchmark("jobs")
    run = jobs.Rounds(tiny("guard=off", "optimizer.lr=1e-3", "warmup=linear", "warmup.steps=50"))
    bare = overhead.bare_of(run, "adamw", bf16=False)
    before = {name: value.clone() for name, value in bare.model.state_dict().items()}
    for _ in range(5):
        run()
        bare()
    ours = run.job.state.model.state_dict()
    for name, value in bare.model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)
    assert any(not torch.equal(before[name], value) for name, value in ours.items())


def test_rounds_do_what_the_loop_does(benchmark, tiny):
    jobs = benchmark("jobs")
    often = ("monitors=default", "monitors.every=3", "guard.snapshot_every=4", "log_every=2")
    looped, taken = tiny(*often), jobs.Rounds(tiny(*often))
    get = looped.data.batches.get

    def get_nine(step):
        if step == 9:
            raise EOFError
        return get(step)

    looped.data.batches.get = get_nine
    with pytest.raises(EOFError):
        training_loop(looped, StopRequest())
    for _ in range(9):
        taken()
    assert taken.done == {"looks": 4, "snapshots": 2}
    lines = [[*map(lasting, read_jsonl(job.output.folder.path / "metrics.jsonl"))] for job in (looped, taken.job)]
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[0]] == [1, 2, 3, 4, 6, 8, 9]
    assert taken.job.tools.guard.state_dict() == looped.tools.guard.state_dict()
    for name, value in looped.state.model.state_dict().items():
        assert torch.equal(taken.job.state.model.state_dict()[name], value), name


def lasting(line):
    """Returns the fields of a log line that do not depend on the machine."""
    return {name: value for name, value in line.items() if name not in ("time", "tokens_per_s", "memory/peak_gb")}


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer", "guard", "tracking"])
def test_what_takes_long_shows_in_its_part(benchmark, tiny, part, monkeypatch):
    parts, clock = benchmark("parts"), ToldClock()
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=clock.now))
    run = parts.Parted(tiny("monitors=none", "log_every=1"))
    run()
    job = run.job

    def slowly(call=lambda *_: None):
        return clock.slow(call, 0.1)  # a millisecond passes from mark to mark

    if part == "data":
        job.data.batches.get = slowly(job.data.batches.get)
    elif part == "forward":
        job.state.model.register_forward_pre_hook(slowly())
    elif part == "backward":
        next(job.state.model.parameters()).register_hook(slowly())
    elif part == "optimizer":
        job.state.optimizer.register_step_pre_hook(slowly())
    elif part == "guard":
        monkeypatch.setattr(type(job.tools.clipping), "__call__", slowly(type(job.tools.clipping).__call__))
    else:
        job.output.tracker.log = slowly(job.output.tracker.log)
    shares = run.shares(3)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[part] > 0.8, shares


def test_timing_an_update_does_not_make_the_guard_check_it(benchmark, tiny):
    optimizer, called = tiny("monitors=none").state.optimizer, []
    benchmark("measuring").time_updates(optimizer, lambda: called.append("before"), lambda: called.append("after"))
    assert why_unproven(optimizer) == ""
    optimizer.step()
    assert called == ["before", "after"]


def test_the_recipe_trains(benchmark):
    recipe, made = benchmark("recipe"), benchmark("made_data")
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    before, held = model[1].weight.clone(), made.pictures(40, 8, 10, "train")
    cpu = torch.device("cpu")
    loop = recipe.Recipe(model, held.pixels, held.labels.tolist(), size=8, batch_size=4, device=cpu, workers=0)
    assert loop.seconds(2) > 0
    assert not torch.equal(before, model[1].weight)


def test_turns_come_first_and_last_equally_often(benchmark):
    came = []
    kinds = {name: lambda number, name=name: came.append((number, name)) or number for name in "abc"}
    found = benchmark("measuring").in_turns(kinds, rounds=6, warm_up=2)
    assert found == {name: [0, 1, 2, 3, 4, 5] for name in "abc"}
    orders = ["".join(name for number, name in came if number == each) for each in range(-2, 6)]
    assert orders[::2] == [order[::-1] for order in orders[1::2]]
    assert len(set(orders)) > 2


def test_the_whole_includes_rare_events_and_the_median_does_not(benchmark):
    measuring = benchmark("measuring")
    reference, taken = [1.0] * 10, [1.1] * 9 + [3.1]
    ratio, low, high = measuring.whole(taken, reference)
    assert ratio == pytest.approx(1.3)
    assert low < ratio < high
    assert measuring.quartiles(measuring.ratios(taken, reference))[0] == pytest.approx(1.1)


def test_the_cost_of_a_rare_event_is_measured_in_rounds_where_it_happened_alone(benchmark):
    overhead = benchmark("overhead")
    taken = [1.0, 1.5, 1.0, 4.0]
    assert overhead.beyond_a_step(taken, [0, 1, 0, 1], [0, 0, 0, 1]) == [0.5]
    assert overhead.beyond_a_step(taken, [0, 0, 0, 1], [0, 1, 0, 1]) == [3.0]
    assert overhead.beyond_a_step(taken, [1, 1, 1, 1], [0, 0, 0, 0]) == []


def test_targets_are_met_not_met_or_not_measurable_and_why(benchmark):
    targets = benchmark("targets")
    values = {"overhead/gpt": 1.009, "overhead/resnet": 1.02, "throughput/data": 0.002}
    table = targets.judged(values, torch.device("cpu")).splitlines()
    verdict = {line.split(" | ")[1]: line.split(" | ")[4][:-2] for line in table[2:]}
    what = {name: verdict[target.what] for name, target in targets.TARGETS.items()}
    assert what["overhead/gpt"] == "met"
    assert what["overhead/resnet"] == "not met"
    assert what["throughput/gpt2_mfu"] == "not measurable here: no H100 or H200 here"
    assert what["start/help"] == "not measured in this run"
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {name.split('/')[0]}" for name in targets.TARGETS]


CASES_OF_TESTS = """
import pytest
@pytest.mark.parametrize("n", [1, 2, 3])
def test_numbers_are_small(n):
    if n == 3:
        pytest.skip("three has no card")
    assert n < 2
def test_nothing_waits():
    pass
"""


def test_a_report_of_tests_becomes_a_row_for_each_property(benchmark, tmp_path):
    shown = benchmark("shown")
    (tmp_path / "test_numbers.py").write_text(CASES_OF_TESTS)
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=tests.xml"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    table = shown.table([tmp_path / "tests.xml", tmp_path / "compiled.xml"]).splitlines()
    assert [line.split(" | ")[:3] for line in table[2:]] == [
        ["| test_numbers", "numbers are small", "FAILED 1: 2, passed 1, skipped 1: three has no card"],
        ["| test_numbers", "nothing waits", "passed 1"],
        ["| compiled", "", "no report: pytest did not end"],
    ]


def test_a_missing_trainer_is_named_with_its_extra(benchmark, monkeypatch):
    others = benchmark("others")
    monkeypatch.setattr(others.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        others.ConfigError, match=r"lightning, transformers, accelerate: pip install -e \"\.\[bench\]\""
    ):
        others.check_installed()


GPT = ("model=gpt_nano", "model.n_layer=2", "model.n_embd=16", "model.n_head=2", "data.block_size=16", "batch_size=4")


def test_figures_of_the_knobs_follow_their_pattern(benchmark):
    knobs = benchmark("knobs")
    added, gradients, embedding = knobs.growth("zero_residual", 2, 0)
    assert (added, embedding > 0) == (0.0, True)
    assert gradients == pytest.approx(1.0, abs=0.2)
    assert knobs.growth("normal", 2, 0)[0] > knobs.growth("gpt2", 2, 0)[0] > 0.5
    took, seconds, active = knobs.clipped((*GPT, "clipping=norm", "clipping.max_norm=1e-3"), 3)
    assert active == [1.0] * 3
    assert all(0 < part < whole for part, whole in zip(took, seconds, strict=True))


def test_a_gpt2_step_at_32_x_1024_tokens_takes_a_third_of_the_memory(tmp_path):
    """Counted on fake tensors, so that the test needs no such memory."""
    found = tmp_path / "memory.json"
    chosen = ["benchmarks/memory.py", "--device", "cpu", "--zloss", "palm", "--json", str(found)]
    done = subprocess.run(
        [forkserver.python(), *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    whole, chunks = json.loads(found.read_text())["results"]
    assert (whole["tokens"], chunks["tokens"]) == (0, 1280)
    logits = 4 * 32 * 1024 * 50257
    assert whole["bytes"] > 4 * logits, "fp32 logits, their softmax, and gradients of both"
    assert whole["bytes"] >= 3 * chunks["bytes"]
    assert chunks["casts"] == 1, "the head is cast once, for all 26 chunks"


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is asked of Linux")
def test_two_thousand_runs_are_read_as_they_are_in_little_memory(benchmark, tmp_path):
    """`python benchmarks/reading.py` measures ten thousand, with ten times as many lines."""
    made_runs = benchmark("made_runs")
    made_runs.sweep(tmp_path / "sweep", runs=2_000, lines=100)
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "read_runs.py"), str(tmp_path / "sweep")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["runs"], found["finished"], found["lines"]) == (2_000, 2_000, 200_000)
    assert found["misread"] == 0
    assert found["losses"] == [1, 1, made_runs.DISTINCT], "of each file of metrics one loss, of all as many"
    assert found["own_mb"] < 200
    assert found["helper_mb"] < 150


def test_a_scale_is_the_slope_of_its_three_largest_sizes(benchmark):
    rows = [(1, 50, 0, 3), (10, 7, 0, 3), (100, 70, 0, 30), (1_000, 700, 0, 300)]
    linear, nothing, also = benchmark("scale").exponents(rows)
    assert [linear, also] == pytest.approx([1, 1])
    assert nothing is None


@pytest.mark.parametrize("kind", ["text", "tokens", "images"])
def test_the_data_of_a_start_hold_as_many_files_as_asked(benchmark, kind, tmp_path):
    benchmark("scale").DATA[kind](tmp_path, 60)
    opened = {
        "text": lambda: Text(f"{tmp_path}/*.txt", 64),
        "tokens": lambda: Tokens(str(tmp_path), 64, 0),
        "images": lambda: ImageFolder(str(tmp_path), 32, "none", 0.1, 0.0, [0.5] * 3, [0.5] * 3, 0),
    }
    assert opened[kind]().batch(0, 4, "train").inputs.shape[0] == 4
    assert len([file for file in tmp_path.rglob("[0-9]*.*") if file.is_file()]) == 60
