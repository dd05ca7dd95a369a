"""From logits to tokens, with noise that depends on seed and position only."""
