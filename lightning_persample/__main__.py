"""The command ``lightning-persample``: what is slow to import waits until the arguments are read."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(
        "lightning-persample", description="Per-sample gradients of PyTorch Lightning runs."
    )
    command = parser.add_subparsers(required=True, metavar="command").add_parser(
        "report", help="write one page on a run", description="Write one page on a run, which opens without a network."
    )
    command.add_argument("dirpaths", nargs="+", metavar="RUN_DIR", help="folders of one run: its ledger, its logs")
    command.add_argument("--out", default="report.html", help="the file to write (default: report.html)")
    command.add_argument("--render", metavar="MODULE:FUNCTION", help="a function of a sample's index: an image or text")
    command.add_argument("--labels", metavar="MODULE:NAME", help="a dict of further columns of the table by name")
    command.add_argument(
        "-k", type=int, default=25, help="samples with the largest and the smallest norms (default: 25)"
    )
    command.add_argument("--title", help="of the page (default: the folder's name)")
    options = parser.parse_args(arguments)
    from lightning_persample.errors import PerSampleError
    from lightning_persample.influence.report import report

    try:
        render = _imported("--render", options.render, callable, "MODULE:FUNCTION, a function that can be imported")
        labels = _imported("--labels", options.labels, _is_mapping, "MODULE:NAME, a dict that can be imported")
        shown = {"render": render, "labels": labels, "k": options.k, "title": options.title}
        written = report(*options.dirpaths, out=options.out, **shown)
    except (PerSampleError, OSError, ModuleNotFoundError) as error:
        sys.stderr.write(f"lightning-persample: {error}\n")
        return 1
    sys.stdout.write(f"{written} ({written.stat().st_size / 1e6:.1f} MB)\n")
    return 0


def _imported(option: str, name: str | None, is_allowed: Callable[[Any], bool], allowed: str) -> Any:
    """What has this name in a module, which may lie in the working directory; None without a name."""
    from lightning_persample.options import check_option

    if name is None:
        return None
    module, _, member = name.partition(":")
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), member, None) if module and member else None
    check_option(option, name, is_allowed(found), allowed)
    return found


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


if __name__ == "__main__":
    sys.exit(main())
