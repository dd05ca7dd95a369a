"""The pieces of `scripts/bench_quality.py` and `scripts/bench_compress.py`."""
