"""A folder of rows: its manifest, files that are whole or not there, who writes, what is missing, how a run goes on."""

from __future__ import annotations

import json
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from pickle import UnpicklingError
from tokenize import TokenError
from typing import IO, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_persample.errors import OptionError, PerSampleError

UNFINISHED = (
    "its fit goes on, was killed, or had no room on the disk: wait for its end, or go on from a checkpoint with "
    "trainer.fit(..., ckpt_path=...)"
)
# What reads folders of Parquet files passes over names that begin with an underscore.
MANIFEST = "_manifest.json"
GRADIENTS = "_gradients"  # the store of gradients in a ledger's folder
_PARTIAL = re.compile(r"\.((rows|shard)-[\d-]+\.(parquet|npy)|_manifest\.json)\.tmp")
_KINDS: dict[str, Any] = {  # of the values of a manifest
    "run": str,
    "columns": (list, dict),
    "parameters": list,
    "settings": dict,
    "libraries": dict,
    "processes": int,
    "rows": (int, type(None)),
    "samples": (int, type(None)),
    "projection": (dict, type(None)),
    "checkpoints": list,
}
_ELSEWHERE = {
    "ledger": "{dirpath!r} is a ledger and no store of gradients: its gradients, if it was written with `projection`, "
    "are in {inside!r}; its rows are read with read_ledger",
    "gradients": "{dirpath!r} is a store of gradients and no ledger: open it with GradientStore; its ledger, if it was "
    f"written during training as the folder {GRADIENTS!r} of one, is in {{outside!r}}",
}

# What readers of JSON, Parquet, numpy (it tokenizes a header) and torch raise of content that is not theirs.
_BROKEN = (
    ValueError,
    EOFError,
    LookupError,
    OverflowError,
    TypeError,
    AttributeError,
    OSError,
    RuntimeError,
    UnpicklingError,
    TokenError,
)


@contextmanager
def _written_atomically(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there as a whole, or as it was before; its name is not forced to the disk yet."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):  # what went wrong first is what is raised
            partial.unlink()
        raise


def write_atomically(path: Path, *contents: Any) -> None:
    """Write a file as a whole, or leave it as it was before; its name is not forced to the disk yet."""
    with _written_atomically(path) as file:
        for content in contents:
            file.write(content)


def as_bytes(checksum: int) -> bytes:
    """A checksum as files have it."""
    return checksum.to_bytes(4, "little")


class _Checksummed:
    """Writes to a file, and keeps the checksum; what torch makes of an error of the system says nothing of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.checksum = file, 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        if self.error is None:
            try:
                self.file.write(content)
            except OSError as error:  # raised when torch is through
                self.error = error
        self.checksum = zlib.crc32(content, self.checksum)
        return memoryview(content).nbytes

    def flush(self) -> None:
        """Nothing: the file is flushed at its end."""


def save_values(path: Path, kind: str, values: Mapping[str, Any]) -> None:
    """Write tensors and plain values to one file, with their checksum; it is there as a whole, or as it was before."""
    try:
        with _written_atomically(path) as file:
            checked = _Checksummed(file)
            torch.save({"format": f"lightning_persample {kind}", **values}, checked)  # type: ignore[arg-type]  # needs no more
            if checked.error is not None:
                raise checked.error
            file.write(as_bytes(checked.checksum))
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def load_values(path: Path, kind: str, remedy: str) -> dict[str, Any]:
    """What `save_values` has written."""
    with broken_files_named(path, remedy):
        _check_values(path)
        values: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        named, expected = values.pop("format"), f"lightning_persample {kind}"
    if named != expected:
        raise PerSampleError(f"{os.fspath(path)!r} is of format {named!r}, but is to be read as {expected!r}")
    return values


def _check_values(path: Path) -> None:
    found, left = 0, path.stat().st_size - 4
    with path.open("rb") as file:
        while content := file.read(min(max(left, 0), 1 << 20)):
            found, left = zlib.crc32(content, found), left - len(content)
        if file.read() != as_bytes(found):
            raise ValueError("the checksum is another one")


def force_names(dirpath: Path) -> None:
    """Force the names in a folder to the disk, where a system lets a folder be opened."""
    if os.name == "posix":
        folder = os.open(dirpath, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def broken_files_named(path: Path, remedy: str = "write the folder again") -> Iterator[None]:
    """Name the file that cannot be decoded, or lacks what is asked of it; one that is absent stays so."""
    try:
        yield
    except _BROKEN as error:
        # of the system; pyarrow's own have no number
        if isinstance(error, OSError) and error.errno is not None and not path.is_dir():
            raise
        raise PerSampleError(
            f"{os.fspath(path)!r} is broken: it is no whole file of its kind (cut off, or changed by something else). "
            f"Put it back from a copy, or {remedy}"
        ) from error


@dataclass(frozen=True)
class BaseManifest:
    """What the manifests of ledgers and of stores of gradients have in common."""

    run: str
    _: KW_ONLY
    settings: Mapping[str, Any] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    rows: int | None = None


class Part(NamedTuple):
    """A file of rows that one process wrote at once, by its rank and their order."""

    rank: int
    counter: int
    path: Path


M = TypeVar("M", bound=BaseManifest)


class Dataset(ABC, Generic[M]):
    """A folder of parts and a manifest; of several processes one alone opens it, and each writes parts."""

    manifest_type: ClassVar[type[Any]]
    kind: ClassVar[str]  # in the manifest
    version: ClassVar[int]
    title: ClassVar[str]  # in texts
    rows_are: ClassVar[str]
    prefix: ClassVar[str]  # of the names of files
    suffix: ClassVar[str]

    def __init__(self, dirpath: str | os.PathLike[str]) -> None:
        self.dirpath = Path(dirpath)
        self.run: str | None = None  # of the manifest; None before it is known

    def checksum(self, part: Part, content: Any) -> bytes:
        """The checksum of what a part says of its rows, and of which part of which run it is."""
        run = self.manifest().run if self.run is None else self.run
        return as_bytes(zlib.crc32(content, zlib.crc32(f"{run} {part.rank} {part.counter}".encode())))

    @abstractmethod
    def _steps(self, part: Part) -> NDArray[np.int64]:
        """The step of each row of a part, (rows,)."""

    @abstractmethod
    def _keep(self, part: Part, kept: NDArray[np.bool_]) -> None:
        """Leave some rows of a part, (rows,)."""

    @abstractmethod
    def write(self, part: Part, rows: Any) -> None:
        """Write a part."""

    @abstractmethod
    def _difference(self, there: M, new: M) -> tuple[str, str] | None:
        """Where the rows of two manifests are not of the same values."""

    @abstractmethod
    def _continued(self, there: M, new: M) -> M:
        """The manifest of rows that go on with those that are there."""

    def _restored(self, values: dict[str, Any]) -> M:
        """The manifest with these values, in which a tuple is a list and a dataclass a dict."""
        return self.manifest_type(**{each.name: values[each.name] for each in fields(self.manifest_type)})

    # The manifest

    def manifest(self) -> M:
        """The manifest; a folder without one, or with one of another format, is refused."""
        manifest = self.manifest_if_there()
        if manifest is None:
            why = f"{MANIFEST} is missing" if self.dirpath.is_dir() else f"there is no folder {self.dirpath.absolute()}"
            raise PerSampleError(f"{os.fspath(self.dirpath)!r} holds no {self.title}: {why}")
        return manifest

    def manifest_if_there(self) -> M | None:
        """The manifest; None without one."""
        path = self.dirpath / MANIFEST
        if not path.is_file():
            return None
        with broken_files_named(path):
            values = json.loads(path.read_text(encoding="utf-8"))
        named = (values.get("format"), values.get("format_version")) if isinstance(values, dict) else (None, None)
        expected = f"lightning_persample {self.kind}"
        for kind, text in _ELSEWHERE.items():
            if kind != self.kind and named[0] == f"lightning_persample {kind}":
                places = {"dirpath": self.dirpath, "inside": self.dirpath / GRADIENTS, "outside": self.dirpath.parent}
                raise PerSampleError(text.format(**{name: os.fspath(place) for name, place in places.items()}))
        if named != (expected, self.version):
            raise PerSampleError(
                f"{os.fspath(path)!r} is of format {named[0]!r}, version {named[1]!r}; this version of "
                f"lightning_persample reads format {expected!r}, version {self.version}: read the folder with the "
                "version that wrote it, or write to another one"
            )
        with broken_files_named(path):
            for name, kinds in _KINDS.items():
                if name in values and not isinstance(values[name], kinds):
                    raise TypeError(name)
            manifest = self._restored({"rows": None, **values})
        self.run = manifest.run
        return manifest

    def write_manifest(self, manifest: M) -> None:
        """Write the manifest, in place of the one that is there."""
        values = {"format": f"lightning_persample {self.kind}", "format_version": self.version, **asdict(manifest)}
        write_atomically(self.dirpath / MANIFEST, json.dumps(values, indent=2).encode())
        self.run = manifest.run

    def promise(self, run: str, lost: int = 0) -> None:
        """Let the manifest of a run that has ended say how many rows it has made, so that a loss is seen later."""
        manifest = self.manifest_if_there()
        if manifest is not None and manifest.run == run:
            self.write_manifest(replace(manifest, rows=self._count() + lost))

    # The parts

    def part(self, rank: int, counter: int) -> Part:
        """The part of a process with this number."""
        return Part(rank, counter, self.dirpath / f"{self.prefix}-{rank:05d}-{counter:06d}{self.suffix}")

    def parts(self) -> list[Part]:
        """The parts, by rank and in the order in which each process wrote them."""
        name = re.compile(rf"{self.prefix}-(\d+)-(\d+){re.escape(self.suffix)}")
        there = self.dirpath.iterdir() if self.dirpath.is_dir() else ()  # somebody may remove it
        matches = filter(None, (name.fullmatch(path.name) for path in there))
        return [self.part(*key) for key in sorted((int(match[1]), int(match[2])) for match in matches)]

    def drop_rows(self, step: int) -> None:
        """Remove the rows of an optimizer step and of all later ones."""
        # Killed at any moment, it leaves parts that are whole, in which every earlier row is once; the latest are
        # removed first, so that none is missing in between.
        for part in reversed(self.parts()):
            kept = self._steps(part) < step
            if not kept.any():
                part.path.unlink()
            elif not kept.all():
                self._keep(part, kept)
        force_names(self.dirpath)

    # What is missing

    def _count(self) -> int:
        return sum(len(self._steps(part)) for part in self.parts())

    def gap(self, before: int | None = None) -> str:
        """Which part of a process is not there any more, though a later one with rows before this step is; or ""."""
        for rank, of_rank in groupby(self.parts(), key=attrgetter("rank")):
            written = [*of_rank]
            place, part = next(((n, part) for n, part in enumerate(written) if part.counter != n), (0, None))
            if part is not None and (before is None or self._steps(part).min(initial=before) < before):
                return f"file {place} of process {rank}, which has written {written[-1].counter + 1}"
        return ""

    def files(self) -> dict[int, int]:
        """How many files each process has written, by its rank."""
        return {part.rank: part.counter + 1 for part in self.parts()}

    def absent(self, files: Mapping[int, int]) -> str:
        """Which file is not there, of as many of each process; or ""."""
        there = {(part.rank, part.counter) for part in self.parts()}
        absent = ((rank, n, count) for rank, count in files.items() for n in range(count) if (rank, n) not in there)
        text = "file {1} of process {0}, which had written {2} when the checkpoint was saved"
        return next((text.format(*each) for each in absent), "")

    def lacking(self, manifest: M, there: int | None = None) -> str:
        """Which of the rows that complete it are not there; or ""."""
        if manifest.rows is None:
            return ""
        there = self._count() if there is None else there
        if manifest.rows < 0:
            return f"rows (it has {there}, and what writes it has not come to its end)"
        return f"{manifest.rows - there} of {manifest.rows} rows" if there < manifest.rows else ""

    def refuse(self, manifest: M, missing: str) -> None:
        """Refuse to read what lacks this, if it is not ""."""
        if missing:
            start = f"the {self.title} in {os.fspath(self.dirpath)!r} lacks {missing}"
            raise PerSampleError(f"{start}: {self._remedy(manifest)}")

    def check_complete(self, manifest: M, there: int) -> None:
        """Refuse to read fewer rows than complete it, or more."""
        self.refuse(manifest, self.lacking(manifest, there))
        if manifest.rows is not None and 0 <= manifest.rows < there:
            raise PerSampleError(
                f"the {self.title} in {os.fspath(self.dirpath)!r} has {there} rows, but {manifest.rows} complete it: "
                "files of something else are among its own. Take them out, or write the folder again"
            )

    @abstractmethod
    def _remedy(self, manifest: M) -> str:
        """What helps where rows are missing."""

    # A run that begins, or goes on

    def unlike(self, there: M, new: M) -> str:
        """The text of the error where rows of two manifests are not of the same values; or ""."""
        differing = self._difference(there, new)
        if differing is None:
            return ""
        return (
            f"dirpath={os.fspath(self.dirpath)!r} holds {self.rows_are} that were written with {differing[0]}, but now "
            f"there is {differing[1]}: go on with what there was, or pass another dirpath"
        )

    def check(
        self,
        new: M | None,
        continued: Mapping[str, int] | None,
        *,
        overwrite: bool,
        files: Mapping[int, int] | None = None,
    ) -> M | None:
        """The manifest that rows go on with, else None; what cannot take them is refused, and nothing is written."""
        # `continued` has the first step that each run does not have; with None whatever is there goes on. `files` is
        # how many each process had written then.
        if not self.dirpath.exists():
            return None
        dirpath, there, parts = f"dirpath={os.fspath(self.dirpath)!r}", self.manifest_if_there(), self.parts()
        if there is not None and (continued is None or there.run in continued):
            unlike = "" if new is None else self.unlike(there, new)
            if unlike and parts:
                raise OptionError(unlike + (", or remove them with overwrite=True" if continued is None else ""))
            missing = ""
            if continued is not None and not unlike:
                missing = self.gap(continued[there.run]) or self.absent(files or {})
                if not files and there.rows is not None and there.rows >= 0:
                    missing = missing or self.lacking(there)
            if missing:
                raise OptionError(f"{dirpath} lacks {missing}: put the files of this run back, or pass another dirpath")
            return None if unlike else there
        if parts and not overwrite:
            known = "a run without manifest" if there is None else f"run {there.run}"
            begins = f"continues run {' or '.join(continued)}" if continued else "starts a new run"
            goes_on = "go on from a checkpoint of that run with trainer.fit(..., ckpt_path=...)"
            if there is None:
                goes_on = f"put its {MANIFEST} back"
            raise OptionError(
                f"{dirpath} holds the {self.kind} of {known} ({len(parts)} files), but this one {begins}: pass another "
                f"dirpath, {goes_on}, or remove its rows with overwrite=True"
            )
        return None

    def open(
        self,
        new: M | None,
        continued: Mapping[str, int] | None = None,
        *,
        overwrite: bool = False,
        files: Mapping[int, int] | None = None,
    ) -> M | None:
        """Make the folder ready for rows, see `check`; new=None writes a manifest only of what goes on."""
        there = self.check(new, continued, overwrite=overwrite, files=files)
        self.dirpath.mkdir(parents=True, exist_ok=True)
        for path in list(self.dirpath.iterdir()):
            if _PARTIAL.fullmatch(path.name):  # which a killed process left
                path.unlink()
        if there is None:
            (self.dirpath / MANIFEST).unlink(missing_ok=True)  # first, so that a rest is not taken for all
            for part in self.parts():
                part.path.unlink()
            if new is not None and continued is not None and len(continued) == 1:
                new = replace(new, run=next(iter(continued)))
        else:
            promised = there.rows if continued is None or there.rows is None else -1
            new = replace(self._continued(there, there if new is None else new), rows=promised)
        if new is not None:
            self.write_manifest(new)
        if there is not None and continued is not None:  # when no more rows are promised than will be left
            self.drop_rows(continued[there.run])
        return new

    def remove_if_empty(self, run: str) -> None:
        """Remove the manifest of a run that failed before it had a row, so that the next one may have the folder."""
        manifest = self.manifest_if_there()
        if manifest is not None and manifest.run == run and not self.parts():
            (self.dirpath / MANIFEST).unlink()


def difference(
    there: BaseManifest, new: BaseManifest, names: Sequence[str], settings: Sequence[str]
) -> tuple[str, str] | None:
    """Where some fields and settings of two manifests are not alike, both as a text shows them."""
    compared = [(name, getattr(there, name), getattr(new, name)) for name in names]
    compared += [(name, there.settings.get(name), new.settings.get(name)) for name in settings]
    for name, before, now in compared:
        if name == "parameters":
            pairs = zip((*before, None), (*now, None), strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), None)
            if first is not None:
                return _shown(before, first[0]), _shown(now, first[1])
        elif plain(before) != plain(now):
            return f"{name}={before!r}", f"{name}={now!r}"
    return None


def _shown(parameters: Sequence[Any], first: Any) -> str:
    named = repr(first) if isinstance(first, str) else str(first)
    rest = " and no further one" if first is None else f", where they differ first {named}"
    return f"{len(parameters)} parameters{rest}"


def plain(value: Any) -> str:
    """A value as a manifest has it, in which a tuple is a list and nan is nan."""
    return json.dumps(value, sort_keys=True)


class PartWriter(Generic[M]):
    """Writes the parts of one process, and keeps those that could not be written for the next try."""

    def __init__(self, dataset: Dataset[M], rank: int, most_waiting: int) -> None:
        self._dataset, self._rank, self._most_waiting = dataset, rank, most_waiting
        self._counter = 1 + max((part.counter for part in dataset.parts() if part.rank == rank), default=-1)
        self._waiting: list[Any] = []
        self._has_new_names = False
        self.lost = 0

    @property
    def waiting(self) -> int:
        """How many rows are not written yet."""
        return sum(map(len, self._waiting))

    def wait(self, rows: Any) -> None:
        """Take rows that are to be a part; of more than may wait the oldest are given up."""
        self._waiting.append(rows)
        if len(self._waiting) > self._most_waiting:
            self.lost += len(self._waiting.pop(0))

    def write(self, least: int = 0) -> None:
        """Write what waits, in parts of this many rows; where that fails, ``OSError`` says so, and they wait."""
        while self._waiting and len(self._waiting[0]) >= least:
            self._dataset.write(self._dataset.part(self._rank, self._counter), self._waiting[0])
            self._counter += 1
            self._has_new_names = True
            del self._waiting[0]

    def settle(self) -> None:
        """Force the names of the files to the disk, once for all that are new; costs as much as a file."""
        # Until then each file is whole whatever happens, but its name may be lost with the machine's power.
        if self._has_new_names:
            force_names(self._dataset.dirpath)
            self._has_new_names = False


class FolderLock:
    """Keeps other writers out of a folder once it is taken; where the system knows no locks, nobody is kept out."""

    def __init__(self, dirpath: Path) -> None:
        self.dirpath, self._path = dirpath, dirpath / "_writing.lock"
        self._file: IO[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}

    def take(self) -> None:
        """Keep other writers out, or refuse a folder that another one has taken."""
        self.dirpath.mkdir(parents=True, exist_ok=True)
        while not self._is_taken():
            pass

    def _is_taken(self) -> bool:
        """Take it; False where its last holder removed the file in the same moment: nobody else would see it."""
        file = self._path.open("ab")
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            file.close()
            raise OptionError(
                f"dirpath={os.fspath(self.dirpath)!r} is being written to by another fit or collection, in this "
                "process or another: wait for its end, or pass another dirpath"
            ) from None
        except OSError:  # no locks here
            file.close()
            return True
        try:
            is_there = os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            is_there = False
        if is_there:
            self._file = file
        else:
            file.close()
        return is_there

    def release(self) -> None:
        """Let others write; may be called at any time."""
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(OSError):  # (Windows removes no file that is open)
            self._path.unlink()
        if fcntl is not None:  # at once, though a forked worker may hold the file, too
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()
        if fcntl is None:
            with suppress(OSError):
                self._path.unlink()


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def _lock(file: IO[Any]) -> None:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
