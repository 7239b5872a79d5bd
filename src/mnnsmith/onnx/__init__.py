"""Our graph as standard ONNX, for other runtimes and as a reference without torch."""
