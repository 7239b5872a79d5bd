"""Bundles on disk: written whole or not at all, read, checked."""

from mnnsmith.bundle.bundle import Bundle, open_bundle

__all__ = ["Bundle", "open_bundle"]
