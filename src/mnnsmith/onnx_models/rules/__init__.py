"""Rewrite rules, one a file: what the engine does wrong, and the form that it does right."""
