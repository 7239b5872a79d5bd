"""Pictures made by code, in every mode and shape that has failed for someone, as files' bytes."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

SIZES = {
    "square": (512, 512),
    "photo-4-3": (640, 480),
    "tall": (300, 800),
    "strip": (2048, 100),
    "column": (7, 900),
    "tiny": (20, 20),
    "one": (1, 1),
    "large": (3000, 2000),
}


def photo(width: int, height: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, 3]: slow gradients, hard edges, fine grain."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    x, y = x / max(width - 1, 1), y / max(height - 1, 1)
    a, b, c = rng.uniform(1, 9, (3, 3))
    level = np.stack(
        [128 + 80 * np.sin(a[i] * x + b[i] * y) * np.cos(c[i] * x * y) for i in range(3)], axis=2
    )
    for _ in range(6):
        left, right = sorted(rng.uniform(0, 1, 2))
        top, bottom = sorted(rng.uniform(0, 1, 2))
        inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
        level[inside] = 0.3 * level[inside] + 0.7 * rng.uniform(0, 255, 3)
    disk = (x - 0.6) ** 2 + (y - 0.4) ** 2 < 0.04
    level[disk] = rng.uniform(0, 255, 3)
    level += rng.normal(0, 12, level.shape)
    return np.clip(level, 0, 255).astype(np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def modes(width: int = 90, height: int = 70) -> dict[str, bytes]:
    """Files of every mode, format and orientation of the case list."""
    rgb = Image.fromarray(photo(width, height, 3))
    gray = rgb.convert("L")
    ramp = np.linspace(0, 255, width * height).reshape(height, width).astype(np.uint8)
    alpha = Image.fromarray(ramp)
    rgba = rgb.copy()
    rgba.putalpha(alpha)
    palette = rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=32)
    wide = np.linspace(0, 65535, width * height).reshape(height, width).astype(np.uint16)
    found = {
        "rgb.png": encoded(rgb),
        "rgb.jpeg": encoded(rgb, "JPEG", quality=90),
        "progressive.jpeg": encoded(rgb, "JPEG", progressive=True),
        "rgb.webp": encoded(rgb, "WEBP", lossless=True),
        "rgb.bmp": encoded(rgb, "BMP"),
        "rgb.tiff": encoded(rgb, "TIFF"),
        "gray.png": encoded(gray),
        "gray.jpeg": encoded(gray, "JPEG"),
        "gray-alpha.png": encoded(Image.merge("LA", (gray, alpha))),
        "gray-key.png": encoded(gray, transparency=int(np.asarray(gray)[5, 5])),
        "rgb-key.png": encoded(rgb, transparency=tuple(int(v) for v in np.asarray(rgb)[5, 5])),
        "rgba.png": encoded(rgba),
        "rgba.webp": encoded(rgba, "WEBP", lossless=True),
        "palette.png": encoded(palette),
        "palette-key.png": encoded(palette, transparency=int(np.asarray(palette)[5, 5])),
        "palette-alpha.png": encoded(palette, transparency=bytes(range(0, 256, 8))),
        "palette.gif": encoded(palette, "GIF"),
        "one-bit.png": encoded(rgb.convert("1")),
        "one-bit.tiff": encoded(rgb.convert("1"), "TIFF", compression="group4"),
        "cmyk.jpeg": encoded(rgb.convert("CMYK"), "JPEG"),
        "cmyk.tiff": encoded(rgb.convert("CMYK"), "TIFF"),
        "gray16.png": encoded(Image.fromarray(wide)),
        "gray16.tiff": encoded(Image.fromarray(wide), "TIFF"),
        "animated.gif": encoded(
            palette, "GIF", save_all=True, append_images=[palette.transpose(Image.Transpose(0))]
        ),
        "animated.webp": encoded(
            rgb, "WEBP", save_all=True, append_images=[gray.convert("RGB")], lossless=True
        ),
        "animated.png": encoded(rgb, save_all=True, append_images=[gray.convert("RGB")]),
    }
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        found[f"exif-{orientation}.jpeg"] = encoded(rgb, "JPEG", exif=exif)
    return found


def png_header(width: int, height: int, *, extra: bytes = b"") -> bytes:
    """A PNG that claims a size, and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(100))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + extra
        + chunk(b"IDAT", data)
        + chunk(b"IEND", b"")
    )
