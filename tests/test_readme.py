"""What the README says is so: its code runs, its commands are the ones that run in CI, its lists are complete."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

import lightning_persample
from lightning_persample import PerSampleGradientMonitor, PerSampleRecord, supported_ops

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def table_rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its header."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("epochs", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_python_blocks_run_in_order(epochs, own_rules, tmp_path, monkeypatch, capsys):
    """Those that train for thirty epochs need not for what is looked at here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TQDMProgressBar, "on_train_batch_end", L.Callback.on_train_batch_end)  # drawing takes longest
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks("python")):
        block = block.replace("max_epochs=30", f"max_epochs={epochs}")
        exec(compile(block, f"README.md, python block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "'per_sample_grad/norm_mean'" in printed
    assert "has the largest norm" in printed
    assert "\n8 of the 512 samples captured\n" in printed
    assert "'per_sample_grad/optimizer_1/norm_mean'" in printed
    assert "'0.weight': (4, 32, 8)" in printed


def test_a_rule_of_ones_own_takes_less_than_20_lines():
    (block,) = [block for block in blocks("python") if "register_rule" in block]
    assert len([line for line in block.splitlines() if line.strip()]) < 20
    assert "check_rule(" in block.splitlines()[-2]


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
        max_steps=1,
        log_every_n_steps=1,
        accelerator="cpu",
        logger=logger,
        callbacks=[PerSampleGradientMonitor(every_n_steps=1)],
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.randn(4, 32), batch_size=4))
    with (Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:
        logged = {key for key in next(csv.reader(file)) if key.startswith("per_sample_grad/")}
    listed = {name for row in table_rows("What is logged") for name in re.findall(r"`(per_sample_grad/\w+)`", row[0])}
    assert listed == logged


def test_what_needs_no_trainer_is_listed_in_full():
    public = {name: getattr(lightning_persample, name) for name in lightning_persample.__all__}
    functions = {name for name, value in public.items() if inspect.isfunction(value)}
    functions -= {name for name in functions if ".callbacks." in public[name].__module__}  # these take a Trainer
    tensors = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, torch.Tensor)}
    listed = [re.match(r"`(\w+)\(", row[0])[1] for row in table_rows("Without a Trainer")]
    assert sorted(listed) == sorted(functions | tensors)


def test_what_a_record_holds_is_listed_in_full():
    listed = [name for row in table_rows("What a record holds") for name in re.findall(r"`(\w+)", row[0])]
    fields = {field.name for field in dataclasses.fields(PerSampleRecord) if not field.name.startswith("_")}
    assert sorted(listed) == sorted(fields | {name for name in vars(PerSampleRecord) if not name.startswith("_")})
    assert all(f"\n        {name}: " in PerSampleRecord.__doc__ for name in fields)


def test_listed_ops_are_those_with_a_rule_of_their_own():
    listed = [name for row in table_rows("Supported layers") for name in re.findall(r"`(\w+)`", row[1])]
    assert sorted(listed) == list(supported_ops())


def test_the_map_leads_to_every_section_but_that_for_developers():
    headings = re.findall(r"^## (.+)$", README, flags=re.MULTILINE)
    linked = re.findall(r"\[([^]]+)\]\(#([^)]+)\)", README)
    assert sorted(name for name, _ in linked) == sorted(set(headings) - {"Develop"})
    assert all(anchor == name.lower().replace(" ", "-") for name, anchor in linked)
