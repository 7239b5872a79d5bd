"""The only room that talks to MNN, always in a child process."""

from mnnsmith.engine.batcher import Batcher
from mnnsmith.engine.converter import graph_json_to_mnn
from mnnsmith.engine.device import Device
from mnnsmith.engine.engine import Engine, EngineStatistics, Generation, VisionFacts
from mnnsmith.engine.module import Module, ModuleStatistics, TensorInfo
from mnnsmith.engine.parse_device import parse_device
from mnnsmith.engine.pipeline import pipeline
from mnnsmith.engine.sampling import SamplingOptions

__all__ = [
    "Batcher",
    "Device",
    "Engine",
    "EngineStatistics",
    "Generation",
    "Module",
    "ModuleStatistics",
    "SamplingOptions",
    "TensorInfo",
    "VisionFacts",
    "graph_json_to_mnn",
    "parse_device",
    "pipeline",
]
