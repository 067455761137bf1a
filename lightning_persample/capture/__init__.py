"""One observed step: from the torch calls of a training step and its backward to a record."""
