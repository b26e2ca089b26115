"""`slurm/job.sh` with Slurm replaced by scripts: which exit codes requeue a job, and what its ranks are given."""

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.beside.slurm.stand_ins import stand_in
from tests.runs import ROOT

LIMIT = 200
"""Seconds after which a test counts as hung."""

SLURM = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}


def job(
    place,
    body,
    requeues=3,
    notice=30,
    processes=1,
    srun=(),
    avoided="(null)",
    refuses=1,
    node=("IDLE", "None"),
    **environment,
):
    """Starts a job whose rank is `body`; its requests to Slurm go to the file `asked`, its output to `said`."""
    stand_in(place, "srun", f'while [[ $1 == -* ]]; do echo "$1" >> {place}/srun_got; shift; done; exec "$@"')
    stand_in(place, "rank", body)
    stand_in(
        place,
        "scontrol",
        SCONTROL.format(asked=place / "asked", avoided=avoided, refuses=refuses, state=node[0], boot=node[1]),
    )
    if not (place / "sleep").exists():  # job.sh looks once a second whether its ranks have ended
        stand_in(place, "sleep", '[[ $1 == 1 ]] && set -- 0.02; exec /bin/sleep "$@"')
    stand_in(place, "scancel", f'echo scancel "$@" >> {place}/asked; exit 1')
    (place / "run" / "checkpoints" / "step-00000010").mkdir(parents=True, exist_ok=True)
    path = f"{place}:{os.environ['PATH']}"
    words = ["bash", str(ROOT / "slurm" / "job.sh"), "run", str(processes), str(requeues), str(notice)]
    own = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", *TRACES)}
    with (place / "said").open("a") as said:
        return subprocess.Popen(
            [*words, *srun, "--", "rank"], cwd=place, env={**own, **SLURM, "PATH": path, **environment}, stdout=said
        )


TRACES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

SCONTROL = """\
case "$1 $2" in
  "show hostnames") printf 'n1\\nn2\\n' ;;
  "show node")
    echo "NodeName=n2 Arch=x86_64 NodeAddr=10.1.0.2 NodeHostName=n2 State={state} ThreadsPerCore=1 BootTime={boot} X=1"
    echo "NodeName=n1 Arch=x86_64 NodeAddr=10.1.0.1 NodeHostName=n1 State=IDLE X=1 BootTime=2026-01-01T00:00:00 X=1" ;;
  "show job") echo "JobId=9 ReqNodeList=(null) ExcNodeList={avoided} NodeList=n1" ;;
  *) echo scontrol "$@" >> {asked}; exit {refuses} ;;
esac
"""
"""Stands for scontrol: knows two nodes, and writes every other request down."""


def asked(place):
    """Returns the distinct requests to Slurm."""
    file = place / "asked"
    return list(dict.fromkeys(file.read_text().splitlines())) if file.exists() else []


ENDS = {
    "finished": ("exit 0", 0, []),
    "failed": ("exit 1", 1, []),
    "refused": ("exit 2", 2, []),
    "halted": ("exit 3", 3, []),
    "saved": ("exit 75", 75, ["scontrol requeue 9"]),
    "killed": ("kill -9 $$", 137, []),
    "killed_later": ("mkdir run/checkpoints/step-00000020; kill -9 $$", 75, ["scontrol requeue 9"]),
    "ended": ("kill -TERM $$", 75, ["scontrol requeue 9"]),
    "failed_later": ("mkdir run/checkpoints/step-00000020; exit 1", 1, []),
}


@pytest.mark.slow(unless=lambda end: end in ("failed", "saved"))
@pytest.mark.parametrize("end", ENDS)
def test_only_an_interrupted_run_is_requeued(tmp_path, end):
    body, code, wanted = ENDS[end]
    assert job(tmp_path, body).wait(LIMIT) == code
    assert asked(tmp_path) == wanted


ENDED = "kill -TERM $$"
STEP = """echo '{"step": 5}' >> run/metrics.jsonl; """
SAVED = "mkdir run/checkpoints/step-00000020; "
ARM = "whatif/halt-00000009/lr_half"
FIRST_OF_ARM = f"""mkdir run/{ARM}_2; echo '{{"step": 4}}' >> run/{ARM}_2/metrics.jsonl; """
STEP_OF_ARM = f"""echo '{{"step": 5}}' >> run/{ARM}/metrics.jsonl; """
TAKEN = {"nothing": "", "step": STEP, "saved": SAVED, "arm": FIRST_OF_ARM, "step_of_arm": STEP_OF_ARM}


@pytest.mark.slow(unless=lambda taken: taken in ("", STEP, STEP_OF_ARM))
@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN)
def test_the_fourth_start_in_a_row_without_a_step_is_the_last(tmp_path, taken):
    (tmp_path / "run" / ARM).mkdir(parents=True)
    for folder in (tmp_path / "run", tmp_path / "run" / ARM):
        (folder / "metrics.jsonl").write_text('{"step": 4}\n')
    (tmp_path / "run" / "slurm.without_step").write_text("3\n")
    code = job(tmp_path, taken + ENDED, requeues=100, SLURM_RESTART_COUNT="7").wait(LIMIT)
    assert (code, asked(tmp_path)) == ((75, ["scontrol requeue 9"]) if taken else (143, []))
    assert (tmp_path / "run" / "slurm.without_step").exists() == (not taken)
    if not taken:
        assert "code 143; not queued again, 4 starts in a row ended before a step" in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_starts_without_a_step_are_counted_from_the_first_start_of_a_job(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurm.without_step").write_text("3\n")
    codes = [job(tmp_path, ENDED, requeues=100, SLURM_RESTART_COUNT=str(n)).wait(LIMIT) for n in range(4)]
    assert codes == [75, 75, 75, 143]


WRONG_CARD = "echo 'stabletrain: device=auto: a V100 ...' >&2; exit 4"


@pytest.mark.slow(unless=lambda avoided, wanted: avoided == "n[7-9]")
@pytest.mark.parametrize(("avoided", "wanted"), [("(null)", "n1"), ("n[7-9]", "n[7-9],n1")])
def test_a_node_whose_card_cannot_do_what_the_run_needs_is_avoided(tmp_path, avoided, wanted):
    stand_in(tmp_path, "sleep", "exit 0")  # does not wait until Slurm ends the script
    run = job(tmp_path, WRONG_CARD, avoided=avoided, refuses=0, SLURMD_NODENAME="n1")
    assert run.wait(LIMIT) == 75
    assert asked(tmp_path) == ["scontrol requeue 9", f"scontrol update JobId=9 ExcNodeList={wanted}"]
    said = (tmp_path / "said").read_text().splitlines()[-1]
    assert f"the card of n1 cannot do what the run needs, as the message above says; it avoids {wanted} from" in said
    assert not (tmp_path / "run" / "slurm.unsuited").exists()


KILLED = "mkdir run/checkpoints/step-$RANDOM$SECONDS$$; kill -9 $$"
AVOIDS = "the job avoids {} from now on (scontrol update JobId=9 ExcNodeList= allows them again); queued again"


def test_a_node_on_which_a_rank_was_killed_twice_is_avoided(tmp_path):
    stand_in(tmp_path, "sleep", "exit 0")  # does not wait until Slurm ends the script
    for node, wanted in (("n1", 1), ("n2", 2), ("n2", 4)):
        run = job(tmp_path, KILLED, avoided="n7", refuses=0, SLURMD_NODENAME=node)
        assert run.wait(LIMIT) == 75
        assert len((tmp_path / "asked").read_text().splitlines()) == wanted
    assert asked(tmp_path)[-1] == "scontrol update JobId=9 ExcNodeList=n7,n2"
    said = (tmp_path / "said").read_text().splitlines()[-1]
    assert f"n2 has failed this job twice: {AVOIDS.format('n7,n2')}" in said
    recorded = (tmp_path / "run" / "slurm.failed_nodes").read_text().splitlines()
    why = "a rank was killed or crashed there (code 137)"
    assert recorded == [f"9 n1 {why}", f"9 n2 {why}", f"9 n2 {why}"]
    assert not {file.name for file in (tmp_path / "run").iterdir()} & {"slurm.killed", "slurm.running"}


@pytest.mark.slow
def test_ranks_killed_on_two_nodes_are_the_fault_of_neither(tmp_path):
    assert job(tmp_path, f'echo "n2 137" >> "$STABLETRAIN_KILLED_ON"; {KILLED}').wait(LIMIT) == 75
    assert not (tmp_path / "run" / "slurm.failed_nodes").exists()


LOST = {
    "down": (("DOWN*+NOT_RESPONDING", "None"), "9", True),
    "started since": (("IDLE", "2026-05-01T10:00:00"), "9", True),
    "well": (("ALLOCATED", "2026-02-01T10:00:00"), "9", False),
    "of another job": (("DOWN", "None"), "8", False),
}


@pytest.mark.slow(unless=lambda case: case in ("started since", "well"))
@pytest.mark.parametrize("case", LOST)
def test_a_node_that_was_lost_twice_is_avoided_before_anything_starts(tmp_path, case):
    node, of, lost = LOST[case]
    stand_in(tmp_path, "sleep", "exit 0")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurm.failed_nodes").write_text("9 n2 it was lost during an earlier start\n8 n1 other\n")
    (tmp_path / "run" / "slurm.running").write_text(f"{of} 2026-04-01T10:00:00 n[1-2]\n")
    run = job(tmp_path, "touch run/trained", refuses=0, node=node, SLURM_RESTART_COUNT="1")
    assert run.wait(LIMIT) == (75 if lost else 0)
    assert asked(tmp_path) == (["scontrol requeue 9", "scontrol update JobId=9 ExcNodeList=n2"] if lost else [])
    assert (tmp_path / "run" / "trained").exists() != lost
    assert ("not started; n2 has failed this job twice: " in (tmp_path / "said").read_text()) == lost


def test_the_fourth_node_in_a_row_whose_card_cannot_do_it_ends_the_job(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurm.without_step").write_text("3\n")
    assert job(tmp_path, WRONG_CARD, requeues=100, SLURM_RESTART_COUNT="7", SLURMD_NODENAME="n1").wait(LIMIT) == 4
    assert asked(tmp_path) == []
    assert "code 4; not queued again, 4 starts in a row ended before a step" in (tmp_path / "said").read_text()


def test_a_task_of_an_array_queues_itself_again_and_not_the_array(tmp_path):
    job(tmp_path, "exit 75", SLURM_ARRAY_JOB_ID="9", SLURM_ARRAY_TASK_ID="4").wait(LIMIT)
    assert asked(tmp_path) == ["scontrol requeue 9_4"]


@pytest.mark.slow(unless=lambda restarts: restarts == "3")
@pytest.mark.parametrize(("restarts", "wanted"), [("2", ["scontrol requeue 9"]), ("3", [])])
def test_max_requeues_is_kept(tmp_path, restarts, wanted):
    run = job(tmp_path, "exit 75", SLURM_RESTART_COUNT=restarts)
    assert run.wait(LIMIT) == 75
    assert asked(tmp_path) == wanted
    assert ("--max-requeues is 3" in (tmp_path / "said").read_text()) == (not wanted)


def test_a_job_that_slurm_queued_too_often_does_not_train(tmp_path):
    assert job(tmp_path, "touch trained", SLURM_RESTART_COUNT="4").wait(LIMIT) == 75
    assert "not continued" in (tmp_path / "said").read_text()
    assert not (tmp_path / "trained").exists()


WAITING = "trap 'exit 75' TERM; echo $$ > up; for _ in {1..6000}; do sleep 0.1; done"
TOLD_TWICE = "echo $$ > up; for _ in {1..1000}; do (($(grep -c scancel asked) >= 2)) && exit 75; sleep 0.1; done"


def up(place):
    end = time.monotonic() + LIMIT
    while not ((place / "up").exists() and (place / "up").read_text().endswith("\n")):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_the_notice_is_passed_on_until_the_ranks_have_stopped(tmp_path):
    run = job(tmp_path, TOLD_TWICE, notice=10_000)
    up(tmp_path)
    run.send_signal(signal.SIGUSR2)
    assert run.wait(LIMIT) == 75
    assert asked(tmp_path) == ["scancel --quiet --signal=USR2 9", "scontrol requeue 9"]


@pytest.mark.slow
def test_ranks_that_do_not_stop_in_time_are_left_behind_and_the_job_queues_again(tmp_path):
    run = job(tmp_path, WAITING, notice=22)
    up(tmp_path)
    run.send_signal(signal.SIGUSR2)
    assert run.wait(LIMIT) == 75
    assert asked(tmp_path)[-1] == "scontrol requeue 9"
    assert "the ranks did not stop within" in (tmp_path / "said").read_text()
    os.kill(int((tmp_path / "up").read_text()), signal.SIGTERM)


def test_a_cancelled_job_does_not_queue_again_though_its_ranks_saved(tmp_path):
    run = job(tmp_path, WAITING)
    up(tmp_path)
    run.send_signal(signal.SIGTERM)
    os.kill(int((tmp_path / "up").read_text()), signal.SIGTERM)
    assert run.wait(LIMIT) == 75
    assert asked(tmp_path) == []


def test_a_rank_that_does_not_listen_yet_survives_the_notice(tmp_path):
    run = job(tmp_path, "kill -USR2 $$; exit 0")
    assert run.wait(LIMIT) == 0


def given(place, words, **options):
    """Returns what the command prints on the standard output within the rank of a job."""
    assert job(place, f"{words} > given", **options).wait(LIMIT) == 0
    return (place / "given").read_text().splitlines()


@pytest.mark.slow(unless=lambda processes, variables, threads: processes == 4 and threads != "1")
@pytest.mark.parametrize(
    ("processes", "variables", "threads"),
    [
        (4, {"SLURM_CPUS_PER_TASK": "32"}, "8"),
        (4, {"SLURM_CPUS_PER_TASK": "32", "OMP_NUM_THREADS": "3"}, "3"),
        (4, {"SLURM_CPUS_PER_TASK": "2"}, "1"),
        (1, {"SLURM_CPUS_PER_TASK": "8"}, "8"),
        (4, {}, ""),
    ],
    ids=["shared", "the user's", "too few", "one rank", "none requested"],
)
def test_a_rank_has_a_thread_for_each_of_its_cores(tmp_path, processes, variables, threads):
    assert given(tmp_path, "echo $OMP_NUM_THREADS", processes=processes, **variables) == [threads]


def test_ranks_may_open_as_many_files_as_the_node_allows(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        allowed, most = given(tmp_path, "(ulimit -Sn; ulimit -Hn)")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == most


def test_further_options_reach_srun(tmp_path):
    further = ["--container-mounts=/a b:/c", "--cpu-bind=cores"]
    assert given(tmp_path, "echo ran", srun=further) == ["ran"]
    got = (tmp_path / "srun_got").read_text().splitlines()
    assert got == ["--ntasks-per-node=1", "--kill-on-bad-exit=1", *further]


TWO_NODES = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}


def test_the_addresses_of_the_nodes_are_slurms_in_slurms_order(tmp_path):
    *options, addresses = given(tmp_path, "(printf '%s\\n' \"$@\"; echo $STABLETRAIN_NODE_ADDRESSES)", **TWO_NODES)
    assert addresses == "10.1.0.1,10.1.0.2"
    assert "--rdzv-endpoint=10.1.0.1:15009" in options
    assert "--nnodes=2" in options


LIMIT_OF_TORCHRUN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@pytest.mark.slow(unless=lambda notice, own, seconds: notice == 300)
@pytest.mark.parametrize(
    ("notice", "own", "seconds"), [(300, {}, "280"), (30, {}, "30"), (300, {LIMIT_OF_TORCHRUN: "7"}, "7")]
)
def test_torchrun_waits_for_a_save_as_long_as_the_notice_allows(tmp_path, notice, own, seconds):
    assert given(tmp_path, f"echo ${LIMIT_OF_TORCHRUN}", notice=notice, **TWO_NODES, **own) == [seconds]


@pytest.mark.parametrize(("written", "kept"), [("", False), ("0", True)], ids=["none", "some"])
def test_traces_of_nccl_go_to_the_run_folder_which_keeps_no_empty_folder(tmp_path, written, kept):
    prefix = tmp_path / "run" / "collectives" / "start-3-rank-"
    write = f'echo trace > "${{{TRACES[0]}}}{written}"; ' if written else ""
    assert given(tmp_path, f"{write}echo ${TRACES[0]}", **TWO_NODES, SLURM_RESTART_COUNT="2") == [str(prefix)]
    assert Path(f"{prefix}0").exists() == prefix.parent.exists() == kept


@pytest.mark.slow(unless=lambda name: name == TRACES[1])
@pytest.mark.parametrize("name", TRACES)
def test_traces_of_nccl_go_where_the_user_says(tmp_path, name):
    told = given(tmp_path, "echo " + " ".join(f"${each}" for each in TRACES), **TWO_NODES, **{name: "/mine"})
    assert told == ["/mine"]
    assert not (tmp_path / "run" / "collectives").exists()
