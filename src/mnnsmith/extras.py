"""Packages that only an extra of mnnsmith installs."""

from __future__ import annotations

import importlib.util

from mnnsmith.errors import MissingResourceError


def require_packages(*names: str) -> None:
    """Raise `MissingResourceError` where a package of the extra `onnx` is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingResourceError(
                f"The package {name} is not installed.",
                'Install the extra: pip install "mnnsmith[onnx]"',
            )
