"""Arms as a Slurm array: the bits of this process, submitted once, cancelled by Ctrl-C, and told if they fail.

Functions stand for Slurm here, and for its tasks where only the order of things matters;
`tests/beside/slurm/test_array_on_slurm.py` has the same on a real one.
"""

import json
import signal

import pytest
import torch

from stabletrain.beside.whatif import arm_run, array, rounds
from stabletrain.beside.whatif.arm_run import ArmRun, read_arm_run, run_arm
from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.base import read_base
from stabletrain.beside.whatif.rounds import run_arms
from stabletrain.errors import ConfigError, Interrupted, StabletrainError
from tests.beside.whatif.test_rounds import SLOWER, losses

ARMS = [Arm("nothing"), SLOWER, Arm("optimizer.lr=1e-3,zloss=palm", ("optimizer.lr=1e-3", "zloss=palm"), named="you")]


def arm_runs_of(run, place, stop=62, arms=ARMS):
    start = run / "checkpoints" / "step-00000060"
    return [ArmRun(read_base(run, 60), arm, start, place / arm.folder, stop) for arm in arms]


def end_arm(run, live):
    """Stands for `run_arm`: leaves the record of an arm that is over."""
    record = json.loads((run.start.parent.parent / "run.json").read_text())
    record |= {"status": "preempted", "final": {**record["final"], "steps": run.stop}}
    run.folder.mkdir(exist_ok=True)
    (run.folder / "run.json").write_text(json.dumps(record))


class Queue:
    """Stands for Slurm: tells for each question the states that are next, and ends tasks when they are COMPLETED.

    Attributes:
        perform: runs the arm of a task.
        arrays: the scripts that were submitted.
        cancelled: the numbers of cancelled arrays.
        answers: what to answer to the next questions: task to state, or an error; the last one stays.
    """

    def __init__(self, *answers):
        self.arrays, self.cancelled, self.answers, self.done = [], [], [*answers], set()
        self.perform = end_arm

    def sbatch(self, script):
        self.arrays.append(script.parent)
        return str(len(self.arrays))

    def scancel(self, job):
        self.cancelled.append(job)
        self.answers = [{}]

    def states(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer()
        for (job, task), state in answer.items():
            if state == "COMPLETED" and (job, task) not in self.done:
                self.done.add((job, task))
                self.perform(read_arm_run(self.arrays[int(job) - 1] / str(task) / "arm_run.json")[0], live=False)
        return answer

    def script(self, folder, arms):
        return f"{folder} {len(arms)}\n"


def all_tasks(state, job="1", count=3):
    return {(job, task): state for task in range(count)}


@pytest.fixture
def queue(monkeypatch):
    """A stand-in for Slurm, asked without pauses."""
    made = Queue()
    for name in ("sbatch", "scancel", "states"):
        monkeypatch.setattr(array, name, getattr(made, name))
    monkeypatch.setattr(array, "POLL_S", 0.0)
    monkeypatch.setattr(array, "FAILED_AFTER_S", 0.05)
    monkeypatch.setattr(array, "VISIBLE_AFTER_S", 0.1)
    return made


def ran(runs, queue, *answers):
    queue.answers, told = [*answers], []
    run_arms(runs, 1, lambda run: told.append(run.arm.name), queue)
    return told


@pytest.mark.slow
def test_the_tasks_of_an_array_compute_what_this_process_does(shared_run, tmp_path, queue, capsys):
    queue.perform, arms = run_arm, ARMS[1:]
    runs = arm_runs_of(shared_run, tmp_path / "there", arms=arms)
    told = ran(runs, queue, {}, *(all_tasks(state, count=2) for state in ("PENDING", "RUNNING", "COMPLETED")))
    assert told == [arm.name for arm in arms]
    here = arm_runs_of(shared_run, tmp_path / "here", arms=arms)
    run_arms(here, 1, lambda run: None)
    assert [losses(run.folder) for run in runs] == [losses(run.folder) for run in here]
    place = tmp_path / "there" / "slurm" / "000"
    assert queue.arrays == [place]
    assert (place / "slurm.sh").read_text() == f"{place} 2\n"
    assert f"array    1, 2 tasks, logs {place}/<n>/slurm.log; Ctrl-C cancels it\n" in capsys.readouterr().out
    assert not (place / "array.json").exists(), "nothing is left to wait for"
    assert ran(runs, queue, {}) == told, "those that are over are not submitted again"
    assert len(queue.arrays) == 1


def test_a_task_computes_with_the_threads_of_the_process_that_submits(shared_run, tmp_path, queue, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    ran(arm_runs_of(shared_run, tmp_path, arms=ARMS[:1]), queue, {}, all_tasks("COMPLETED", count=1))
    run, threads = read_arm_run(tmp_path / "slurm" / "000" / "0" / "arm_run.json")
    assert threads == 7
    monkeypatch.undo()
    used = []
    monkeypatch.setattr(arm_run, "run_arm", lambda run, live: used.append(torch.get_num_threads()))
    try:
        arm_run.run_in_process(run, 2)
    finally:
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert used == [2]


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "", "COMPLETED"])
def test_an_arm_whose_task_fails_is_told_with_its_log_and_the_others_go_on(
    shared_run, tmp_path, queue, capsys, monkeypatch, state
):
    monkeypatch.setattr(queue, "done", {("1", 1)})  # which writes nothing
    runs = arm_runs_of(shared_run, tmp_path)
    wrong = {("1", 0): "RUNNING", ("1", 1): state, ("1", 2): "RUNNING"}

    def until_told():
        return wrong if "ended as" not in said() else {**all_tasks("COMPLETED"), ("1", 1): state}

    shown = []

    def said():
        shown.append(capsys.readouterr().out)
        return "".join(shown)

    told = []
    queue.answers = [until_told]
    with pytest.raises(StabletrainError) as raised:
        run_arms(runs, 1, lambda run: told.append(run.arm.name), queue)
    log = tmp_path / "slurm" / "000" / "1" / "slurm.log"
    assert f"the arm lr_half ended as {state or 'unknown to Slurm'}, its log is {log}" in str(raised.value)
    assert "fix: type the command again, or leave the arm out" in str(raised.value)
    assert told == ["nothing", ARMS[2].name]


def test_a_task_that_slurm_requeues_has_not_failed(shared_run, tmp_path, queue):
    failed = [all_tasks("NODE_FAIL", count=1)]
    runs = arm_runs_of(shared_run, tmp_path, arms=ARMS[:1])
    told = ran(runs, queue, *failed, all_tasks("PENDING", count=1), *failed, all_tasks("COMPLETED", count=1))
    assert told == ["nothing"]


def test_a_squeue_that_does_not_answer_is_waited_for(shared_run, tmp_path, queue, capsys):
    def silent():
        raise StabletrainError("Unable to contact slurm controller")

    runs = arm_runs_of(shared_run, tmp_path, arms=ARMS[:1])
    assert ran(runs, queue, silent, silent, all_tasks("COMPLETED", count=1)) == ["nothing"]
    said = "squeue does not answer (Unable to contact slurm controller): the array goes on, and this command waits\n"
    assert capsys.readouterr().out.count(said) == 1


def test_an_arm_that_cannot_be_built_is_told(shared_run, tmp_path, queue):
    queue.perform = run_arm
    runs = arm_runs_of(shared_run, tmp_path, arms=[Arm("model", ("model=gpt_mini",))])
    assert ran(runs, queue, all_tasks("COMPLETED", count=1)) == ["model"]
    assert "model=gpt_mini" in (tmp_path / "model" / "refused.txt").read_text()


def test_a_reason_of_an_earlier_call_is_not_taken_for_the_end_of_a_task(shared_run, tmp_path, queue):
    [run] = arm_runs_of(shared_run, tmp_path, arms=ARMS[:1])
    run.folder.mkdir()
    (run.folder / "refused.txt").write_text("no memory\n")
    with pytest.raises(StabletrainError, match="the arm nothing ended as FAILED"):
        ran([run], queue, all_tasks("FAILED", count=1))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_cancels_the_array_and_the_same_command_goes_on(shared_run, tmp_path, queue, name, capsys):
    runs = arm_runs_of(shared_run, tmp_path)

    def signalled():
        signal.raise_signal(getattr(signal, name))
        return all_tasks("RUNNING")

    with pytest.raises(Interrupted, match=f"{name}: the array was cancelled"):
        ran(runs, queue, all_tasks("RUNNING"), signalled)
    assert queue.cancelled == ["1"]
    assert "array    1 is cancelled: waits until the arms have saved their states\n" in capsys.readouterr().out
    # It is still ending when the command is typed again: two processes must not write into one folder.
    ending = all_tasks("COMPLETING")
    assert json.loads((tmp_path / "slurm" / "000" / "array.json").read_text())["cancelled"]
    looks = [ending, ending, all_tasks("CANCELLED"), all_tasks("COMPLETED", "2")]
    queue.done = set(all_tasks("CANCELLED"))
    assert ran(runs, queue, *looks) == [arm.name for arm in ARMS]
    assert [each.name for each in queue.arrays] == ["000", "001"]


def submitted(runs, queue):
    """Leaves an array in the queue, as a command does that is killed."""
    return array.submit(runs, queue, runs[0].folder.parent / "slurm")


def test_an_array_that_still_runs_is_found_and_only_other_arms_are_submitted(shared_run, tmp_path, queue, capsys):
    runs = arm_runs_of(shared_run, tmp_path)
    submitted(runs[:2], queue)
    two = all_tasks("RUNNING", count=2)
    told = ran(runs, queue, two, two, all_tasks("COMPLETED", count=2) | {("2", 0): "COMPLETED"})
    assert sorted(told) == sorted(arm.name for arm in ARMS)
    assert "array    1 still runs 2 of the arms: waits for it\n" in capsys.readouterr().out
    assert read_arm_run(queue.arrays[1] / "0" / "arm_run.json")[0] == runs[2]
    assert len(queue.arrays) == 2
    assert not (queue.arrays[1] / "1").exists()


def test_an_array_that_goes_to_another_step_has_to_end_first(shared_run, tmp_path, queue):
    submitted(arm_runs_of(shared_run, tmp_path, stop=62), queue)
    runs, order = arm_runs_of(shared_run, tmp_path, stop=66), []

    def last_look():
        order.append(len(queue.arrays))
        return all_tasks("COMPLETED")

    assert ran(runs, queue, all_tasks("RUNNING"), all_tasks("RUNNING"), last_look, all_tasks("COMPLETED", "2"))
    assert order == [1]
    assert all(run.over for run in runs)


def test_no_other_process_runs_an_arm_of_an_array(shared_run, tmp_path, queue, monkeypatch):
    monkeypatch.setattr(rounds, "run_arm", end_arm)
    runs = arm_runs_of(shared_run, tmp_path, arms=ARMS[:1])
    submitted(runs, queue)
    queue.answers = [all_tasks("PENDING", count=1)]
    with pytest.raises(ConfigError, match="array 1 still runs 1 of the arms; fix: add --slurm, .* scancel 1"):
        run_arms(runs, 1, lambda run: None)

    def silent():
        raise StabletrainError("squeue: No such file or directory")

    queue.answers = [silent]
    with pytest.raises(ConfigError, match=r"Slurm does not say \(squeue: No such .*\); fix: .* delete .*array.json"):
        run_arms(runs, 1, lambda run: None)
    queue.answers = [{}]
    run_arms(runs, 1, lambda run: None)
    assert runs[0].over


def test_what_sbatch_refuses_is_told_with_the_script(shared_run, tmp_path, queue, monkeypatch):
    def refusing(script):
        raise StabletrainError("invalid partition")

    monkeypatch.setattr(array, "sbatch", refusing)
    with pytest.raises(
        StabletrainError, match=r"sbatch refused the array: invalid partition; its script is .*slurm.sh"
    ):
        ran(arm_runs_of(shared_run, tmp_path), queue, {})
    assert not list(tmp_path.glob("slurm/*/array.json"))
