"""Text in, token sequences and input statistics out."""
