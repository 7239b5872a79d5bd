"""Any ONNX model as a module of the engine: right, or refused."""
