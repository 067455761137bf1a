"""Independent ways to the same per-sample gradients, and the checks against them."""
