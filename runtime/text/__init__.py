"""Text in and out: tokenizer files, chat templates, incremental decoding, stop strings. No torch, no transformers."""
