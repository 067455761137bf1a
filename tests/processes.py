"""Start processes that train together, and never wait for them longer than said."""

from __future__ import annotations

import functools
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
    return _run("tests.processes", (module, *arguments), each, timeout, on_gpu)


def run_alone(module: str, *arguments: str, timeout: float = 90) -> Ended:
    """Run ``python -m module arguments`` in one process, which starts others itself."""
    return _run(module, arguments, [{"MASTER_PORT": str(_free_port())}], timeout, on_gpu=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(
    module: str, arguments: tuple[str, ...], variables: list[dict[str, str]], timeout: float, on_gpu: bool
) -> Ended:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(len(variables))]
        processes = []
        for log, each in zip(logs, variables, strict=True):
            with log.open("wb") as written:  # a file: a pipe that nobody reads would block
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**os.environ, **own, **each},
                        stdout=written,
                        stderr=subprocess.STDOUT,
                        start_new_session=os.name == "posix",
                    )
                )
        codes = [_wait(process, deadline) for process in processes]
        return Ended(codes, [log.read_text(errors="replace") for log in logs])


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)  # with what it started itself
        else:
            process.kill()
        process.wait()
        return None


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


if (
    __name__ == "__main__"
):  # one of several processes: runs the module, and leaves as soon as it has ended without error
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's destructors may abort where another process has left first
