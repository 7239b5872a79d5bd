"""Whether the engine can be loaded and computes: the first half of `mnnsmith.selftest`."""

from __future__ import annotations

from mnnsmith.engine.client import Runner, RunnerRefusedError
from mnnsmith.engine.device import Launch
from mnnsmith.errors import EngineError

START_TIMEOUT_S = 60.0
LARGEST_ERROR = 1e-5
_REMEDY = "Install the engine again: pip install --force-reinstall MNN"


def check_engine(
    launch: Launch | None = None, time_factor: float = 1.0, remedy: str = _REMEDY
) -> None:
    """Start the engine in a child process and let it multiply two small matrices.

    launch: how to start it, by default on this machine.  Raises EngineError with the hint `remedy`
    when it cannot be loaded, crashes, or computes something else.
    """
    runner = Runner(launch)
    try:
        result, _ = runner.call("self_test", silence_s=START_TIMEOUT_S * time_factor)
    except (EngineError, RunnerRefusedError) as error:
        message = error.message if isinstance(error, EngineError) else str(error)
        raise EngineError(message, remedy) from error
    finally:
        runner.close()
    if not result["largest_error"] <= LARGEST_ERROR:
        raise EngineError(f"a matrix product is off by {result['largest_error']:g}", remedy)
