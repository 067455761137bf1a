"""Start processes that train together, and never wait for them longer than said.

Importing torch and lightning takes far longer than what most of them do, so they are forked from a copy that each
pytest process makes of itself before its first test: all is imported there, and no test has left a trace.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]


class Ended(NamedTuple):
    """How processes ended: their exit codes, None where one had to be killed, and what each wrote."""

    codes: list[int | None]
    outputs: list[str]


def run_ranks(module: str, *arguments: str, ranks: int = 2, timeout: float = 90, on_gpu: bool = False) -> Ended:
    """Run ``python -m module arguments`` in `ranks` processes that find each other, as torchrun starts them."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    shared |= {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    each = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return _run(module, arguments, each, timeout, on_gpu)


def run_alone(module: str, *arguments: str, timeout: float = 90) -> Ended:
    """Run ``python -m module arguments``, or the script of this path in the working directory, in one process."""
    return _run(module, arguments, [{"MASTER_PORT": str(_free_port())}], timeout, on_gpu=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(
    module: str, arguments: tuple[str, ...], variables: list[dict[str, str]], timeout: float, on_gpu: bool
) -> Ended:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    environments = [{**os.environ, **own, **each} for each in variables]
    if on_gpu or sys.platform != "linux":
        return _run_all("spawn", os.getcwd(), module, arguments, environments, timeout)
    try:
        copy_of_this_process().send(("fork", os.getcwd(), module, arguments, environments, timeout))
        return copy_of_this_process().recv()
    except BaseException:
        copy_of_this_process.cache_clear()  # what it answers later is not what the next caller asked for
        raise


@functools.cache
def copy_of_this_process() -> Connection:
    """What leads to a fork that runs what it is sent, until this process has ended."""
    here, there = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the threads of pytest-xdist are not missed there
        if os.fork() != 0:
            there.close()
            return here
    here.close()
    with contextlib.suppress(EOFError):
        while True:
            there.send(_run_all(*there.recv()))
    os._exit(0)


def _run_all(
    method: str,
    folder: str,
    module: str,
    arguments: tuple[str, ...],
    environments: list[dict[str, str]],
    timeout: float,
) -> Ended:
    """Run a module in a process for each environment."""
    os.chdir(folder)
    context = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory() as logs_folder:
        logs = [Path(logs_folder, str(rank)) for rank in range(len(environments))]
        processes = []
        for log, environment in zip(logs, environments, strict=True):
            log.touch()
            processes.append(context.Process(target=_run_module, args=(module, arguments, environment, str(log))))
            processes[-1].start()
        deadline = time.monotonic() + timeout
        codes = [_wait(process, deadline) for process in processes]
        return Ended(codes, [log.read_text(errors="replace") for log in logs])


def _run_module(module: str, arguments: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    """What ``python -m module arguments`` does, and python with a script; this process has imported most of it."""
    multiprocessing.set_start_method(None, force=True)  # what this process starts is started as usual
    if os.name == "posix":
        os.setsid()
    written = os.open(log, os.O_WRONLY | os.O_APPEND)  # a file: a pipe that nobody reads would block
    for descriptor in (1, 2, sys.stdout.fileno(), sys.stderr.fileno()):  # pytest has put streams of its own there
        os.dup2(written, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    warnings.resetwarnings()
    from lightning.pytorch.utilities import rank_zero_only

    from tests.startup import look_once

    look_once()
    if not environment["CUDA_VISIBLE_DEVICES"]:
        torch.cuda._is_in_bad_fork = lambda: False  # the process that was forked has looked for devices, no more
    rank_zero_only.rank = int(environment.get("RANK", 0))  # lightning reads it when it is imported
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        sys.path.insert(0, os.path.dirname(module))
        runpy.run_path(module, run_name="__main__")
    else:
        warnings.simplefilter("ignore")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's destructors may abort where another process has left first


def _wait(process: multiprocessing.process.BaseProcess, deadline: float) -> int | None:
    process.join(max(0.0, deadline - time.monotonic()))
    code = process.exitcode
    if code is None:
        with contextlib.suppress(ProcessLookupError):  # a process that has come no further than its start
            if os.name == "posix":
                os.killpg(process.pid, signal.SIGKILL)  # with what it started itself
        process.kill()
        process.join()
    process.close()
    return code


def saved_by_ranks(ended: Ended, folder: Path, ranks: int = 2) -> Callable[[str], list[Any]]:
    """What each rank saved of a run as ``<name>.<rank>.pt``, by the run's name; fails where it is not there."""

    @functools.cache
    def saved(name: str) -> list[Any]:
        files = [folder / f"{name}.{rank}.pt" for rank in range(ranks)]
        if not all(file.exists() for file in files):
            said = "\n".join(output[-3000:] for output in ended.outputs)
            pytest.fail(f"{name!r} or a run before it did not end; exit codes {ended.codes}\n{said}")
        return [torch.load(file, weights_only=False) for file in files]

    return saved
