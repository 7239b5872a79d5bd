"""SmolLM2-135M on emulated ARM processors: exact where it computes in floats, close in fp16.

The device is the user's own (`make test-slow` prepares it); without it there is nothing to test.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mnnsmith.api import Bundle, convert
from mnnsmith.engine import Engine, parse_device
from mnnsmith.engine.emulated import PREPARE_COMMAND, EmulatedDevice
from mnnsmith.text.tokenizer import TextTokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# As it was before the tests got a cache of their own.
CACHE = os.environ.get("XDG_CACHE_HOME", "")
TEXT = "The capital of France is Paris, and the capital of Germany is the city of"
F32 = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)
    if not EmulatedDevice().folder.is_dir():
        pytest.skip(f"the emulated device is not prepared: {PREPARE_COMMAND}")


@pytest.fixture(scope="module")
def bundle(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return convert(smollm2_gguf, tmp_path_factory.mktemp("smollm2") / "bundle", recipe="keep")


def logits(bundle: Bundle, device: str, memory: str, precision: str) -> F32:
    """Of every position of the text, fed in two parts: a prompt, and one token on its cache."""
    ids = TextTokenizer(bundle.tokenizer_json()).encode(TEXT)
    with Engine(
        bundle.path,
        device=parse_device(device),
        memory=memory,
        precision=precision,
        threads=2,
        config={"dynamic_option": 2},
        all_logits=True,
    ) as engine:
        prompt = engine.forward(ids[:-1], all_positions=True)
        return np.concatenate([prompt, engine.forward(ids[-1:], all_positions=True)])


@pytest.fixture(scope="module")
def exact(bundle: Bundle) -> F32:
    """On this machine, in floats."""
    return logits(bundle, "local", "high", "high")


def divergence(expected: F32, found: F32) -> npt.NDArray[np.float64]:
    """KL divergence of each position, in nats."""
    p, q = (_log_softmax(values.astype(np.float64)) for values in (expected, found))
    kl: npt.NDArray[np.float64] = (np.exp(p) * (p - q)).sum(-1)
    return kl


def _log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = values - values.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


@pytest.mark.parametrize("cpu", ["max", "cortex-a76"])
def test_in_floats_it_is_exact(bundle: Bundle, exact: F32, cpu: str) -> None:
    found = logits(bundle, f"arm64:{cpu}", "high", "high")
    assert divergence(exact, found).max() < 1e-8
    # Other kernels: the same bits would mean that it ran here.
    assert not np.array_equal(exact, found)


@pytest.mark.parametrize("cpu", ["max", "cortex-a76"])
def test_as_phones_compute_it_is_close(bundle: Bundle, exact: F32, cpu: str) -> None:
    fp16 = logits(bundle, f"arm64:{cpu}", "low", "low")
    floats = logits(bundle, f"arm64:{cpu}", "low", "high")
    for found in (fp16, floats):
        assert 1e-8 < divergence(exact, found).mean() < 0.02
    # It does compute in fp16.
    assert 1e-8 < divergence(floats, fp16).mean() < 0.02


def test_a_processor_without_fp16_ignores_precision(bundle: Bundle) -> None:
    low, high = (logits(bundle, "arm64:cortex-a53", "low", level) for level in ("low", "high"))
    assert np.array_equal(low, high)


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ("max", {"i8sdot": "1", "fp16": "1", "i8mm": "1", "sve2": "1"}),
        ("cortex-a76", {"i8sdot": "1", "fp16": "1", "i8mm": "0", "sve2": "0"}),
        ("cortex-a53", {"i8sdot": "0", "fp16": "0", "i8mm": "0", "sve2": "0"}),
    ],
)
def test_the_engine_finds_the_kernels_that_the_processor_stands_for(
    cpu: str, expected: dict[str, str]
) -> None:
    launch = EmulatedDevice(cpu).launch()
    code = "import MNN.expr as e; e.const([1.0], [1]).read()"
    done = subprocess.run(
        [*launch.command[:-1], "-c", code],
        env=dict(launch.environment or {}),
        capture_output=True,
        text=True,
        check=True,
    )
    told = (done.stdout + done.stderr).partition("supports:")[2].splitlines()[0]
    found = {name.strip(): value.strip() for name, value in (p.split(":") for p in told.split(","))}
    assert expected.items() <= found.items()


def test_answers_and_the_cache_of_keys(bundle: Bundle) -> None:
    with Engine(bundle.path, device=parse_device("arm64:cortex-a76"), threads=1) as engine:
        ids = list(engine.generate([1, 2, 3], max_new_tokens=3))
        assert len(ids) == 3 and engine.position == 5
        assert engine.statistics.peak_rss_bytes > 100e6
        engine.rewind(3)
        assert engine.tokens == (1, 2, 3)
