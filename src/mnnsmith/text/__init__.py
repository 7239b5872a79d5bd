"""Tokenizer and chat template at run time."""
