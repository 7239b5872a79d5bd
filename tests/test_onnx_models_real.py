"""Models that people use, out of packages that ship them; skipped where those are not installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from mnnsmith.onnx_models.convert import convert_onnx

pytestmark = [pytest.mark.engine, pytest.mark.slow]
OCR = "rapidocr-onnxruntime"


def model(package: str, name: str) -> Path:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    path = Path(str(distribution.locate_file(name)))
    assert path.is_file()
    return path


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("ch_PP-OCRv4_det_infer", [(1, 3, 64, 96), (2, 3, 96, 64), (3, 3, 160, 160)]),
        ("ch_PP-OCRv4_rec_infer", [(1, 3, 48, 320), (2, 3, 48, 160), (3, 3, 48, 96)]),
        ("ch_ppocr_mobile_v2.0_cls_infer", [(n, 3, 48, 192) for n in (1, 2, 3)]),
    ],
)
def test_reading_text(name: str, shapes: list[tuple[int, ...]], tmp_path: Path) -> None:
    path = model(OCR, f"rapidocr_onnxruntime/models/{name}.onnx")
    told = convert_onnx(path, tmp_path / "out", input_shapes=[{"x": shape} for shape in shapes])
    assert max(told.differences) < 5e-4 and len(told.trials) == 3


def test_kinds_of_files(tmp_path: Path) -> None:
    told = convert_onnx(model("magika", "magika/models/standard_v3_3/model.onnx"), tmp_path / "out")
    assert max(told.differences) < 1e-5
    assert told.rewritten["leading_one_constant"] == 1


@pytest.mark.parametrize("name", ["silero_vad_16k_op15", "silero_vad_op18_ifless"])
def test_voice_activity(name: str, tmp_path: Path) -> None:
    told = convert_onnx(model("silero-vad", f"silero_vad/data/{name}.onnx"), tmp_path / "out")
    assert max(told.differences) < 1e-3
