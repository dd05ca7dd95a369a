"""The engine: scheduler, KV cache bookkeeping and output. No torch."""
