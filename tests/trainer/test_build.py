"""Building a run from a configuration: its parts fit together, and a refusal leaves nothing open."""

import io
import json
import time

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.guard.policy import RollbackGuard
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import TrainState
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.tracking.progress import Progress
from stabletrain.trainer import build as module
from stabletrain.trainer import parts
from stabletrain.trainer import resume as resumes
from stabletrain.trainer.build import build
from stabletrain.trainer.parts import machine_record
from stabletrain.trainer.resume import restore_state
from stabletrain.trainer.run import Plan
from stabletrain.trainer.stages import Process, Trained
from tests.runs import TINY_GPT, composed
from tests.trainer.given import CPU, FP32, Saves, make_run

CHOSEN = [*TINY_GPT, "steps=6", "grad_accum_steps=2", "eval_every=3", "log_every=2", "forensics.max_incidents=3"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A run, not trained yet; its folder; and what it has shown."""
    folder, shown = tmp_path_factory.mktemp("run"), io.StringIO()
    with composed(*CHOSEN) as cfg:
        run = build(cfg, folder, Progress(cfg.log_every, shown))
    yield run, folder, shown
    run.data.batches.close()
    run.output.tracker.close(0)
    run.output.folder.abandon("the test is over")


def test_the_plan_is_that_of_the_configuration(built):
    run, *_ = built
    assert run.plan == Plan(steps=6, grad_accum_steps=2, eval_every=3, log_every=2)
    assert run.device == CPU
    assert run.data.unit == "tok"
    assert (run.state.step, run.state.executed_steps) == (0, 0)


def test_what_is_prefetched_is_what_is_loaded_and_validation_is_as_long_as_asked_for(built):
    run, *_ = built
    for step in (0, 4):
        prefetched, loaded = run.data.batches.get(step), run.data.load(step)
        assert torch.equal(prefetched.inputs, loaded.inputs)
        assert len(loaded) == 4
    first, again = list(run.data.validation()), list(run.data.validation())
    assert len(first) == 2
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].inputs, run.data.load(0).inputs)


def test_everything_stateful_is_saved_and_is_what_the_run_uses(built):
    run, *_ = built
    used = {
        "guard": run.tools.guard,
        "precision": run.tools.precision,
        "clipping": run.tools.clipping,
        "history": run.history,
        "recent": run.monitoring.rolling,
        "monitors": run.monitoring.monitors,
        "forecast": run.monitoring.forecast,
    }
    assert run.saved.parts.keys() == used.keys()
    assert all(run.saved.parts[name] is part for name, part in used.items())
    assert run.saved.state is run.state
    assert run.tracker is run.output.tracker


@pytest.mark.parametrize(
    ("option", "copies"), [("guard=rollback", 5), ("guard.snapshots=1", 3), ("checkpoint=off", 4), ("guard=skip", 1)]
)
def test_a_host_that_cannot_hold_the_snapshots_is_told_before_the_first_step(
    tmp_path, monkeypatch, capsys, option, copies
):
    for free, said in ((1e3, True), (1e12, False)):
        monkeypatch.setattr(parts, "free_host_memory", lambda free=free: free)
        with composed(*CHOSEN, option) as cfg:
            run = build(cfg, tmp_path / str(said), Progress(cfg.log_every, io.StringIO()))
        run.data.batches.close()
        run.output.tracker.close(0)
        out = capsys.readouterr().out
        assert (f"memory   {copies} copies of the state" in out) == said
        assert ("fix: lower guard.snapshots, or use guard=skip" in out) == said


def test_the_ranks_of_a_machine_share_its_memory_and_the_main_process_writes_the_checkpoint(monkeypatch):
    asked = []
    monkeypatch.setattr(parts, "choose_memory", lambda state, **given: asked.append(given) or "too little")
    said = []
    monkeypatch.setattr(parts, "say", lambda line, **_: said.append(line))
    state = TrainState(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters()))
    for rank, local_rank, writers in ((0, 0, 1), (3, 3, 1), (8, 0, 0), (9, 1, 0)):
        ranks = Ranks(rank, 16, local_rank, True, local_world_size=8)
        process = Process(ranks, SingleProcess(), FP32, {}, CPU)
        parts.choose_host_memory(process, state, RollbackGuard(), Saves())
        assert (asked[-1]["ranks"], asked[-1]["snapshots"], asked[-1]["checkpoints"]) == (8, 4, writers)
    assert len(said) == 2, "one line for each machine"
    for shards, rank, writers in ((16, 9, 8), (8, 0, 8), (8, 9, 0), (4, 3, 4)):
        sharing = SingleProcess()
        sharing.shards = shards
        process = Process(Ranks(rank, 16, rank % 8, True, local_world_size=8), sharing, FP32, {}, CPU)
        parts.choose_host_memory(process, state, RollbackGuard(), Saves())
        assert asked[-1]["checkpoints"] == writers, "each rank that shares the first copy writes its shards"


def test_an_investigation_gets_a_model_of_its_own_and_the_whole_configuration(built):
    run, *_ = built
    other = run.forensics.model_factory()
    alike = {name: value.shape for name, value in run.state.model.state_dict().items()}
    assert {name: value.shape for name, value in other.state_dict().items()} == alike
    assert not {id(p) for p in other.parameters()} & {id(p) for p in run.state.model.parameters()}
    assert run.forensics.handler.max_incidents == 3
    assert run.forensics.metadata["config"]["grad_accum_steps"] == 2
    assert run.forensics.metadata["choices"]["model"] == "gpt_nano"
    assert time.time() - 3600 < run.forensics.metadata["started"] <= time.time()


def test_the_run_folder_describes_the_run_before_the_first_step(built):
    run, folder, shown = built
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["id"]) == ("running", run.output.folder.id)
    assert record["overrides"] == CHOSEN
    assert record["model"]["parameters"] == sum(p.numel() for p in run.state.model.parameters())
    assert record["hardware"]["precision"] == run.tools.precision.name
    first, settings, where = shown.getvalue().splitlines()[:3]
    assert first.startswith("stabletrain · gpt_nano, 14,416 parameters")
    assert "clipping norm 1" in settings
    assert where == f"run {folder}"


def test_the_closing_has_a_sample_and_the_run_folder(built):
    run, folder, _ = built
    lines = run.output.closing().splitlines()
    assert lines[0].startswith("val loss nan: nothing was evaluated after 0 steps")
    assert any(line.startswith("sample ") for line in lines)
    assert f"run      {folder}" in lines


@pytest.mark.beside
def test_the_closing_ends_with_a_sweep_and_writes_the_page(built):
    run, folder, _ = built
    assert "stability=none,zloss_qknorm" in run.output.closing().splitlines()[-1]
    assert (folder / "report.html").exists()


def test_what_fails_while_building_is_recorded_and_leaves_the_folder_free(tmp_path, monkeypatch):
    closed = []

    def refuse(*arguments):
        raise ConfigError("cannot be resumed")

    monkeypatch.setattr(module, "restore_state", refuse)
    monkeypatch.setattr(parts.Tracker, "close", lambda self, code: closed.append(code))
    with composed(*TINY_GPT) as cfg, pytest.raises(ConfigError, match="cannot be resumed"):
        build(cfg, tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["status"], record["reason"]) == ("failed", "cannot be resumed")
    assert closed == [1]
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_only_a_run_continued_in_its_own_folder_keeps_the_guards_retained_states(monkeypatch):
    for resume, forgotten in (("auto", 0), ("none", 1), ("other/checkpoints/step-10", 1)):
        run, asked, calls, rewound = make_run(), [], [], []
        monkeypatch.setattr(resumes, "restore_checkpoint", lambda *given, asked=asked: asked.append(given[-1]))
        run.tools.guard.states.forget = lambda calls=calls: calls.append(1)
        run.output.tracker.rewind = rewound.append
        run.state.step, run.state.executed_steps = 10, 13
        restore_state(run.saved, run.tools.guard, run.output.tracker, resume, steps=10)
        assert asked == ([] if resume == "none" else [resume])
        assert (len(calls), rewound) == (forgotten, [13])


def test_no_state_is_saved_at_first(built):
    run, folder, _ = built
    assert run.saved.snapshots.newest(10**6) is None
    assert not [*folder.glob("checkpoints/step-*")]


def test_the_machine_record_has_precision_and_determinism():
    process = Process(Ranks(), SingleProcess(), FP32, {"switch": True}, CPU)
    model = nn.Linear(1, 1)
    trained = Trained(TrainState(model, torch.optim.SGD(model.parameters())), make_run().monitoring.usage, ["head"], 2)
    record = machine_record(process, trained)
    assert (record["precision"], record["fp32_modules"], record["determinism"]) == ("fp32", ["head"], {"switch": True})
    assert set(record) > {"precision", "fp32_modules", "determinism"}, "and the machine itself"
