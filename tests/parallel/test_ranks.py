"""A rank exits with its own code, whatever its remaining threads are doing."""

import pytest

from tests.parallel.launches import finish, start
from tests.runs import ROOT, TINY_GPT

pytestmark = pytest.mark.slow

DISTURBED = """
import atexit, runpy, sys, threading, time, torch

def work():
    a = torch.ones(100)
    while True:
        a + a  # needs the interpreter again after each sum, as a thread of gloo's does that lets a tensor go

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
threading.Thread(target=lambda: (threading.main_thread().join(), time.sleep(0.5), print("waited for"))).start()
atexit.register(print, "registered")
sys.stdout.reconfigure(line_buffering=False, write_through=False)  # torchrun starts ranks with `python -u`
"""
RUN = [*TINY_GPT, "steps=2", "forensics=off", "monitors=none", "checkpoint=off", "parallel=ddp"]
OVERRIDES = {
    0: [],
    2: ["steps=-1"],
    3: ["guard=skip", "faults=gradient", "faults.at=[1,2]", "guard.max_consecutive=1"],
}
"""What a run is told, by the code that it ends with."""


def ended(tmp_path, ending, *arguments):
    """torchrun with one rank, which threads of its own disturb, to its end."""
    script = tmp_path / "disturbed.py"
    script.write_text(f"{DISTURBED}sys.argv[0] = {str(ROOT / 'train.py')!r}\n{ending}\n")
    return finish(start(1, str(script), *arguments, cwd=tmp_path))


@pytest.mark.parametrize("code", [0, 2, 3])
def test_a_rank_ends_with_its_code_whatever_its_threads_do(tmp_path, code):
    done = ended(tmp_path, "runpy.run_path(sys.argv[0], run_name='__main__')", *RUN, *OVERRIDES[code])
    assert done.stdout.endswith("waited for\nregistered\n"), done.stdout + done.stderr
    assert done.returncode == (code > 0)
    assert code == 0 or f"exitcode  : {code} " in done.stderr, done.stderr


def test_pythons_own_end_does_not_survive_such_threads(tmp_path):
    """What the test above guards against: a race, so five tries. If none aborts, drop `exit_process`."""
    assert any("exitcode  : -6 " in ended(tmp_path, "sys.exit(0)").stderr for _ in range(5))
