"""OpenAI's batch files without a server: requests from one JSONL file, answers to another. No torch."""
