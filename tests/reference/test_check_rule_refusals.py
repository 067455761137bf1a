"""check_rule: what it refuses to check, and in which words."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_persample import check_rule
from lightning_persample.errors import OptionError, PerSampleError, RuleRegistrationError, UnsupportedError
from tests.capture.affine import B, affine, arguments, plain, register, right

pytestmark = pytest.mark.usefixtures("own_rules")


def refused(error: type[Exception], text: str, *args, **options) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        check_rule(*args, **options)


def test_an_op_without_a_rule():
    text = "'plain' has no rule; register one with lightning_persample.register_rule"
    refused(RuleRegistrationError, text, plain, arguments())


def test_arguments_that_do_not_fit():
    register(right)
    x, weight, bias = arguments()
    knows = "the rule knows ['x', 'weight', 'bias']"
    text = f"the example arguments of 'affine' do not fit its rule: there are 0 by position and ['y'] by name, {knows}"
    refused(OptionError, text, affine, {"y": x})
    text = "batched names ['y'], but the tensors among the arguments are ['bias', 'weight', 'x']"
    refused(OptionError, text, affine, (x, weight, bias), batched=("y",))
    declared = "allowed are tensors that the rule of 'affine' declares as"
    text = f"batched is ['bias']; {declared} batched, one at least: ['x']"
    refused(OptionError, text, affine, (x, weight, bias), batched=("bias",))
    text = f"weights is []; {declared} weights, one at least: ['weight', 'bias']"
    refused(OptionError, text, affine, (x, weight, bias), weights=())
    text = "weights names ['other'], which are batched or of an integer dtype; allowed are other tensors"
    refused(OptionError, text, torch.mul, (x, weight), batched=("input", "other"), weights=("other",))
    text = "weights names ['weight'], which are batched or of an integer dtype; allowed are other tensors"
    refused(OptionError, text, affine, (x, weight.long(), bias))
    text = (
        "the batched arguments have shapes {'x': (3, 3)}; allowed is one number of samples along axis 0 (batch_dim), "
        "at least 4"
    )
    refused(OptionError, text, affine, arguments(3))


def test_options_that_are_not_allowed():
    register(right)
    text = "batch_dim=-1 is not allowed: batch_dim must be an int >= 0"
    refused(OptionError, text, affine, arguments(), batch_dim=-1)
    text = "dtypes=(torch.int64,) is not allowed: dtypes must be floating point precisions, at least one"
    refused(OptionError, text, affine, arguments(), dtypes=(torch.int64,))
    refused(
        OptionError,
        "tolerance=0 is not allowed: tolerance must be None or a number > 0",
        affine,
        arguments(),
        tolerance=0,
    )


def test_ops_that_a_loop_says_nothing_about():
    text = (
        "'batch_norm' lets samples influence each other here (`mixes_samples`): a loop over single samples is no "
        "reference for it"
    )
    norm = (torch.randn(B, 3), torch.randn(3), torch.randn(3), None, None, True, 0.1, 1e-5, False)
    refused(UnsupportedError, text, torch.batch_norm, norm)

    def centred(x, weight, bias):
        return (x - x.mean(0)) * weight + bias

    def noisy(x, weight, bias):
        return x * weight + torch.rand_like(x)

    def constant(x, weight, bias):
        return x.clone()

    def failing(x, weight, bias):
        raise ValueError("no kernel")

    def twice(x, weight, bias):
        return x * weight, x + bias

    name = "test_ops_that_a_loop_says_nothing_about.<locals>."
    texts = {
        centred: (
            UnsupportedError,
            f"'{name}centred' gives a sample another value alone than in its batch (6 samples): it mixes samples, or "
            "they do not lie along axis `batch_dim` of every batched argument; such an op has no per-sample gradient "
            "to compare with",
        ),
        noisy: (UnsupportedError, f"'{name}noisy' gives another value each time, so a loop over samples tells nothing"),
        constant: (
            UnsupportedError,
            f"no output of '{name}constant' has a gradient with respect to weight, bias: an op needs a backward of its "
            "own (torch.library.register_autograd for a custom op) before it can have a rule",
        ),
        failing: (
            PerSampleError,
            f"running '{name}failing' on 6 samples in torch.float64 failed with ValueError: no kernel; `dtypes` "
            "chooses the precisions",
        ),
        twice: (
            UnsupportedError,
            f"'{name}twice' has 2 outputs with a gradient, but its rule takes one: register it with "
            "several_outputs=True",
        ),
    }  # fmt: skip
    for op, (error, text) in texts.items():
        register(right, op)
        refused(error, text, op, arguments())
