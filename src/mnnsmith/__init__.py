"""From a checkpoint to a verified, quantized MNN bundle, without PyTorch."""

from mnnsmith.version import __version__

__all__ = ["__version__"]
