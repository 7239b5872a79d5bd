"""The only room that talks to MNN, always in a child process."""

from mnnsmith.engine.converter import graph_json_to_mnn
from mnnsmith.engine.engine import Engine, EngineStatistics, Generation
from mnnsmith.engine.sampling import SamplingOptions

__all__ = ["Engine", "EngineStatistics", "Generation", "SamplingOptions", "graph_json_to_mnn"]
