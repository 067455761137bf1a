"""The guide's pages: their code runs and prints what stands below it, and gives the values that it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn

from lightning_persample import expanded_weights
from lightning_persample.batch_axis import base, follow, ops
from tests.influence.loops import simple

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "examples" / "guide"
PAGES = sorted(path.name for path in GUIDE.glob("*.md"))


def blocks_and_outputs(path: Path) -> list[tuple[str, str]]:
    """The Python blocks of a page in order, each with the text block that follows it, or ""."""
    fence = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?"
    return re.findall(fence, path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def without_numbers(text: str) -> str:
    """A printed text for comparison: every number and every rule of a table alike, no white space."""
    text = re.sub(r"(?<![\w.])[-+]?\d+(\.\d*)?(e[-+]?\d+)?", "0", text)
    return re.sub(r"\s+", "", re.sub(r"--+", "-", text))


@pytest.fixture(scope="module")
def of_the_readme() -> dict[str, Any]:
    """What the README's first block defines, which the pages continue."""
    namespace: dict[str, Any] = {"__name__": "guide"}
    block, _ = blocks_and_outputs(ROOT / "README.md")[0]
    exec(compile(block.split("\ntrainer = ")[0], "README.md", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", [page for page in PAGES if page != "contributing.md"])
def test_code_runs_and_prints_what_stands_below_it(page, of_the_readme, own_rules, tmp_path, monkeypatch, capsys):
    """Trainings of thirty epochs end after six: numbers are not compared, only which are printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TQDMProgressBar, "on_train_batch_end", L.Callback.on_train_batch_end)  # drawing takes longest
    namespace = dict(of_the_readme)
    for number, (block, output) in enumerate(blocks_and_outputs(GUIDE / page)):
        block = block.replace("max_epochs=30", "max_epochs=6")
        capsys.readouterr()
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)
        assert without_numbers(output) in without_numbers(capsys.readouterr().out), block


@pytest.mark.parametrize("page", ["README.md", *(f"examples/guide/{page}" for page in PAGES)])
def test_links_lead_to_files_and_sections(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings], (
            target
        )


@pytest.fixture
def contributed(own_rules, monkeypatch) -> dict[str, Any]:
    """What the page for contributors defines; what it registers is gone afterwards."""
    for module, name in ((ops, "OPS"), (base, "PROPAGATION_RULES")):
        for key in {"logdet", "det"}:
            monkeypatch.setitem(getattr(module, name), key, None)
            del getattr(module, name)[key]
    monkeypatch.setattr(base, "BY_LAYOUT", set(base.BY_LAYOUT))
    namespace: dict[str, Any] = {"__name__": "contributing"}
    for number, (block, _) in enumerate(blocks_and_outputs(GUIDE / "contributing.md")):
        exec(compile(block, f"contributing.md, block {number}", "exec"), namespace)
    return namespace


def test_each_addition_takes_less_than_20_lines():
    blocks = [block for block, _ in blocks_and_outputs(GUIDE / "contributing.md")]
    lengths = [len([line for line in block.splitlines() if line.strip()]) for block in blocks]
    assert len(lengths) >= 4
    assert max(lengths) < 20


class Matrices(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.linear, self.shift = dim, nn.Linear(2, 9), nn.Parameter(torch.rand(3))

    def forward(self, x):
        matrices = torch.hypot(self.linear(x).unflatten(1, (3, 3)), self.shift)
        return torch.logdet(matrices.transpose(0, self.dim) if self.dim else matrices @ matrices.mT)


def test_an_op_added_as_the_page_says_is_followed_and_exact(contributed, monkeypatch):
    monkeypatch.setattr(follow, "try_on_one_sample", lambda call: pytest.fail(f"{call.name} was tried"))
    module, x = Matrices(0).double(), torch.randn(4, 2, dtype=torch.float64)
    with expanded_weights(module, x, loss_reduction="sum") as capture:
        module(x).sum().backward()
    for i, norm in enumerate(capture.record.norms()):
        grads = torch.autograd.grad(module(x[i : i + 1]).sum(), list(module.parameters()))
        torch.testing.assert_close(norm, sum(grad.square().sum() for grad in grads).sqrt())


def test_a_statistic_added_as_the_page_says(contributed):
    metric = contributed["ParticipationRatio"]()
    metric.update(torch.ones(3))
    metric.update(torch.zeros(1))
    assert metric.compute().item() == pytest.approx(3 / 4)


def test_a_score_added_as_the_page_says(contributed, tmp_path):
    train, test = simple(tmp_path / "train", [[3.0, 4.0], [0.0, 2.0]]), simple(tmp_path / "test", [[1.0, 1.0]])
    scores = contributed["relative_grad_dot"](train, test).scores
    torch.testing.assert_close(scores, torch.tensor([[7 / 5], [1.0]], dtype=torch.float64))
