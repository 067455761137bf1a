"""The guide's pages: their code runs and prints what stands below it, and gives the values that it promises."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn

import lightning_persample
from lightning_persample import expanded_weights, influence, metrics
from lightning_persample.batch_axis import base, follow, ops
from lightning_persample.capture import plan
from tests.influence.loops import simple
from tests.processes import run_alone

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "examples" / "guide"
PACKAGE = Path(lightning_persample.__file__).parent
ROOMS = (lightning_persample, influence, metrics)
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *GUIDE.glob("*.md")])
RUN_BY_OTHERS = {"examples/guide/contributing.md", "examples/guide/devices.md"}  # tests below


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_and_outputs(page: str) -> list[tuple[str, str]]:
    """The Python blocks of a page in order, each with the text block that follows it, or ""."""
    fence = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?"
    return re.findall(fence, read(page), flags=re.MULTILINE | re.DOTALL)


def without_numbers(text: str) -> str:
    """A printed text for comparison: every number and every rule of a table alike, no white space."""
    text = re.sub(r"(?<![\w.])[-+]?\d+(\.\d*)?(e[-+]?\d+)?", "0", text)
    return re.sub(r"\s+", "", re.sub(r"--+", "-", text))


@pytest.fixture(scope="module")
def of_the_readme() -> dict[str, Any]:
    """What the README's first block defines, which the pages continue."""
    namespace: dict[str, Any] = {"__name__": "guide"}
    block, _ = blocks_and_outputs("README.md")[0]
    exec(compile(block.split("\ntrainer = ")[0], "README.md", "exec"), namespace)
    return namespace


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN_BY_OTHERS and "```python" in read(page)])
def test_code_runs_and_prints_what_stands_below_it(page, of_the_readme, own_rules, tmp_path, monkeypatch, capsys):
    """Trainings of thirty epochs end after three: numbers are not compared, only which are printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TQDMProgressBar, "is_disabled", True)
    namespace = dict(of_the_readme)
    for block, output in blocks_and_outputs(page):
        block = block.replace("max_epochs=30", "max_epochs=3")
        capsys.readouterr()
        exec(compile(block, page, "exec"), namespace)
        assert without_numbers(output) in without_numbers(capsys.readouterr().out), block


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_sections(page):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", read(page)):
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
    for number, (block, _) in enumerate(blocks_and_outputs("examples/guide/contributing.md")):
        exec(compile(block, f"contributing.md, block {number}", "exec"), namespace)
    return namespace


def test_the_index_names_every_page():
    linked = set(re.findall(r"\]\((\w+\.md)\)", read("examples/guide/README.md")))
    assert linked == {path.name for path in GUIDE.glob("*.md")} - {"README.md"}


@pytest.mark.slow  # it starts two processes
def test_several_devices_print_what_the_page_says(tmp_path):
    ((block, output),) = blocks_and_outputs("examples/guide/devices.md")
    (tmp_path / "two.py").write_text(block, encoding="utf-8")
    ended = run_alone(str(tmp_path / "two.py"), timeout=100)
    assert ended.codes == [0], ended.outputs
    assert without_numbers(output) in without_numbers(ended.outputs[0])


def test_a_rule_of_ones_own_takes_less_than_20_lines():
    (block,) = [block for block, _ in blocks_and_outputs("examples/guide/op.md")]
    assert len([line for line in block.splitlines() if line.strip()]) < 20
    assert "check_rule(" in block.splitlines()[-2]


def test_the_arguments_of_a_call_enter_the_files_that_the_page_lists_in_their_order():
    listed = re.findall(r"^\d\. `([\w/]+\.py)`", read("examples/guide/contributing.md"), re.MULTILINE)
    hidden, layer = nn.Linear(4, 4), nn.Linear(4, 3)
    entered: list[str] = []
    hook, inside = plan.PlannedReport.contribute.__code__, 0

    def note(frame: types.FrameType, event: str, _: object) -> None:
        nonlocal inside
        code = frame.f_code
        inside += (event == "call") - (event == "return") if code is hook else 0
        takes_arguments = code.co_argcount > 0
        path = PACKAGE / "gradients/program.py" if code.co_filename == "<program>" else Path(code.co_filename)
        if event == "call" and takes_arguments and (inside or not in_backward) and PACKAGE in path.parents:
            entered.append(path.relative_to(PACKAGE).as_posix())

    for _ in range(3):  # the third call of a kind is as all that follow
        entered.clear()
        with expanded_weights(nn.Sequential(hidden, layer), x := torch.randn(5, 4)):
            found, in_backward = hidden(x).relu(), False
            sys.setprofile(note)
            scores = nn.functional.linear(found, layer.weight, layer.bias)
            sys.setprofile(None)
            loss, in_backward = scores.square().mean(), True
            sys.setprofile(note)
            loss.backward()
            sys.setprofile(None)
    assert list(dict.fromkeys(entered)) == listed
    assert len(listed) <= 6


def test_each_addition_takes_less_than_20_lines():
    blocks = [block for block, _ in blocks_and_outputs("examples/guide/contributing.md")]
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


def texts_of_the_package() -> list[str]:
    """Every text in the package's code, with a gap where it is filled in."""
    texts = []
    for path in (ROOT / "lightning_persample").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_every_warning_of_the_page_is_one_of_the_package():
    listed = re.findall(r"^\| `([^|]+)` \|", read("examples/guide/warnings.md"), flags=re.MULTILINE)
    assert len(listed) > 40
    texts = texts_of_the_package()
    parts = {text: [part.strip() for part in text.split("…")] for text in listed}
    missing = []
    for text, known in parts.items():
        pattern = re.compile(".*".join(map(re.escape, known)), re.DOTALL)
        near = (each for each in texts if all(part in each for part in known))  # (which is faster to see)
        if not any(map(pattern.search, near)):
            missing.append(text)
    assert missing == []


def has_an_example(value: object) -> bool:
    """Whether the docstring of a public object, or of a method of it, has an example."""
    return any(">>>" in (inspect.getdoc(each) or "") for each in [value, *getattr(value, "__dict__", {}).values()])


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_public_name_has_an_example_that_runs(room):
    code = "\n".join(block for page in PAGES for block, _ in blocks_and_outputs(page))
    missing = [
        name for name in room.__all__ if not re.search(rf"\b{name}\b", code) and not has_an_example(getattr(room, name))
    ]
    assert set(missing) <= {"__version__"}


def test_the_api_reference_lists_every_name():
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", read("examples/guide/api/index.rst"), flags=re.MULTILINE)
    assert sorted([*listed, "__version__"]) == lightning_persample.__all__


@pytest.mark.slow  # it imports everything and writes some hundred kilobytes of pages
@pytest.mark.timeout(300)
def test_the_api_reference_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    ended = run_alone("sphinx", "-qW", str(GUIDE / "api"), str(tmp_path), timeout=280)
    assert ended.codes == [0], ended.outputs
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    for room in ROOMS:
        missing = [name for name in room.__all__ if f'id="{room.__name__}.{name}"' not in page]
        assert set(missing) <= {"__version__"}
