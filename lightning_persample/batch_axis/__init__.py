"""Where the samples of a batch lie in every tensor of a training step."""
