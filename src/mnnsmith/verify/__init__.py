"""Checks of a bundle against its original."""
