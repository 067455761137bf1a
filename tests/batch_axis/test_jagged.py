"""Layers that are called on jagged tensors, of a batch or made in the step of rows with owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_persample import PerSampleRecord, expanded_weights
from tests.batch_axis.test_owned_rows import assert_exact, captured, loop
from tests.torch_release import not_in_the_oldest

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*is_fx_tracing"),
]

D, H, IDS = 3, 4, 7
LENGTHS = (3, 5, 1, 4)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.norm = nn.Linear(D, H), nn.Linear(H, H), nn.LayerNorm(H)
        self.query, self.key, self.value = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H, bias=False)
        self.table, self.scale = nn.Embedding(IDS, D), nn.Parameter(torch.rand(H))


def samples(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(seed)
    return [(torch.randn(n, D), torch.randint(IDS, (n,)), torch.randn(H)) for n in lengths]


def batch_of(chosen: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
    x, ids, y = zip(*chosen, strict=True)
    jagged = [torch.nested.nested_tensor(list(part), layout=torch.jagged) for part in (x, ids)]
    return {"x": jagged[0], "ids": jagged[1], "y": torch.stack(y)}


def attention(module: Any, h: Any) -> Any:
    q, k, v = (layer(h).unflatten(-1, [2, 2]).transpose(1, 2) for layer in (module.query, module.key, module.value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda module, batch: module.first(batch["x"]),
    "no bias": lambda module, batch: module.value(module.first(batch["x"]).tanh()),
    "layer norm": lambda module, batch: module.norm(module.first(batch["x"])).relu(),
    "embedding": lambda module, batch: module.first(module.table(batch["ids"])).sigmoid(),
    "scale": lambda module, batch: (module.first(batch["x"]) * module.scale).tanh(),
    "shares": lambda module, batch: (module.first(batch["x"]) / (1 + module.scale)).tanh(),
    "shift": lambda module, batch: (module.first(batch["x"]) + module.scale).tanh(),
    "beside another": lambda module, batch: module.first(batch["x"]) + 0.5 * module.first(batch["x"]).tanh(),
    "beside a layer": lambda module, batch: (h := module.first(batch["x"])) + module.query(h).tanh(),
    "softmax": lambda module, batch: module.first(batch["x"]).softmax(-1),
    "attention": lambda module, batch: attention(module, module.first(batch["x"])),
}
POOLED: dict[str, Callable[[Any], Tensor]] = {
    "padded": lambda h: h.to_padded_tensor(0.0).sum(1),
    "largest": lambda h: h.amax(1),
    "rows": lambda h: torch.zeros(h.size(0), H).index_add(
        0, torch.arange(h.size(0)).repeat_interleave(h.offsets().diff()), h.values()
    ),
    "one by one": lambda h: torch.stack([rows.mean(0) for rows in h.unbind()]),
}


@pytest.mark.filterwarnings("error:.*[Pp]er-sample")
@pytest.mark.parametrize("pooled", POOLED)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_on_a_jagged_batch(layer: str, pooled: str) -> None:
    module = Network()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(module.head(POOLED[pooled](LAYERS[layer](module, batch))), batch["y"])

    for lengths in (LENGTHS, (2, 2, 2)):
        chosen = samples(lengths=lengths)
        batch = batch_of(chosen)
        record = captured(module, batch, lambda batch=batch: loss(batch))
        expected = loop(module, loss, [batch_of([each]) for each in chosen])
        assert_exact(record, {name: grads for name, grads in expected.items() if grads.any()})


def of_rows(batch: dict[str, Tensor]) -> Any:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batch["lengths"].cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(batch["x"], offsets=offsets)


def capture_of_rows(
    module: Any, batch: dict[str, Tensor], loss: Callable[[dict[str, Tensor]], Tensor], owner: Tensor
) -> PerSampleRecord:
    options = {"batch_layout": lambda batch: {batch["x"]: owner}, "batch_size": len(LENGTHS), "unsupported": "ignore"}
    return captured(module, batch, lambda: loss(batch), **options)


def test_rows_with_owners_are_made_jagged_in_the_step() -> None:
    module, chosen = Network(), samples()

    def rows(chosen: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
        x, _, y = zip(*chosen, strict=True)
        return {"x": torch.cat(x), "lengths": torch.tensor([len(each) for each in x]), "y": torch.stack(y)}

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(module.head(attention(module, module.first(of_rows(batch))).amax(1)), batch["y"])

    owner = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    record = capture_of_rows(module, rows(chosen), loss, owner)
    expected = loop(module, loss, [rows([each]) for each in chosen])
    assert_exact(record, {name: grads for name, grads in expected.items() if grads.any()})
    other = capture_of_rows(module, rows(chosen), loss, owner.flip(0))
    assert "cuts rows otherwise than they belong to samples" in other.unsupported["first.weight"]


NAMED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a product": (lambda module, h: h @ module.query.weight, "query.weight"),
    "in place": (lambda module, h: h.mul_(module.scale), "scale"),
    "a weight with the axes of the batch": (lambda module, h: h * module.scale[None, None], "scale"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=not_in_the_oldest if name == "a product" else ()) for name in NAMED]
)
def test_other_weights_beside_jagged_tensors_are_named(name: str) -> None:
    module, batch = Network(), batch_of(samples())
    call, parameter = NAMED[name]

    def loss() -> Tensor:
        return call(module, module.first(batch["x"])).values().square().sum() / len(batch["y"])

    record = captured(module, batch, loss, unsupported="ignore")
    text = "works on tensors that are nested, sparse or wrapped; give it values() of a jagged one, or a padded one"
    assert text in record.unsupported[parameter]


def test_a_mean_over_the_rows_of_all_weighs_samples_by_their_rows() -> None:
    module, batch = Network(), batch_of(samples())
    record = captured(module, batch, lambda: module.first(batch["x"]).values().square().mean(), unsupported="ignore")
    assert "averages over unequal numbers of rows" in record.weighting[0]


def test_a_layer_in_a_checkpoint() -> None:
    module, chosen = Network(), samples()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(
            lambda x: module.norm(module.first(x)).relu(), batch["x"], use_reentrant=False
        )
        return F.mse_loss(module.head(h.to_padded_tensor(0.0).sum(1)), batch["y"])

    batch = batch_of(chosen)
    record = captured(module, batch, lambda: loss(batch))
    expected = loop(module, loss, [batch_of([each]) for each in chosen])
    assert_exact(record, {name: grads for name, grads in expected.items() if grads.any()})


def test_training_is_that_of_a_step_without_a_capture() -> None:
    module, batch = Network(), batch_of(samples())
    found = []
    for observed in (False, True):
        module.zero_grad()
        with torch.enable_grad():
            if observed:
                with expanded_weights(module, batch):
                    F.mse_loss(module.head(attention(module, module.norm(module.first(batch["x"]))).amax(1)),
                               batch["y"]).backward()  # fmt: skip
            else:
                F.mse_loss(module.head(attention(module, module.norm(module.first(batch["x"]))).amax(1)),
                           batch["y"]).backward()  # fmt: skip
        found.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())
