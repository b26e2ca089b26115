"""The fast and slow tiers, and that a fork of the server behaves like a fresh process."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError

from stabletrain.machine.hardware import devices
from stabletrain.stability.objective.cross_entropy import NoZLoss, z_loss
from tests import forkserver, typechecks
from tests.conftest import is_slow
from tests.runs import python


@pytest.mark.slow(unless=lambda number: number < 2)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_condition_keeps_some_cases_fast(request, number):
    assert is_slow(request.node) == (number == 2)
    if not request.config.getoption("--all"):
        assert is_slow(request.node) == request.config.getoption("--slow")


def test_types_and_shapes_are_checked_with_the_option_types_alone(request):
    checked = request.config.getoption("--types")
    zero, one, logits, targets = torch.zeros(()), torch.tensor(1), torch.zeros(2, 3), torch.tensor([0, 1, 2])
    wrong_type, wrong_shape = lambda: devices("1"), lambda: z_loss(torch.zeros(2, 3, 4), 0.1)
    other_length = lambda: NoZLoss().add(zero, logits, targets, one)  # noqa: E731
    for call in (wrong_type, wrong_shape, other_length):
        with pytest.raises((BeartypeCallHintViolation, TypeCheckError)) if checked else nullcontext():
            call()


def test_a_function_inside_another_is_checked_the_first_times_that_it_is_defined():
    def define():
        def half(number: int) -> float:
            return number / 2

        return typechecks.jaxtyped_where_shapes_are(half, typechecker=typechecks.typechecked)

    *checked, unchecked = [define() for _ in range(typechecks.MAX_DEFINED + 1)]
    for half in checked:
        with pytest.raises(BeartypeCallHintViolation):
            half(1.5)
    assert unchecked(1.5) == 0.75


SCRIPT = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["MINE"], file=sys.stderr)
print("said", flush=True)
{end}
"""
ENDS = {
    "pass": 0,
    "raise SystemExit(3)": 3,
    "sys.exit()": 0,
    "sys.exit('why')": 1,
    "raise ValueError('why')": 1,
    "import signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_as_a_fresh_interpreter_does(tmp_path, end):
    words = ["-c", SCRIPT.format(end=end), "a", "b c"]
    fresh = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env={**os.environ, "MINE": "x"}, capture_output=True, text=True
    )
    forked = python(*words, cwd=tmp_path, torch=False, MINE="x")
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout) == (ENDS[end], "said\n")
    assert forked.stderr.splitlines()[0] == fresh.stderr.splitlines()[0]
    assert forked.stderr.splitlines()[-1] == fresh.stderr.splitlines()[-1]


STATE = """
import gc, logging, os, signal, sys
import torch
from hydra.core.global_hydra import GlobalHydra
from stabletrain.cli import train

print(torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads())
print(torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
print(torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision())
print(sorted((int(number), str(signal.getsignal(number))) for number in signal.valid_signals()))
print(GlobalHydra.instance().is_initialized(), logging.root.handlers, logging.root.level)
print(sorted(os.environ.items()), sys.flags, gc.isenabled(), gc.get_threshold())
print(sys.excepthook, sys.getrecursionlimit(), os.getcwd(), sys.argv)
"""


def test_a_fork_begins_as_a_fresh_process_though_the_server_has_trained(tmp_path):
    (tmp_path / "state.py").write_text(STATE)
    words = ["state.py", "a"]
    mine = python(*words, cwd=tmp_path)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    fresh = subprocess.run([sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (mine.returncode, fresh.returncode) == (0, 0), mine.stderr + fresh.stderr
    assert mine.stdout.splitlines() == fresh.stdout.splitlines()


def test_a_fork_that_is_killed_is_gone(tmp_path):
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); os.rename('pid', 'there'); time.sleep(600)"
    forked = forkserver.start(["-c", code], tmp_path, os.environ, tmp_path / "out", tmp_path / "err", "command line")
    while not (tmp_path / "there").exists():
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        forked.wait(0.1)
    forked.kill()
    assert forked.pid == int((tmp_path / "there").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(forked.pid, 0)


IGNORES = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("there", "w").close()
while not os.path.exists("end"):
    time.sleep(0.01)
os._exit(75)
"""


def test_a_signal_at_the_end_of_a_command_does_not_change_how_its_client_ends(tmp_path):
    process = subprocess.Popen([forkserver.python(), "-c", IGNORES], cwd=tmp_path)
    while not ((tmp_path / "there").exists() and waits_for(process.pid, signal.SIGTERM)):
        time.sleep(0.01)
    (tmp_path / "end").touch()
    while process.poll() is None:
        process.terminate()
    assert process.returncode == 75


def waits_for(pid, number):
    """Whether a process blocks a signal, so that one of its threads can wait for it."""
    [blocked] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk:")]
    return bool(int(blocked.split()[1], 16) >> (number - 1) & 1)


def test_a_client_has_the_signals_that_it_ignores_ignored_and_passes_the_others_on(tmp_path):
    code = "import signal, time; before = [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGUSR2)]"
    code += "; signal.signal(signal.SIGUSR1, lambda *_: exit(7)); print(*before, flush=True); time.sleep(60)"
    words = ["bash", "-c", 'trap "" USR2; exec "$@"', "bash", forkserver.python(), "-c", code]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "0 1\n"
        while not waits_for(process.pid, signal.SIGUSR1):
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGUSR1)
    assert process.returncode == 7
