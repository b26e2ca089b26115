"""`python` for processes that a test does not start itself: runs a command in a fork of the tests' server.

    python -S -E tests/forkclient.py SOCKET argv...      as `python argv...`, without the seconds of its imports

The command has this process's folder, variables, ignored signals, input, output and errors. Signals are passed on to
it, it ends with this process, and this process ends as it does: with its exit code, or by its signal.
`tests/forkserver.py` has the other side, and `shims` there puts it in place of `python`, `torchrun` and `stabletrain`.
Imports nothing that takes time to import.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading

PASSED_ON = {
    **{number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)},
    **{number: number for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)},
    signal.SIGTSTP: signal.SIGSTOP,  # Slurm suspends with the first, and with the second a moment later
}
"""Signals that this process receives, and which of them its command receives for it."""


def main(address: str, *argv: str) -> None:
    """Runs `python argv...` in a fork, and ends as it does."""
    options = [word for word in argv[:1] if word == "-u"]
    argv = argv[len(options) :]
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-m", "-c")):  # an option that a fork cannot have
        os.execv(sys.executable, [sys.executable, *options, *argv])
    environment = {**os.environ, **({"PYTHONUNBUFFERED": "1"} if options else {})}
    told = {"argv": argv, "cwd": os.getcwd(), "environment": environment, "tied": True}
    told["ignored"] = [int(number) for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # they wait for `pass_on`, and change nothing at the end
    request = json.dumps(told).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    connection.sendall(len(request).to_bytes(4, "big"))
    socket.send_fds(connection, [b"f"], [0, 1, 2])
    connection.sendall(request)
    answers = connection.makefile("r")
    pid = int(answers.readline())
    with open("/proc/self/comm", "w") as comm:  # for `command_of`; with a space, Slurm would not know it
        comm.write(f"fork-{pid}")
    threading.Thread(target=pass_on, args=(pid,), daemon=True).start()
    code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os._exit(code)


def pass_on(pid: int) -> None:
    """Passes each signal on to the command."""
    while True:
        number = signal.sigwait(PASSED_ON)
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, PASSED_ON[number])


if __name__ == "__main__":
    main(*sys.argv[1:])
