"""The pieces of `scripts/train_demo_model.py`: texts in, a small Llama checkpoint out."""
