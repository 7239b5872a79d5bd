"""Bundles on disk: written whole or not at all, read, checked."""
