"""What the README says is so: its code runs, its commands are the ones that run in CI, its lists are complete."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import re
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

import lightning_persample
from lightning_persample import PerSampleGradientMonitor, PerSampleRecord, supported_ops

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


GUIDE = ROOT / "examples" / "guide"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def table_rows(path: Path, heading: str = "") -> list[list[str]]:
    """The cells of the first table of a page, or below a heading of it, without its header."""
    text = path.read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0] if heading else text
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_it_is_at_most_200_lines():
    assert len(README.splitlines()) <= 200


def test_ci_runs_the_two_commands_of_the_readme():
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("python3 -m venv")]
    ran = [command.split("/bin/python ")[-1] for command in commands]
    assert ran == ["examples/digits_norms.py", "-m pytest -n auto"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    patterns = re.findall(r"grep -E '(.*)' README\.md", script)
    found = [line for pattern in patterns for line in README.splitlines() if re.match(pattern, line)]
    assert sorted(found) == sorted(commands)
    assert all(f'-c "${name}' in script for name in ("test_command", "main_command"))


def test_logged_keys_are_the_monitors(tmp_path):
    logger = CSVLogger(tmp_path)
    trainer = L.Trainer(
        max_steps=2,
        log_every_n_steps=1,
        accelerator="cpu",
        logger=logger,
        callbacks=[PerSampleGradientMonitor(every_n_steps=1)],
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=4))
    with (Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:
        logged = {key for key in next(csv.reader(file)) if key.startswith("per_sample_grad/")}
    rows = table_rows(ROOT / "README.md", "What is logged")
    listed = {name for row in rows for name in re.findall(r"`(per_sample_grad/\w+)`", row[0])}
    (of_epoch,) = [row[0] for row in rows if "`_epoch`" in row[0]]
    without = {f"per_sample_grad/{name}" for name in re.findall(r"`(\w+)`", of_epoch)} - {"per_sample_grad/_epoch"}
    assert listed | {f"{name}_epoch" for name in listed - without} == logged


def test_what_needs_no_trainer_is_listed_in_full():
    public = {name: getattr(lightning_persample, name) for name in lightning_persample.__all__}
    functions = {name for name, value in public.items() if inspect.isfunction(value)}
    functions -= {name for name in functions if ".callbacks." in public[name].__module__}  # these take a Trainer
    tensors = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, torch.Tensor)}
    listed = [re.match(r"`(\w+)\(", row[0])[1] for row in table_rows(GUIDE / "without_trainer.md")]
    assert sorted(listed) == sorted(functions | tensors)


def test_what_a_record_holds_is_listed_in_full():
    listed = [
        name
        for row in table_rows(GUIDE / "callback.md", "What a record holds")
        for name in re.findall(r"`(\w+)", row[0])
    ]
    fields = {field.name for field in dataclasses.fields(PerSampleRecord) if not field.name.startswith("_")}
    assert sorted(listed) == sorted(fields | {name for name in vars(PerSampleRecord) if not name.startswith("_")})
    assert all(f"\n        {name}: " in PerSampleRecord.__doc__ for name in fields)


def test_listed_ops_are_those_with_a_rule_of_their_own():
    listed = [
        name
        for row in table_rows(GUIDE / "supported.md", "Ops with a rule of their own")
        for name in re.findall(r"`(\w+)`", row[1])
    ]
    assert sorted(listed) == list(supported_ops())
