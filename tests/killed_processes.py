"""Forks that are killed: at a moment, or at one of the calls that force, rename or remove a file. For POSIX."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def say(path: Path, line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def die_at_call(number: int) -> Callable[[], int]:
    """Let this process end itself at one of its calls from now on; gives how many there were so far."""
    calls = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace"):
        setattr(os, name, counted(getattr(os, name)))
    Path.unlink = counted(Path.unlink)
    return lambda: calls


def in_fork(run: Callable[[], None], kill_after: float, interval: float) -> bool:
    """Run in a fork that is killed after some seconds at the latest; whether it came to its end.

    Args:
        run: what the fork does.
        kill_after: seconds.
        interval: seconds from one look at the fork to the next.
    """
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    deadline = time.monotonic() + kill_after
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(interval)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
