"""Handmade ICC profiles, and the arithmetic that they define."""

import struct

import numpy as np

# columns: the colorants in the profile's connection space (D50)
ADOBE_RGB = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
SRGB = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])


def _fixed(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def _xyz(values: np.ndarray) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(map(_fixed, values.tolist()))


def _gamma(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"


def _text(kind: bytes) -> bytes:
    if kind == b"desc":
        return b"desc\0\0\0\0" + struct.pack(">I", 5) + b"test\0" + bytes(78)
    return b"text\0\0\0\0none"


def make_profile(space: bytes, tags: dict[bytes, bytes], connection: bytes = b"XYZ ", kind: bytes = b"mntr") -> bytes:
    """Build a version 2 profile for the colour space `space` (4 bytes)."""
    tags = {b"desc": _text(b"desc"), b"cprt": _text(b"text"), b"wtpt": _xyz(np.array([0.9642, 1, 0.8249])), **tags}
    directory, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        directory += name + struct.pack(">II", start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    header = struct.pack(">I4sI4s4s4s", start + len(body), b"lcms", 0x02400000, kind, space, connection)
    header += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    header += b"".join(map(_fixed, (0.9642, 1, 0.8249)))
    return header + bytes(128 - len(header)) + directory + body


def rgb_profile(colorants: np.ndarray, gamma: float) -> bytes:
    """Build an RGB profile from a matrix and a gamma."""
    tags = {name: _xyz(column) for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), colorants.T, strict=True)}
    return make_profile(b"RGB ", tags | {name: _gamma(gamma) for name in (b"rTRC", b"gTRC", b"bTRC")})


def grey_profile(gamma: float) -> bytes:
    """Build a grey profile from a gamma."""
    return make_profile(b"GRAY", {b"kTRC": _gamma(gamma)})


def cmyk_profile() -> bytes:
    """Build a CMYK profile from a table of 2⁴ corners: ink, mostly C and K, reduces lightness and adds no colour."""
    corners = np.array(np.meshgrid(*[[0, 1]] * 4, indexing="ij")).reshape(4, -1).T
    lightness = 1 - corners @ np.array([0.3, 0.2, 0.1, 0.4])
    table = np.stack([lightness, np.full(16, 0.5), np.full(16, 0.5)], axis=-1)
    codes = np.round(table * np.array([0xFF, 0x100, 0x100])).astype(np.uint8)
    codes[:, 1:] = 128
    linear = bytes(range(256))
    identity = b"".join(_fixed(float(i == j)) for i in range(3) for j in range(3))
    lut = b"mft1\0\0\0\0" + bytes((4, 3, 2, 0)) + identity + linear * 4 + codes.tobytes() + linear * 3
    return make_profile(b"CMYK", {b"A2B0": lut}, b"Lab ", b"prtr")


def to_srgb(values: np.ndarray, colorants: np.ndarray, gamma: float) -> np.ndarray:
    """Convert (…, 3) in [0, 255] from `rgb_profile(colorants, gamma)` to sRGB by its definition."""
    linear = np.linalg.solve(SRGB, colorants) @ ((values / 255.0) ** gamma).reshape(-1, 3).T
    return 255 * encode_srgb(linear.T.reshape(values.shape).clip(0, 1))


def encode_srgb(linear: np.ndarray) -> np.ndarray:
    """Apply the sRGB transfer function (IEC 61966-2-1)."""
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.maximum(linear, 1e-9) ** (1 / 2.4) - 0.055)
