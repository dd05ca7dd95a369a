"""The decoder, its weights and its linear layers."""
