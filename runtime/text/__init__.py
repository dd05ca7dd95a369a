"""Text processing: tokenizer, chat template, incremental decoding, stop strings, grammars, tool calls. No torch."""
