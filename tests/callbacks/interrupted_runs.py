"""Fits that Ctrl-C interrupts, from another thread and somewhere in the middle, and what is left of them.

Run as ``python -m tests.callbacks.interrupted_runs``.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading

import torch

from lightning_persample import PerSampleGradientMonitor
from tests.callbacks.runs import Recorder, make_trainer
from tests.callbacks.ways import Classifier, Manual, traces


class Interrupts(Recorder):
    """Sends the signal a little after the fifth step."""

    def on_per_sample_gradients(self, *args):
        super().on_per_sample_gradients(*args)
        if len(self.records) == 5:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()


def main() -> None:
    torch.set_num_threads(1)
    logging.disable()  # whichever of the names of Lightning was imported last
    for kind in (Classifier, Manual):
        module, plain = kind(False), kind(False)
        callback, ended = Interrupts(1, quantities=("sq_norm", "grad_sample")), "by itself"
        make_trainer([], max_epochs=1).fit(plain)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # an interrupted Trainer ignores further ones
        try:
            make_trainer([callback, PerSampleGradientMonitor(1)], max_epochs=-1).fit(module)
        except SystemExit:
            ended = "SystemExit"
        modes = len(torch.overrides._get_current_function_mode_stack())
        again = Recorder(1)
        same = traces(module) == traces(plain)
        make_trainer([again], max_epochs=1).fit(module)
        print(json.dumps([ended, same, modes, len(again.records)]), flush=True)


if __name__ == "__main__":
    main()
