"""Checkpoints as people have them: safetensors folders, hub ids, GGUF files."""
