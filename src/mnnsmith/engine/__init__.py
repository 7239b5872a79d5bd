"""The only room that talks to MNN, always in a child process."""

from mnnsmith.engine.converter import graph_json_to_mnn
from mnnsmith.engine.engine import Engine, EngineStatistics, Generation, VisionFacts
from mnnsmith.engine.sampling import SamplingOptions

__all__ = [
    "Engine",
    "EngineStatistics",
    "Generation",
    "SamplingOptions",
    "VisionFacts",
    "graph_json_to_mnn",
]
