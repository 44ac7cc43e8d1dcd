"""8-bit grey PNG files: a writer without dependencies, a reader through Pillow."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode_png(image: np.ndarray) -> bytes:
    """A grey PNG file of (height, width) uint8."""
    if image.ndim != 2 or image.dtype != np.uint8:
        raise ValueError(f"image must be (height, width) uint8, got {image.shape} {image.dtype}")
    height, width = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = np.pad(image, ((0, 0), (1, 0)))  # each row after its filter type, 0: none
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, payload) for kind, payload in chunks)


def read_png(path: str | os.PathLike[str]) -> np.ndarray:
    """A PNG file as (height, width) uint8, colours made grey.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: the file is empty or damaged.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "reading PNG files needs Pillow, which is not installed: pip install flashtrain[images]"
        ) from error
    if not Path(path).stat().st_size:
        raise ValueError(f"{path} is empty")
    try:
        with Image.open(path) as image:
            return np.array(image.convert("L"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path} is a damaged image ({error}): fetch it again") from error


def _chunk(kind: bytes, payload: bytes) -> bytes:
    checksum = zlib.crc32(kind + payload)
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", checksum)
