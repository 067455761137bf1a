"""`ExpandedWeight` and `call_for_per_sample_grads`: per-sample gradients left on the weights."""
