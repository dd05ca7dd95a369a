"""Training of scales, norms and biases of a packed checkpoint on the logits of the dense model."""
