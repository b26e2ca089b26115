"""The engine on a step that is made up: what a verdict becomes, and what is explained, recorded and said."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from stabletrain.buffers import buffers_of
from stabletrain.forensics.agreement import NotInvestigated
from stabletrain.forensics.handler import IncidentSummary
from stabletrain.guard.checks.comparing import compare
from stabletrain.guard.checks.recheck import Recheck, collect_finding, third_equals
from stabletrain.guard.engine import (
    DAMAGED,
    changed_tensors,
    check_machine,
    explain,
    explain_held,
    note_taken_again,
    settle,
)
from stabletrain.guard.policy import NoGuard, RollbackGuard, SkipGuard
from stabletrain.guard.policy.limits import BAD_UPDATE, GRADIENT_DIFFERS, UPDATE_DIFFERS
from stabletrain.guard.read_step import ReadStep
from stabletrain.guard.reports import log_alarms
from stabletrain.monitors.rolling import Alarm
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import TrainState, Verdict
from tests.trainer.given import CPU, Handler, Recorder, reading

NAN = {"applied": False, "loss": math.nan}
SPIKE = {"applied": False, "loss": 40.0}
BAD_DATA = {"applied": False, "bad_data": True}
WRONG = {"applied": False, "recheck": 0.5}
WRONG_UPDATE = {"recheck_update": 0.5}
BAD_UPDATE_OF = {"applied": False, "bad_update": True}


class MadeUp(ReadStep):
    """A step with these numbers.

    Attributes:
        kinds: what was investigated.
        repeats, differs: the answers of `can_be_repeated` and `differs_when_repeated`.
        updates: called as the optimizer's step.
        third: the result of `gradient_again`, or an error.
        bad: samples that no model can learn from.
        guilty, asked: rows without which the step is within all limits; what it was run without.
    """

    def __init__(self, guard, number=7, handler=None, parallel=None, **numbers):
        model = nn.Linear(2, 2)
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        parallel = parallel or SingleProcess()
        super().__init__(
            reading(7, **numbers), number, 107, state, CPU, guard, parallel, Recorder(), handler or Handler(files=False)
        )
        self.kinds, self.requests = [], []
        self.repeats, self.differs, self.third, self.bad = True, False, None, []
        self.updates = lambda: None
        self.files = None
        self.guilty, self.asked = {1}, []

    def investigate(self, kind, reading):
        self.kinds.append(kind)
        self.requests.append(reading)
        if isinstance(self.files, Exception):
            raise self.files
        return self.files

    def can_be_repeated(self):
        return self.repeats

    def differs_when_repeated(self, cause):
        return self.differs

    def update_again(self):
        self.updates()

    def gradient_again(self, compared):
        if isinstance(self.third, Exception):
            raise self.third
        return self.third

    def sample_counts(self):
        return [[4]]

    def is_sound_without(self, left_out):
        self.asked.append(left_out)
        return self.guilty <= {each.row for each in left_out}

    def bad_samples(self, most=None):
        return self.bad, 4

    def events(self, *wanted):
        return [(kind, step, fields) for kind, step, fields in self.tracker.events if kind in wanted or not wanted]


class Held:
    """Steps from number 7 on with these numbers, one after the other, all of them held.

    Attributes:
        kinds: what was investigated.
    """

    def __init__(self, *rows, guard=None, files=True):
        self.guard, self.tracker, self.handler = guard or SkipGuard(max_consecutive=4), Recorder(), Handler()
        self.kinds = []
        for number, row in enumerate(rows, 7):
            step = MadeUp(self.guard, number=number, handler=self.handler, **row)
            step.tracker, step.tick, step.kinds = self.tracker, number + 100, self.kinds
            step.files = filed() if files is True else files
            explain_held(step, self.guard.judge(step.reading))

    def events(self, kind):
        return [(step, fields) for each, step, fields in self.tracker.events if each == kind]


def filed(**known):
    path = Path("incidents/step-7-01")
    return IncidentSummary(path, "lr_too_high", "too high", ["lower it"], ["what", "fix: lower it"], **known)


def compared(guard, part, third, agreed=0):
    """Has the policy's recheck hold a comparison of two results; returns the step's sums for `third`."""
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    results = {"first": first, "second": second.clone(), "neither": torch.tensor([3.0, 3.0])}
    sums = {name: compare([("w", each, each.clone())], CPU).first for name, each in results.items()}
    found = compare([("w", first, second)], CPU)
    guard.recheck.judge_of(6, part, 1e-7)(found, found.ratios)
    guard.recheck.bounds[part].agreed = agreed
    return sums.get(third)


class TwoRanks(SingleProcess):
    """This rank and another, which answers `True`."""

    def any_rank(self, value):
        return True


# ---- settle


def test_a_step_that_was_applied_is_left_alone():
    step = MadeUp(SkipGuard())
    assert settle(step) is Verdict.APPLY
    assert (step.kinds, step.tracker.events, step.tracker.notes) == ([], [], [])


def test_a_held_step_is_recorded_before_it_is_investigated():
    step = MadeUp(SkipGuard(), number=70, **NAN)
    seen = []
    step.investigate = lambda *_: seen.extend(step.tracker.events)
    assert settle(step) is Verdict.SKIP
    ((kind, number, fields),) = seen
    assert (kind, number, fields["tick"], fields["kind"]) == ("skip", 70, 107, "nonfinite")
    assert step.tracker.notes == ["step 70: loss is nan; update skipped (nonfinite, number 1)"]


def test_an_update_that_is_finite_when_its_step_is_run_again_is_explained_as_the_bad_one():
    """As the trainer restores an older state, and runs the step again."""
    guard = SkipGuard()
    guard.note_retry(7, rank=3)
    step = MadeUp(guard)
    assert settle(step) is Verdict.APPLY
    assert step.kinds == ["update"]
    assert (step.requests[0].bad_update, step.requests[0].rank, step.reading.bad_update) == (True, 3, False)


def test_too_little_memory_for_a_repetition_is_said_once_and_ends_repetitions():
    guard = SkipGuard(recheck_every=1)
    for said in (1, 0):
        step = MadeUp(guard, recheck=-1.0)
        assert settle(step) is Verdict.APPLY
        assert len(step.events("recheck_off")) == len(step.tracker.notes) == said
    assert guard.recheck.exhausted


# ---- explain


def test_a_skipped_step_is_recorded_with_its_numbers():
    ((step, fields),) = Held(NAN).events("skip")
    assert step == 7
    assert math.isnan(fields.pop("loss"))
    assert fields == {"kind": "nonfinite", "reason": "loss is nan", "tick": 107, "grad_norm": 0.5, "loss_scale": 1.0}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (NAN, "nonfinite"),
        (SPIKE, "spike"),
        (BAD_DATA, "bad_data"),
        *(({**BAD_DATA, name: math.inf}, "nonfinite") for name in ("loss", "grad_norm", "buffers")),
    ],
    ids=["nan", "spike", "bad data", "bad data and loss", "bad data and gradient", "bad data and buffers"],
)
def test_the_first_of_several_in_a_row_is_investigated(row, kind):
    held = Held(row, row, row)
    assert held.kinds == [kind]
    assert [step for step, _ in held.events("incident")] == [7]
    assert [step for step, _ in held.events("skip")] == [7, 8, 9]
    assert held.handler.newest == held.guard.kind


def test_an_overflow_that_calibrates_the_loss_scale_is_recorded_only():
    overflow = {"applied": False, "overflow": True, "loss_scale": 1024.0}
    held = Held(overflow, overflow, guard=NoGuard())
    assert len(held.events("skip")) == 2
    assert (held.kinds, held.tracker.notes) == ([], [])


@pytest.mark.parametrize(("last", "investigated"), [(NAN, ["spike", "nonfinite"]), (SPIKE, ["spike"])])
def test_the_step_that_ends_the_run_is_investigated_if_its_reason_is_another(last, investigated):
    assert Held(SPIKE, SPIKE, SPIKE, last).kinds == investigated


def test_what_is_not_investigated_is_mentioned_with_its_number():
    held = Held(NAN, NAN, files=None)
    assert held.tracker.notes == [
        "step 7: loss is nan; update skipped (nonfinite, number 1)",
        "step 8: loss is nan; update skipped (nonfinite, number 2)",
    ]
    assert held.handler.newest == ""


def test_the_halt_is_reported_elsewhere():
    assert Held(NAN, guard=SkipGuard(max_consecutive=1), files=None).tracker.notes == []


def test_a_filed_incident_is_recorded_shown_and_sent():
    held = Held(NAN)
    found = {"cause": "lr_too_high", "verdict": "too high", "fix": ["lower it"], "path": "incidents/step-7-01"}
    assert held.events("incident") == [(7, {"tick": 107, "kind": "nonfinite", **found})]
    assert held.tracker.notes == ["what", "fix: lower it"]
    assert held.tracker.alerts == [("incident: lr_too_high", "what\nfix: lower it")]


def test_an_incident_that_cannot_be_investigated_is_one_line_and_the_step_is_skipped_as_before():
    held = Held(NAN, files=NotInvestigated("rank 1: no memory"))
    assert held.tracker.notes == [
        "step 7: this incident is not investigated: rank 1: no memory",
        "step 7: loss is nan; update skipped (nonfinite, number 1)",
    ]
    expected = (7, {"tick": 107, "kind": "nonfinite", "reason": "rank 1: no memory"})
    assert held.events("not_investigated") == [expected]
    assert not held.events("incident")
    assert held.handler.newest == ""


def test_a_known_incident_is_not_shown_again():
    step = MadeUp(SkipGuard())
    step.files = filed(known=True)
    assert explain(step, "spike") is step.files
    assert (step.tracker.events, step.tracker.notes, step.tracker.alerts) == ([], [], [])


@pytest.mark.parametrize(("known", "newest"), [(False, "nonfinite"), (True, "")])
def test_the_newest_incident_is_remembered_if_it_is_new(known, newest):
    step = MadeUp(SkipGuard(), **NAN)
    step.files = filed(known=known)
    settle(step)
    assert step.handler.newest == newest
    assert step.guard._incident is step.files, "a rollback is not repeated for the same mistake"


def test_bad_samples_are_named():
    step = MadeUp(SkipGuard(), **BAD_DATA)
    step.bad = [{"index": 2, "id": 2, "fault": "label", "what": "label 9 is out of range"}]
    settle(step)
    ((_, _, fields),) = step.events("skip")
    assert fields["samples"] == step.bad
    assert "label 9 is out of range" in fields["reason"]


def test_tensors_that_changed_are_named():
    guard = RollbackGuard(checksum_every=1)
    guard.states.retain(0, True)
    step = MadeUp(guard, applied=False, state_changed=True)
    state, check = step.state, guard.state_check
    check.after_update(state, buffers(state))
    with torch.no_grad():
        state.model.weight[0, 0] += 1
    check.before_update(state, buffers(state))
    (name,) = changed_tensors(step)
    assert name.startswith("parameter weight")
    settle(step)
    ((_, _, fields),) = step.events("skip")
    assert fields["tensors"] == [name]


def buffers(state):
    return buffers_of(state.model).save()


# ---- faults of the machine


def test_a_step_that_comes_out_otherwise_when_it_is_repeated_is_taken_again():
    step = MadeUp(SkipGuard(), **NAN)
    step.differs = True
    assert settle(step) is Verdict.RESTORE
    assert (step.guard.machine_faults, step.guard.skips["nonfinite"]) == (1, 0)
    again = MadeUp(step.guard, **NAN)
    again.differs = True
    assert settle(again) is Verdict.SKIP, "only once"


@pytest.mark.parametrize(
    ("numbers", "part", "kind"),
    [(NAN | {"recheck": 0.5}, "gradient", "nonfinite"), (BAD_UPDATE_OF | {"recheck_update": 0.5}, "update", "update")],
    ids=["loss", "update"],
)
def test_a_fault_that_a_repetition_has_shown_already_is_explained_too(numbers, part, kind):
    guard = SkipGuard(recheck_every=1)
    step = MadeUp(guard, **numbers)
    step.third = compared(guard, part, "second", agreed=1)
    assert settle(step) is Verdict.RESTORE
    assert step.kinds == [guard.kind] == [kind]


def test_the_skips_of_a_guard_that_does_not_count_them_in_a_row_are_not_all_investigated():
    class Own(NoGuard):
        def judge(self, reading):
            self.kind, self.reason, self.skips = "nonfinite", "loss is nan", {"nonfinite": 4}
            return Verdict.SKIP

    step = MadeUp(Own(), **NAN)
    assert settle(step) is Verdict.SKIP
    assert step.kinds == []


def test_the_path_of_an_incident_is_relative_to_the_folder_around_the_incidents():
    for path, shown in ((Path("incidents/step-7"), "incidents/step-7"), (Path("step-7"), "step-7")):
        step = MadeUp(SkipGuard(), **NAN)
        step.files = IncidentSummary(path, "lr_too_high", "too high", ["lower it"], ["what"])
        settle(step)
        ((_, _, fields),) = step.events("incident")
        assert fields["path"] == shown


@pytest.mark.parametrize("why", ["the same again", "cannot be repeated", "second in a row", "bad data"])
def test_any_other_step_is_not(why):
    guard, numbers = SkipGuard(), NAN
    if why == "second in a row":
        settle(MadeUp(guard, **NAN))
    if why == "bad data":
        numbers = BAD_DATA
    step = MadeUp(guard, **numbers)
    step.differs, step.repeats = why != "the same again", why != "cannot be repeated"
    assert settle(step) is Verdict.SKIP
    assert guard.machine_faults == 0


def test_a_difference_on_another_rank_counts():
    step = MadeUp(SkipGuard(), parallel=TwoRanks(), **NAN)
    guard = step.guard
    guard.kind, guard.reason, guard.consecutive = "nonfinite", "loss is nan", 1
    assert check_machine(step, Verdict.SKIP, None) is not Verdict.SKIP


@pytest.mark.parametrize(("makes", "verdict"), [(0.0, Verdict.RESTORE), (math.nan, Verdict.SKIP)])
def test_an_update_that_was_undone_is_repeated_and_taken_again_if_it_is_finite(makes, verdict):
    step = MadeUp(SkipGuard(), **BAD_UPDATE_OF)
    weight = step.state.model.weight
    before = weight.detach().clone()
    step.updates = lambda: weight.data.add_(makes)
    assert settle(step) is verdict
    assert step.guard.reason == BAD_UPDATE
    assert torch.equal(weight, before)
    assert step.kinds == ["update"]


@pytest.mark.parametrize("damage", ["weights", "diagnosis"])
def test_a_damaged_state_is_replaced_and_without_snapshots_ends_the_run(damage):
    for guard, verdict in ((RollbackGuard(), Verdict.RESTORE), (SkipGuard(), Verdict.HALT)):
        if isinstance(guard, RollbackGuard):
            guard.states.retain(0, True)
        step = MadeUp(guard, **NAN)
        if damage == "weights":
            step.state.model.weight.data[0, 0] = math.nan
        else:
            step.files = IncidentSummary(None, "corrupt_state", "", [], [])
        assert settle(step) is verdict
        assert guard.kind == "state"
        assert guard.reason.startswith(f"loss is nan: {DAMAGED}")


# ---- two results that differ


@pytest.mark.parametrize(
    ("third", "agreed", "verdict"),
    [
        ("second", 0, Verdict.RESTORE),
        ("second", 3, Verdict.RESTORE),
        ("first", 3, Verdict.RESTORE),
        ("neither", 3, Verdict.RESTORE),
        ("first", 0, Verdict.SKIP),
        ("neither", 0, Verdict.SKIP),
        (None, 0, Verdict.SKIP),
        (None, 3, Verdict.RESTORE),
    ],
)
def test_a_third_computation_tells_a_fault_from_a_model_that_never_repeats(third, agreed, verdict):
    guard = SkipGuard(recheck_every=1)
    step = MadeUp(guard, **WRONG)
    step.third = compared(guard, "gradient", third, agreed)
    assert settle(step) is verdict
    fault = verdict is Verdict.RESTORE
    assert step.kinds == (["recheck"] if fault else [])
    assert (guard.recheck.found is not None) == fault
    assert guard.recheck.varies != fault
    assert guard.reason == GRADIENT_DIFFERS
    kinds = [kind for kind, *_ in step.tracker.events]
    assert kinds == (["skip"] if fault else ["recheck_varies", "skip"])
    assert sum("never gives the same bits" in line for line in step.tracker.notes) == (not fault)


def test_a_wrong_update_is_distrusted_explained_and_undone():
    for kind, verdict in ((RollbackGuard, Verdict.RESTORE), (SkipGuard, Verdict.HALT)):
        guard = kind(recheck_every=1)
        if isinstance(guard, RollbackGuard):
            guard.states.retain(0, True)
        step = MadeUp(guard, **WRONG_UPDATE)
        step.files = filed()
        step.third = compared(guard, "update", "second")
        assert settle(step) is verdict
        assert [kind for kind, *_ in step.tracker.events] == ["distrust", "incident"]
        assert (step.events("distrust")[0][2]["part"], step.kinds) == ("update", ["recheck"])
        assert guard.reason.startswith(UPDATE_DIFFERS)


def test_an_update_that_never_repeats_stays():
    guard = RollbackGuard(recheck_every=1)
    step = MadeUp(guard, **WRONG_UPDATE)
    step.third = compared(guard, "update", "neither")
    assert settle(step) is Verdict.APPLY
    assert step.events("recheck_varies")[0][2] == {"part": "update", "tick": 107}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("a bug"), KeyError("x")])
def test_a_third_computation_that_raises_is_none(error):
    found = compare([("w", torch.ones(2), torch.zeros(2))], CPU)

    def fails():
        raise error

    assert third_equals(fails, found) == ""


def test_an_interrupt_in_a_third_computation_is_the_users():
    found = compare([("w", torch.ones(2), torch.zeros(2))], CPU)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        third_equals(interrupted, found)


def test_a_finding_names_the_largest_difference_first_and_those_alone_that_exceed():
    recheck = Recheck(1)
    pairs = [(name, torch.ones(1), torch.tensor([value])) for name, value in (("a", 1.0), ("b", 0.75), ("c", 0.25))]
    found = compare(pairs, CPU)
    recheck.judge_of(0, "gradient", 1e-7)(found, found.ratios)
    finding = collect_finding(recheck, "gradient", "here", lambda _: found.second)
    assert (finding.tensors, finding.differs) == ([("c", 0.75), ("b", 0.25)], True)
    assert (finding.third, finding.limit, finding.place) == ("second", 0.0, "here")


def test_a_rank_without_a_comparison_has_found_nothing():
    finding = collect_finding(Recheck(1), "gradient", "here", lambda _: pytest.fail("computed again"))
    assert (finding.differs, [*finding.tensors], finding.third) == (False, [], "")


# ---- what both doors show


def test_a_step_that_is_taken_again_is_an_event_and_a_line():
    step = MadeUp(SkipGuard(), number=70)
    step.guard.reason = "loss is nan"
    note_taken_again(step)
    fields = {"tick": 107, "to": 6, "loaded": 6, "reason": "loss is nan"}
    assert step.tracker.events == [("restore", 70, fields)]
    assert step.tracker.notes == ["step 70: taken again, with the same batch and learning rate"]


def test_each_alarm_is_recorded_shown_and_sent():
    tracker = Recorder()
    log_alarms(tracker, 12, [Alarm("skips", "many skips"), Alarm("slow", "rises", since=5)])
    assert tracker.events == [
        ("alarm", 12, {"kind": "skips", "text": "many skips"}),
        ("alarm", 12, {"kind": "slow", "text": "rises", "since": 5}),
    ]
    assert tracker.notes == ["step 12: many skips", "step 12: rises"]
    assert tracker.alerts == [("skips", "step 12: many skips"), ("slow", "step 12: rises")]


# ---- keeping the rest of a step


def keeping(**options):
    return SkipGuard(keep="all_but_guilty", **options)


@pytest.mark.parametrize("row", [NAN, SPIKE])
@pytest.mark.parametrize("options", [{}, {"max_consecutive": 1}], ids=["else skipped", "else a halt"])
def test_the_rest_of_a_step_is_kept_and_it_is_not_counted_as_skipped(row, options):
    guard = keeping(**options)
    step = MadeUp(guard, **row)
    assert settle(step) is Verdict.KEEP
    assert [each.row for each in step.left_out] == [1]
    assert (sum(guard.skips.values()), guard.consecutive, guard.trouble) == (0, 0, 0)
    step = MadeUp(guard)
    assert settle(step) is Verdict.APPLY
    assert (guard.kept_steps, guard.samples_left_out, guard.left_out) == (1, 1, 1)
    assert step.events("kept") == [("kept", 7, {"tick": 107, "left_out": 1, "loss": 2.0, "grad_norm": 0.5})]
    settle(MadeUp(guard))
    assert guard.left_out == 0


def test_bad_values_name_the_samples_without_a_run():
    step = MadeUp(keeping(), **BAD_DATA)
    step.bad = [{"index": 2, "what": "token 9"}, {"index": 3, "what": "token 9"}]
    assert settle(step) is Verdict.KEEP
    assert [each.row for each in step.left_out] == [2, 3]
    assert step.asked == []


@pytest.mark.parametrize("rows", [[], [None], [0, 1, 2]], ids=["none is named", "the whole batch", "most of it"])
def test_bad_data_of_most_of_the_step_is_skipped(rows):
    step = MadeUp(keeping(), **BAD_DATA)
    step.bad = [{"index": row, "what": "bad"} for row in rows]
    assert settle(step) is Verdict.SKIP


@pytest.mark.parametrize("guilty", [set(), {0, 1, 2}, {0, 1, 2, 3}], ids=["none", "most", "all"])
def test_a_step_of_which_no_few_samples_are_at_fault_is_skipped(guilty):
    step = MadeUp(keeping(), **NAN)
    step.guilty = guilty
    assert settle(step) is Verdict.SKIP
    assert len(step.asked) <= (1 if not guilty else 9 + 4 * 2)


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        ({"applied": False, "overflow": True, "loss_scale": 2.0}, Verdict.SKIP),
        (BAD_UPDATE_OF, Verdict.RESTORE),
        ({"applied": False, "state_changed": True}, Verdict.HALT),
        (WRONG, Verdict.SKIP),
    ],
    ids=["overflow", "update", "memory", "arithmetic"],
)
def test_faults_that_are_not_of_samples_are_never_answered_so(row, verdict):
    step = MadeUp(keeping(), **row)
    assert settle(step) is verdict
    assert step.asked == []


def test_a_fault_of_the_machine_comes_first():
    step = MadeUp(keeping(), **NAN)
    step.differs = True
    assert settle(step) is Verdict.RESTORE
    assert step.asked == []


def test_the_second_try_is_the_last_and_later_steps_of_a_row_are_not_searched():
    guard = keeping()
    assert settle(MadeUp(guard, **NAN)) is Verdict.KEEP
    second = MadeUp(guard, **NAN)
    assert settle(second) is Verdict.SKIP
    assert (second.asked, guard.kept_steps, guard.skips["nonfinite"]) == ([], 0, 1)
    later = MadeUp(guard, **NAN)
    assert settle(later) is Verdict.SKIP
    assert (later.asked, guard.skips["nonfinite"]) == ([], 2)


def test_a_rollback_undoes_no_count_of_samples():
    guard = RollbackGuard(keep="all_but_guilty")
    for step in (MadeUp(guard, **NAN), MadeUp(guard)):
        settle(step)
    counts, older = guard.cumulative_state(), RollbackGuard(keep="all_but_guilty")
    older.load_cumulative_state(counts)
    assert (older.kept_steps, older.samples_left_out) == (1, 1)
