"""What a bundle stores, read back out of its own files."""
