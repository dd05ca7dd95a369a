"""Text in and out: tokenizer, chat template, incremental decoding, stop strings, grammars, tool calls. No torch."""
