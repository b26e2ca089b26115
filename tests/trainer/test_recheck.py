"""A gradient or update that is computed wrongly once is seen, named and undone; a model that never repeats is told."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import stabletrain
from stabletrain.errors import TrainingHalted
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.handler import IncidentHandler
from stabletrain.guard import RollbackGuard, SkipGuard
from stabletrain.guard.checks import recheck, repeats, update_check
from stabletrain.guard.checks.recheck import LEARNING_REPEATS
from stabletrain.guard.checks.repeats import OneTensor
from stabletrain.stability import precision as precisions
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer import incidents
from stabletrain.trainer.loop import train
from tests.runs import TINY_GPT
from tests.trainer.given import make_run

DUE = 10
"""A step that is computed twice; every fifth one is."""


class FromHere(nn.Linear):
    """A linear layer that calls `spoil` with its output, in training."""

    spoil = staticmethod(lambda output: output)

    def forward(self, input):
        output = super().forward(input)
        return self.spoil(output) if self.training else output


def flipped(tensor):
    """A copy with one bit of the exponent of one element flipped."""
    tensor = tensor.detach().clone()
    tensor.view(torch.int32).view(-1)[1] ^= 1 << 24
    return tensor


def a_run(folder=None, guard=None, every=5, steps=20, adam=False):
    """A run whose model can be spoilt, with the same weights each time."""
    handler = None if folder is None else IncidentHandler(keep_state=False)
    guard = guard or RollbackGuard(recheck_every=every, snapshot_every=3, healthy_after=2)
    run = make_run(guard=guard, steps=steps, eval_every=steps, handler=handler)
    if folder is not None:
        handler.open(folder, RunSettings())
    model = run.state.model
    model.__class__ = FromHere
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), 1):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / number)
    if adam:
        run.state.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return run


def spoil_gradient(run, steps=(DUE,), calls=(1,), change=flipped):
    """Makes the forward pass wrong in these calls of each of these steps, once per step number and call."""
    done = {}

    def spoil(output):
        step = run.state.step + 1
        done[step] = done.get(step, 0) + 1
        wrong = step in steps and done[step] in calls
        return output + (change(output) - output.detach()) if wrong else output

    run.state.model.spoil = spoil


def spoil_update(run, step=DUE, name="weight", change=flipped):
    """Makes the update of one tensor wrong, the first time that this step is run."""
    optimizer, done = run.state.optimizer, []
    update = optimizer.step

    def wrongly():
        update()
        if run.state.step + 1 == step and not done:
            done.append(step)
            parameter = dict(run.state.model.named_parameters())[name]
            parameter.data.copy_(change(parameter.data))

    optimizer.step = wrongly


def bits_of(run):
    state = run.state.optimizer.state.values()
    moments = [value for each in state for value in each.values() if isinstance(value, torch.Tensor)]
    return [*(parameter.detach() for parameter in run.state.model.parameters()), *moments]


def assert_same(run, other):
    for mine, theirs in zip(bits_of(run), bits_of(other), strict=True):
        assert torch.equal(mine, theirs)


def events(run, kind):
    return [(step, fields) for each, step, fields in run.output.tracker.events if each == kind]


def clean(**options):
    run = a_run(**options)
    train(run)
    return run


def incident(folder):
    (path,) = folder.glob("step-*/diagnosis.json")
    return json.loads(path.read_text())


def test_without_a_fault_nothing_is_said_and_no_bit_changes():
    run, without = clean(every=1), clean(every=0)
    assert_same(run, without)
    assert run.output.tracker.notes == without.output.tracker.notes == []
    assert [bound.agreed for bound in run.tools.guard.recheck.bounds.values()] == [20, 20]


@pytest.mark.slow(unless=lambda call: call == 1)
@pytest.mark.parametrize(("call", "third"), [(1, "second"), (2, "first")])
def test_a_gradient_that_is_wrong_once_is_named_and_its_batch_is_read_again(tmp_path, call, third):
    run = a_run(tmp_path)
    spoil_gradient(run, calls=(call,))
    train(run)
    assert_same(run, clean())
    assert [(step, fields["kind"]) for step, fields in events(run, "skip")] == [(DUE, "recheck")]
    ((step, fields),) = events(run, "restore")
    assert (step, fields["to"], fields["loaded"]) == (DUE, DUE - 1, DUE - 1), (
        "the state is good: only the step is wrong"
    )
    found = incident(tmp_path)
    assert (found["kind"], found["cause"], found["step"]) == ("recheck", "hardware_fault", DUE)
    assert "weight" in found["verdict"]
    assert "device cpu (cpu), host" in found["verdict"]
    assert "rank 0" in found["verdict"]
    assert f"a third computation equals the {third}" in " ".join(found["evidence"])


@pytest.mark.slow(unless=lambda adam: adam)
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
def test_an_update_that_is_wrong_once_is_named_and_undone(tmp_path, adam):
    run = a_run(tmp_path, adam=adam)
    spoil_update(run)
    train(run)
    assert_same(run, clean(adam=adam))
    assert not events(run, "skip")
    ((step, fields),) = events(run, "restore")
    assert (step, fields["to"]) == (DUE, DUE - 1)
    found = incident(tmp_path)
    assert (found["kind"], found["cause"]) == ("recheck", "hardware_fault")
    assert "the optimizer's update" in found["verdict"]
    assert "a third computation equals the second" in " ".join(found["evidence"])


@pytest.mark.slow
def test_each_tensor_has_its_turn():
    run = a_run()
    spoil_update(run, name="bias")  # step 10 repeats the weight's update
    train(run)
    assert not events(run, "restore")
    run = a_run()
    spoil_update(run, step=15, name="bias")
    train(run)
    assert len(events(run, "restore")) == 1


@pytest.mark.slow
def test_without_snapshots_a_wrong_gradient_is_computed_again_and_a_wrong_update_halts():
    run = a_run(guard=SkipGuard(recheck_every=5))
    spoil_gradient(run)
    train(run)
    assert run.history.updates == 20
    assert run.tools.guard.skips["recheck"] == 0
    assert run.tools.guard.machine_faults == 1
    assert run.tools.guard.healthy
    run = a_run(guard=SkipGuard(recheck_every=5))
    spoil_update(run)
    with pytest.raises(TrainingHalted, match="update came out differently"):
        train(run)


@pytest.mark.slow
def test_a_step_is_taken_again_only_so_often_without_progress():
    run = a_run(every=1)
    spoil_gradient(run, steps=(5, 7, 9, 11))
    train(run)
    assert len(events(run, "restore")) == 3
    assert run.tools.guard.skips["recheck"] == 1, "the fourth without progress is skipped"


def test_a_model_that_never_repeats_is_no_fault_and_is_told_once(tmp_path):
    run, calls = a_run(tmp_path), []

    def drift(output):
        calls.append(1)
        return output + 1e-3 * len(calls)

    run.state.model.spoil = drift
    train(run)
    assert len(events(run, "recheck_varies")) == 1
    assert not [*tmp_path.iterdir()]
    assert not events(run, "rollback")
    assert run.history.updates == 19, "the first repetition could not know it"
    assert run.tools.guard.recheck.bounds["gradient"].varies
    assert len(run.output.tracker.notes) == 1


@pytest.mark.slow
def test_a_third_computation_that_fails_does_not_end_the_run(tmp_path):
    run, failed = a_run(tmp_path), []
    spoil_gradient(run)
    spoil = run.state.model.spoil

    def fails(output):
        if run.state.step == DUE and not failed:  # the step is counted already: this is the third
            failed.append(True)
            raise RuntimeError("out of memory")
        return spoil(output)

    run.state.model.spoil = fails
    train(run)
    assert_same(run, clean())
    assert "there was no third computation" in incident(tmp_path)["evidence"]


@pytest.mark.slow
def test_a_step_that_is_taken_again_and_comes_out_differently_again_is_skipped_and_not_said_to_vary(tmp_path):
    run = a_run(tmp_path)
    # Both computations of the second time are repeated too: only the latter is wrong, twice in the same way.
    spoil_gradient(run, calls=(1, 5, 6))
    train(run)
    assert not events(run, "recheck_varies")
    assert [(step, fields["kind"]) for step, fields in events(run, "skip")] == [(DUE, "recheck")] * 2
    assert run.history.updates == 19
    assert not run.tools.guard.recheck.varies


# ---- where bits may differ


@pytest.fixture
def inexact(monkeypatch):
    """A machine that adds in any order, as a card does by default."""
    for module in (recheck, incidents, update_check):
        monkeypatch.setattr(module, "repeats_exactly", lambda *_: False)


def rounding(run):
    """Makes each forward pass round otherwise than the one before."""
    calls, spoil = [], run.state.model.spoil

    def rounded(output):
        calls.append(1)
        return spoil(output) * (1 + 1e-6 * (len(calls) % 3))

    run.state.model.spoil = rounded


@pytest.mark.slow(unless=lambda call: call == 1)
@pytest.mark.parametrize("call", [1, 2])
def test_a_gradient_beyond_what_is_usual_is_a_fault_and_its_batch_is_read_again(tmp_path, inexact, call):
    run, step = a_run(tmp_path, every=1), LEARNING_REPEATS + 3
    spoil_gradient(run, steps=(step,), calls=(call,))
    rounding(run)
    train(run)
    assert not events(run, "recheck_varies")
    assert [(step, fields["kind"]) for step, fields in events(run, "skip")] == [(step, "recheck")]
    ((_, fields),) = events(run, "restore")
    assert fields["to"] == step - 1
    assert run.history.updates == 20, "no batch is lost"
    assert run.tools.guard.machine_faults == 1
    found = incident(tmp_path)
    assert (found["kind"], found["cause"], found["step"]) == ("recheck", "hardware_fault", step)
    assert "is usual on this machine" in " ".join(found["evidence"])


@pytest.mark.slow
def test_an_update_beyond_what_is_usual_is_a_fault(tmp_path, inexact):
    run, step = a_run(tmp_path, every=1, adam=True), LEARNING_REPEATS * 2  # the weight's turn
    spoil_update(run, step)
    rounding(run)
    train(run)
    ((_, fields),) = events(run, "restore")
    assert fields["to"] == step - 1
    assert "the optimizer's update" in incident(tmp_path)["verdict"]


@pytest.mark.slow(unless=lambda step: step == 1)
@pytest.mark.parametrize("step", [1, 2])
def test_not_a_number_on_one_side_is_a_fault_as_soon_as_one_repetition_was_usual(tmp_path, inexact, step):
    run = a_run(tmp_path, every=1)
    spoil_gradient(run, steps=(step,), calls=(2,), change=lambda output: torch.full_like(output, torch.nan))
    rounding(run)
    train(run)
    assert len(events(run, "recheck_varies")) == (step == 1), "nothing is known in the first step"
    assert len([*tmp_path.glob("step-*")]) == (step == 2)
    assert run.history.updates == (19 if step == 1 else 20)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1e-2, 1e-4])
def test_an_update_is_judged_in_the_precision_of_the_weights(tmp_path, inexact, share):
    run, step = a_run(tmp_path, every=1, adam=True), LEARNING_REPEATS * 2
    run.tools = replace(run.tools, precision=precisions.bf16(run.device))
    spoil_update(run, step, change=lambda weight: weight * (1 + share))
    train(run)
    assert len(events(run, "restore")) == 1, "bf16 has 3 digits, the weights 7"


GPT = [*TINY_GPT, "precision=fp32", "steps=14", "monitors=none", "checkpoint=off", "guard.recheck_every=1"]
GPT += ["guard.snapshot_every=5", "hydra.run.dir=run"]


def differing(monkeypatch, by, at):
    """Fakes how far gradients differ: the first tensor's is noise, another's wrong in comparison number `at`."""
    real, seen = repeats.compare, []

    def compare(pairs, device, **known):
        compared = real(pairs, device, **known)
        if "again" in known:  # of an update
            return compared
        ratios = torch.full_like(compared.ratios, 1e-3)
        ratios[0] = 0.5 + len(seen) % 2
        seen.append([name for name, *_ in pairs])
        if len(seen) == at:
            ratios[3] = by
        return replace(compared, ratios=ratios)

    monkeypatch.setattr(repeats, "compare", compare)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("by", [0.32, 0.9])
def test_a_user_sees_an_error_in_one_tensor_however_noisy_another_is(tmp_path, monkeypatch, inexact, capsys, by):
    monkeypatch.chdir(tmp_path)
    seen = differing(monkeypatch, by, at=12)
    result = stabletrain.train(GPT)
    assert (result.status, result.metrics["guard/updates"], result.metrics["guard/machine_faults"]) == (
        "finished",
        14,
        1,
    )
    (path,) = (tmp_path / "run" / "incidents").glob("*/diagnosis.json")
    found, name = json.loads(path.read_text()), seen[0][3]
    assert (found["cause"], found["step"]) == ("hardware_fault", 12)
    assert f"{name} by up to {by}" in found["verdict"]
    assert (
        f"in {name}, up to 0.008 is usual on this machine; 0 earlier repetitions had the same bits" in found["evidence"]
    )
    kinds = [event["event"] for event in read_jsonl(tmp_path / "run" / "events.jsonl")]
    assert (kinds.count("restore"), kinds.count("recheck_varies")) == (1, 0)
    out = capsys.readouterr()
    assert "taken again, with the same batch" in out.out + out.err
    assert "never gives the same bits" not in out.out + out.err


@pytest.mark.slow
def test_what_is_usual_for_each_tensor_survives_a_resume(tmp_path, monkeypatch, inexact):
    monkeypatch.chdir(tmp_path)
    saved = [each for each in GPT if each != "checkpoint=off"] + ["checkpoint.every=10"]
    differing(monkeypatch, 0.0, at=0)
    stabletrain.train([*saved, "steps=10"])
    seen = differing(monkeypatch, 0.32, at=2)
    result = stabletrain.train(["resume=run", "steps=14"])
    assert len(seen) == 5, "four steps, of which one is taken again"
    assert (result.metrics["guard/updates"], result.metrics["guard/machine_faults"]) == (14, 1)
    (path,) = (tmp_path / "run" / "incidents").glob("*/diagnosis.json")
    assert json.loads(path.read_text())["step"] == 12


# ---- memory


@pytest.mark.parametrize(
    ("first", "steps", "every", "rehearsed"),
    [(0, 1000, 250, 1), (300, 1000, 250, 300), (0, 249, 250, None), (750, 999, 250, None), (749, 750, 250, 749)],
)
def test_the_first_step_with_moments_is_repeated_if_a_later_one_will_be(first, steps, every, rehearsed):
    asked = recheck.Recheck(every)
    incidents.rehearse(asked, first, steps)
    assert asked._rehearsed == rehearsed
    incidents.rehearse(recheck.NoRecheck(), first, steps)


def passes(run):
    """Counts the forward passes of each step."""
    counts, spoil = {}, run.state.model.spoil

    def counting(output):
        step = run.state.step + 1
        counts[step] = counts.get(step, 0) + 1
        return spoil(output)

    run.state.model.spoil = counting
    return counts


def test_the_rehearsal_is_not_judged_and_changes_nothing():
    run = a_run()
    spoil_gradient(run, steps=(2,), calls=(2,))
    counts = passes(run)
    train(run)
    assert [step for step, count in counts.items() if count == 2] == [2, 5, 10, 15, 20]
    assert_same(run, clean(every=0))
    assert not run.output.tracker.notes
    assert run.tools.guard.recheck.agreed("gradient") == 4


ERRORS = {
    "of a card": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "of a CPU": RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"),
    "of cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "of Python": MemoryError(),
}


def fail(run, error, step, call=2):
    """Raises an error in this call of a step's forward passes."""
    counts = passes(run)
    spoil = run.state.model.spoil

    def failing(output):
        output = spoil(output)
        if (run.state.step + 1, counts[run.state.step + 1]) == (step, call):
            raise error
        return output

    run.state.model.spoil = failing
    return counts


@pytest.mark.slow(unless=lambda step, error: (step, error) == (2, "of a card"))
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("step", [2, DUE])
def test_too_little_memory_ends_the_check_and_not_the_run(step, error):
    run = a_run()
    counts = fail(run, ERRORS[error], step)
    train(run)
    assert_same(run, clean(every=0))
    ((at, fields),) = events(run, "recheck_off")
    assert (at, fields["reason"]) == (step, "out of memory")
    (note,) = run.output.tracker.notes
    assert note.startswith(f"step {step}: too little memory to compute a gradient and an update twice")
    assert [each for each, count in counts.items() if count == 2] == ([2] if step == 2 else [2, 5, DUE])
    assert run.history.updates == 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["of", "updated"])
def test_too_little_memory_for_copies_of_an_update_ends_the_check_and_not_the_run(monkeypatch, method):
    def fails(*_):
        raise ERRORS["of a card"]

    monkeypatch.setattr(OneTensor, method, fails)
    run = a_run(adam=True)
    train(run)
    monkeypatch.undo()
    assert_same(run, clean(adam=True, every=0))
    assert [step for step, _ in events(run, "recheck_off")] == [2]
    assert len(run.output.tracker.notes) == 1


@pytest.mark.slow
def test_any_other_error_of_a_second_run_is_the_users():
    run = a_run()
    fail(run, RuntimeError("a bug"), step=2)
    with pytest.raises(RuntimeError, match="a bug"):
        train(run)
    run = a_run()
    fail(run, ERRORS["of a card"], step=3, call=1)
    with pytest.raises(torch.OutOfMemoryError):
        train(run)
