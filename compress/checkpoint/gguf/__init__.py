"""GGUF, the single file of llama.cpp: container, block types, and what its metadata say of model and tokenizer."""
