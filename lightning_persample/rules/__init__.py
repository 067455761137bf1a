"""The rules: what one call of one op contributes to the gradient of each weight, sample by sample.

A rule is maths only: ``(call, grad_output) -> {argument name: SampleGradient}``. It sets nothing, keeps nothing and
knows neither modules nor the engine. Importing this package registers the rules of every family below; an op without a
rule of its own is answered by `generic_rule`.

The tensor convention, which every rule and every docstring here follows:

    b, B    samples
    k       rows of one sample: the size that the op's batch axis has left when one sample is taken out of the batch
            (1 unless samples were flattened together with another axis)
    t, T    positions: time steps, tokens, pixels; everything that the gradient of one sample sums over
    p       outputs of a linear map
    d       inputs of a linear map
    c, o    channels in and channels out of a convolution

Every batched argument and the gradient of the output are batch-first: ``(B, *shape)`` where ``shape`` is what the op
saw, with its batch axis reduced to the k rows of one sample. ``tensor[i]`` is thus exactly the argument with which a
loop over single samples would call the op. For ``F.linear``:

    the op saw                          the rule sees
    (B, T, d), samples first            (B, 1, T, d)
    (T, B, d), time first               (B, T, 1, d)
    (B * T, d), flattened               (B, T, d)

and for ``torch.conv2d`` the input is ``(B, k, c, height, width)``. Where broadcasting gave the op's output more axes
than a batched argument, that argument counts as having leading axes of size 1, so that its per-sample shape has the
rank of the output's per-sample shape.

Rules run inside the backward pass: outside autocast, without gradients, on tensors of any strides. An argument is cast
to the dtype of the output's gradient where autocast had cast it for the op, and float16 and bfloat16 are summed in
float32.
"""

from lightning_persample.rules import convolution, elementwise, embedding, linear, normalization, recurrent
from lightning_persample.rules.generators import generators_kept, is_of_torch, other_generators_kept
from lightning_persample.rules.generic import generic_rule
from lightning_persample.rules.registry import (
    Call,
    Rule,
    RuleFunction,
    canonical_op,
    find_rule,
    op_name,
    register_rule,
    rule_of,
    supported_ops,
    watched,
)
from lightning_persample.rules.vector_jacobian import BATCHES, Pull, agree, pull_each, vector_jacobian

__all__ = [
    "BATCHES",
    "Call",
    "Pull",
    "Rule",
    "RuleFunction",
    "agree",
    "canonical_op",
    "convolution",
    "elementwise",
    "embedding",
    "find_rule",
    "generators_kept",
    "generic_rule",
    "is_of_torch",
    "linear",
    "normalization",
    "op_name",
    "other_generators_kept",
    "pull_each",
    "recurrent",
    "register_rule",
    "rule_of",
    "supported_ops",
    "vector_jacobian",
    "watched",
]
