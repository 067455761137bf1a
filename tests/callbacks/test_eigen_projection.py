"""EigenProjection against eigenvectors of moments that hooks and one-sample autograd give, in float64."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import (
    EigenProjection,
    OptionError,
    PerSampleError,
    PerSampleGradientWriter,
    Projection,
    UnsupportedError,
    collect_gradients,
)
from lightning_persample.callbacks.eigen_projection import Basis, _shared_out
from lightning_persample.influence import GradientStore, PairScores, grad_dot, logra
from tests.callbacks.collect_runs import stored
from tests.callbacks.eigen_cases import (
    CASES,
    COUNT,
    Pooled,
    data,
    loss_of,
    sample_grads,
    seen_by,
    sides,
    span,
    with_bias,
)
from tests.callbacks.runs import make_trainer
from tests.in_turn import in_turn

DAMPING = 2e-4


def assert_span(found, moment, count):
    """The rows are orthonormal and span the top eigenvectors."""
    torch.testing.assert_close(found @ found.T, torch.eye(count, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    top = torch.linalg.eigh(moment)[1][:, -count:]
    torch.testing.assert_close(span(found), top @ top.T, rtol=1e-8, atol=1e-8)


def variance(rows, columns, a, b):
    """How much of it a and b eigenvectors keep, sum of (l / (l + damping))^2 over the products l as shares of all."""
    shares = torch.outer(rows, columns) / (rows.sum() * columns.sum())
    return float((shares / (shares + DAMPING))[:a, :b].square().sum())


@pytest.mark.parametrize(("case", "dim"), in_turn(CASES, [9, None]))
def test_directions_and_projected_gradients(case, dim, tmp_path):
    module, dataset, left, right = seen_by(case)
    projection = EigenProjection.fit(module, DataLoader(dataset, 4), dim, loss=loss_of)
    basis = projection.bases["layer.weight"]
    assert_span(basis.rows, span(left), len(basis.rows))
    assert_span(basis.columns, span(right), len(basis.columns))
    eigenvalues = [torch.linalg.eigvalsh(span(side)).flip(0).clamp_min(0) for side in (left, right)]
    kept = variance(*eigenvalues, len(basis.rows), len(basis.columns))
    for a in range(1, 1 + len(eigenvalues[0])):
        for b in range(1, 1 + len(eigenvalues[1])):
            if dim is None or a * b <= len(basis.rows) * len(basis.columns):
                assert variance(*eigenvalues, a, b) <= kept * (1 + 1e-9)
    sizes = [len(each.rows) * len(each.columns) for each in projection.bases.values()]
    assert dim is None or (max(sizes) <= 2 * dim and sum(sizes) <= dim * len(sizes))

    store = collect_gradients(
        module, DataLoader(dataset, 3), tmp_path / "store", projection=projection, dtype="float64", loss=loss_of
    )
    grads = sample_grads(module, dataset)
    expected = []
    for name in ("layer", "head"):
        used = projection.bases[f"{name}.weight"]
        expected.append((used.rows @ with_bias(grads, name) @ used.columns.T).flatten(1))
    torch.testing.assert_close(stored(store), torch.cat(expected, 1), rtol=1e-10, atol=1e-12)
    assert store.manifest.projection == projection.settings()
    if "layer.bias" in grads:
        assert projection.appended["layer.weight"] == "layer.bias"
        assert {each.name: each.stop - each.start for each in store.manifest.parameters}["layer.bias"] == 0


@pytest.mark.parametrize("dim", [1, 2, 5, 12, 40, 100])
def test_numbers_go_where_they_add_most(dim):
    """Never less of the scores' variance than with `dim` for each parameter, in no more numbers."""
    generator = torch.Generator().manual_seed(0)
    values = {
        name: tuple(
            torch.rand(size, generator=generator, dtype=torch.float64).pow(power).sort(descending=True).values
            for size in sizes
        )
        for name, sizes, power in (("a", (30, 20), 0.1), ("b", (8, 40), 8.0), ("c", (1, 3), 1.0), ("d", (1, 1), 1.0))
    }
    found = _shared_out(values, dim)
    assert sum(a * b for a, b in found.values()) <= dim * len(values)
    assert all(a * b <= 2 * dim for a, b in found.values())
    equal = {name: max(variance(*values[name], a, dim // a) for a in range(1, dim + 1)) for name in values}
    assert sum(variance(*values[name], *size) for name, size in found.items()) >= sum(equal.values()) - 1e-6
    nothing = {name: tuple(map(torch.zeros_like, both)) for name, both in values.items()}
    assert _shared_out(nothing, dim) == dict.fromkeys(values, (1, 1))


def test_the_variance_is_that_of_the_scores_by_default():
    assert inspect.signature(logra).parameters["damping"].default == DAMPING


def test_the_whole_eigenbasis_keeps_dots(tmp_path):
    module, dataset = Pooled(nn.Conv2d(2, 4, 3), 4), data(2, 6, 5)
    options = {"dtype": "float64", "loss": loss_of}
    projection = EigenProjection.fit(module, DataLoader(dataset, 4), None, loss=loss_of)
    turned = collect_gradients(module, DataLoader(dataset, 4), tmp_path / "a", projection=projection, **options)
    full = collect_gradients(module, DataLoader(dataset, 4), tmp_path / "b", projection=None, **options)
    torch.testing.assert_close(grad_dot(turned, turned).scores, grad_dot(full, full).scores, rtol=1e-10, atol=1e-12)


class Words(nn.Module):
    """An embedding with a token of padding, and a mask over it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words, self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm = nn.LayerNorm(4)
        self.double()

    def forward(self, tokens):
        mask = (tokens != 0).unsqueeze(2)
        hidden = self.norm(torch.tanh(self.inner(self.words(tokens))))
        return self.head((hidden * mask).sum(1))


def test_an_embedding_and_padded_tokens(tmp_path):
    module, dataset = Words(), data(6, tokens=8)
    projection = EigenProjection.fit(module, DataLoader(dataset, 4), 8, loss=loss_of)
    tokens = dataset.tensors[0]
    times = torch.bincount(tokens[tokens != 0], minlength=9)
    basis = projection.bases["words.weight"]
    kept = basis.rows.argmax(1)
    assert basis.rows.sum() == len(kept) == basis.rows.count_nonzero()
    assert sorted(times[kept].tolist()) == sorted(times.tolist())[-len(kept) :]
    seen = sides(module, module.inner, dataset)
    right = torch.cat([x[0][own != 0] for (x, _), own in zip(seen, tokens, strict=True)])
    right = torch.cat([right, torch.ones(len(right), 1, dtype=torch.float64)], 1)
    assert_span(projection.bases["inner.weight"].columns, span(right), len(projection.bases["inner.weight"].columns))
    grads = sample_grads(module, dataset)
    assert_span(projection.bases["norm.weight"].columns, span(grads["norm.weight"]), 4)
    assert projection.appended == {"inner.weight": "inner.bias", "head.weight": "head.bias"}
    store = collect_gradients(
        module, DataLoader(dataset, 3), tmp_path / "store", projection=projection, dtype="float64", loss=loss_of
    )
    expected = basis.rows @ grads["words.weight"] @ basis.columns.T
    torch.testing.assert_close(stored(store)[:, store.columns_of("words.weight")], expected.flatten(1))


class TransposedSquare(nn.Module):
    """Maps whose bias is no column of the weight, though it is as long as one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.up = nn.ConvTranspose2d(2, 2, 2)
        self.tied = nn.Linear(4, 4)
        self.double()

    def forward(self, inputs):
        out = self.up(inputs.view(-1, 2, 1, 2)).flatten(1)[:, :4] @ self.weight + self.bias
        return self.tied(torch.tanh(self.tied(out)))[:, :3]


def test_a_bias_that_is_no_column_stays_a_parameter_of_its_own(tmp_path):
    module, dataset = TransposedSquare(), data(4)
    projection = EigenProjection.fit(module, DataLoader(dataset, 4), None, loss=loss_of)
    assert projection.appended == {"tied.weight": "tied.bias"}  # in both uses
    store, full = (
        collect_gradients(
            module, DataLoader(dataset, 4), tmp_path / str(k), projection=each, dtype="float64", loss=loss_of
        )
        for k, each in enumerate((projection, None))
    )
    torch.testing.assert_close(grad_dot(store, store).scores, grad_dot(full, full).scores, rtol=1e-10, atol=1e-12)


def test_samples_that_are_not_finite_and_the_size_of_batches_do_not_count():
    module, dataset = Pooled(nn.Linear(5, 4), 4), data(5)
    spoiled = TensorDataset(*(torch.cat([each, each[:1]]) for each in dataset.tensors))
    spoiled.tensors[0][-1] = float("nan")
    fits = [
        EigenProjection.fit(module, DataLoader(each, size), 9, loss=loss_of)
        for each, size in ((dataset, 4), (spoiled, 5), (dataset, 1))
    ]
    for other in fits[1:]:
        for name, basis in fits[0].bases.items():
            for one, two in zip(basis, other.bases[name], strict=True):
                torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-7)


def test_a_checkpoint_and_a_weighting_are_those_of_the_collection():
    module, other, dataset = Pooled(nn.Linear(5, 4), 4), Pooled(nn.Linear(5, 4), 4), data(5)
    nn.init.normal_(other.layer.weight)
    before = copy.deepcopy(module.state_dict())
    weights = torch.rand(COUNT, dtype=torch.float64) + 0.5
    loader = DataLoader(TensorDataset(*dataset.tensors, weights), 4)

    def weighted(module, batch):
        return (F.cross_entropy(module(batch[0]), batch[1], reduction="none") * batch[2]).sum()

    found = EigenProjection.fit(
        module, loader, 9, checkpoint=other.state_dict(), loss=weighted, loss_reduction=lambda _, batch: batch[2]
    )
    expected = EigenProjection.fit(other, DataLoader(dataset, 4), 9, loss=loss_of)
    for name, basis in expected.bases.items():
        torch.testing.assert_close(span(found.bases[name].rows), span(basis.rows), rtol=1e-7, atol=1e-7)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_every_changed_byte_of_a_file_is_noticed_and_what_holds_no_projection_is_named(tmp_path):
    path = tmp_path / "projection.pt"
    projection = EigenProjection(3, {"weight": Basis(torch.ones(1, 2), torch.ones(3, 2))}, {"weight": "bias"})
    projection.save(path)
    whole = path.read_bytes()
    changed = (whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :] for place in range(len(whole)))
    for content in (*changed, whole[:-20], whole[:3], b""):
        path.write_bytes(content)
        with pytest.raises(PerSampleError, match=r"projection\.pt' is broken: .* copy, or fit the projection again"):
            EigenProjection.load(path)
    path.write_bytes(whole)
    assert EigenProjection.load(path) == projection
    PairScores("grad_dot", (1,), (2,), torch.ones(1, 1), "positive: helps").save(path)
    with pytest.raises(PerSampleError) as refused:
        EigenProjection.load(path)
    assert str(refused.value) == (
        f"{str(path)!r} is of format 'lightning_persample scores', but is to be read as "
        "'lightning_persample EigenProjection'"
    )


def test_saved_loaded_and_sent_it_is_the_same(tmp_path):
    module, dataset = Pooled(nn.Linear(5, 4), 4), data(5)
    projection = EigenProjection.fit(module, DataLoader(dataset, 4), 9, loss=loss_of)
    projection.save(tmp_path / "projection.pt")
    copies = [EigenProjection.load(tmp_path / "projection.pt"), pickle.loads(pickle.dumps(projection))]
    assert copies == [projection] * 2
    assert len({projection, *copies}) == 1
    assert projection != EigenProjection.fit(module, DataLoader(dataset, 4), 16, loss=loss_of)
    assert projection != Projection(9)
    folder = tmp_path / "store"
    options = {"loss": loss_of, "dtype": "float16"}
    collect_gradients(module, DataLoader(dataset, 4), folder, projection=projection, **options)
    again = collect_gradients(module, DataLoader(dataset, 4), folder, projection=copies[0], **options)
    assert len(again) == COUNT
    with pytest.raises(OptionError, match=f"'kind': 'eigen', 'digest': '{projection.settings()['digest']}'"):
        collect_gradients(module, DataLoader(dataset, 4), folder, projection=Projection(9), **options)


def test_weights_that_are_made_of_others_and_a_scalar(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.double()

        def forward(self, inputs):
            return self.scale * self.norm(inputs)

    module, dataset = Scaled(), data(5)
    projection = EigenProjection.fit(module, DataLoader(dataset, 4), None, loss=loss_of)
    turned, full = (
        collect_gradients(
            module, DataLoader(dataset, 1), tmp_path / str(k), projection=each, dtype="float64", loss=loss_of
        )
        for k, each in enumerate((projection, None))
    )
    torch.testing.assert_close(grad_dot(turned, turned).scores, grad_dot(full, full).scores, rtol=1e-10, atol=1e-12)


class Trained(LightningModule):
    """A small classifier in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Pooled(nn.Linear(5, 4), 4)

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def test_the_writer_of_a_fit_keeps_the_same_numbers(tmp_path):
    pytest.importorskip("pyarrow")
    module, dataset = Trained(), data(5)
    projection = EigenProjection.fit(module, DataLoader(dataset, 4), 9)
    writer = PerSampleGradientWriter(tmp_path / "ledger", projection=projection, dtype="float64", every_n_steps=1)
    make_trainer([writer], max_epochs=1).fit(module, DataLoader(dataset, 4))
    found = GradientStore(tmp_path / "ledger" / "_gradients")
    expected = collect_gradients(module, DataLoader(dataset, 4), tmp_path / "s", projection=projection, dtype="float64")
    (_, values), (_, wanted) = next(found.blocks()), next(expected.blocks())
    torch.testing.assert_close(values[found.rows["sample_index"].argsort()], wanted, rtol=1e-10, atol=1e-12)


def test_what_it_was_not_fitted_to_is_refused(tmp_path):
    module, dataset = Pooled(nn.Linear(5, 4), 4), data(5)
    fitted = EigenProjection.fit(
        module, DataLoader(dataset, 4), 9, loss=loss_of, parameters=["head.weight", "head.bias"]
    )
    loader, options = DataLoader(dataset, 4), {"loss": loss_of, "projection": fitted}
    text = r"was fitted to no such parameter as `layer\.weight` of shape \(4, 5\): fit it again with the module"
    with pytest.raises(OptionError, match=text):
        collect_gradients(module, loader, tmp_path / "a", **options)
    with pytest.raises(OptionError, match="fitted to a parameter of another shape"):
        fitted.size_of((3, 5), "head.weight")
    text = r"`head\.bias` is a further column of `head\.weight` in this projection, and that is not stored: store both"
    with pytest.raises(OptionError, match=text):
        collect_gradients(module, loader, tmp_path / "b", parameters=["head.bias"], **options)
    with pytest.raises(OptionError, match=r"dim is 0; allowed is an integer of at least 1"):
        EigenProjection.fit(module, loader, 0, loss=loss_of)
    with pytest.raises(OptionError, match=r"loss=None takes module.training_step: pass a LightningModule, or loss="):
        EigenProjection.fit(module, loader)
    with pytest.raises(UnsupportedError, match="the samples cannot be separated"):
        EigenProjection.fit(module, iter([]), loss=loss_of)
    only = collect_gradients(module, loader, tmp_path / "c", parameters=["head.weight"], dtype="float64", **options)
    basis = fitted.bases["head.weight"]
    expected = basis.rows @ sample_grads(module, dataset)["head.weight"] @ basis.columns[:, :-1].T
    torch.testing.assert_close(stored(only), expected.flatten(1), rtol=1e-10, atol=1e-12)


def test_rows_with_owners_are_fitted_and_collected(tmp_path):
    torch.manual_seed(0)
    samples = [torch.randn(rows, 4, dtype=torch.float64) for rows in (3, 1, 5, 2, 4, 2)]
    module = nn.Linear(4, 3, bias=False).double()

    def join(rows):
        counts = torch.tensor([len(each) for each in rows])
        return {"x": torch.cat(rows), "owner": torch.arange(len(rows)).repeat_interleave(counts)}

    def layout(batch):
        return dict.fromkeys(batch.values(), batch["owner"])

    def loss(module, batch):
        size = int(batch["owner"].max()) + 1
        out = module(batch["x"]).tanh().square().sum(1)
        return torch.zeros(size, dtype=torch.float64).index_add(0, batch["owner"], out).mean()

    loader = DataLoader(samples, 2, collate_fn=join)
    projection = EigenProjection.fit(module, loader, 6, loss=loss, batch_layout=layout)
    basis = projection.bases["weight"]
    assert_span(basis.columns, span(torch.cat(samples)), len(basis.columns))
    options = {"loss": loss, "batch_layout": layout, "dtype": "float64", "projection": projection}
    store = collect_gradients(module, loader, tmp_path / "store", **options)
    alone = [torch.autograd.grad(loss(module, join([each])), module.weight)[0] for each in samples]
    expected = [(basis.rows @ grad @ basis.columns.T).flatten() for grad in alone]
    torch.testing.assert_close(stored(store), torch.stack(expected), rtol=1e-10, atol=1e-12)
