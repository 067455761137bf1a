"""Manual optimization: gradients that no backward left are of no known samples."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_persample.errors import PerSampleWarning
from tests.callbacks.runs import logged
from tests.callbacks.test_optimizer_steps import Trunk, assert_logged, norms, trained


class Replaces(Trunk):
    def training_step(self, batch, batch_idx):
        self.go_backward(self.loss_of_both, *batch)
        self.second.weight.grad = self.second.weight.grad.clamp(-1, 1)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_with_other_gradients_than_backward_left_is_not_reported(tmp_path):
    with pytest.warns(PerSampleWarning) as caught:
        reference, trainer = trained(Replaces, tmp_path)
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [
        "`.grad` of `second.weight` was replaced after a backward pass, or written to otherwise than by a factor, so "
        "that it is not known with which samples optimizer 1 stepped; the statistics of that step are left out"
    ]
    assert_logged(trainer, [norms(each, "trunk", "first") for each in reference], 0)
    assert all(math.isnan(row["per_sample_grad/optimizer_1/norm_mean"]) for row in logged(trainer))


class Merges(Trunk):
    """Two backward passes, whose gradients are put together by hand in the tensor that the second one filled."""

    def training_step(self, batch, batch_idx):
        self.go_backward(self.loss_of_both, *batch)
        first = self.second.weight.grad.clone()
        for optimizer in self.optimizers():
            optimizer.zero_grad(set_to_none=False)
        self.go_backward(self.loss_of_both, *batch)
        self.second.weight.grad.copy_(first * torch.rand_like(first) + self.second.weight.grad)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_that_are_merged_by_hand_are_of_no_known_samples(tmp_path):
    with pytest.warns(PerSampleWarning, match="or written to otherwise than by a factor"):
        _, trainer = trained(Merges, tmp_path)
    assert all(math.isnan(row["per_sample_grad/optimizer_1/norm_mean"]) for row in logged(trainer))
    assert all(row["per_sample_grad/optimizer_0/norm_mean"] > 0 for row in logged(trainer))
