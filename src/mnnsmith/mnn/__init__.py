"""The engine's byte formats: graph JSON, weight records, tokenizer, configuration."""
