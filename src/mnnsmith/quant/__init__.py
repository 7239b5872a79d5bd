"""Recipes, and quantizers as pure functions on arrays."""
