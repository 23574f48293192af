"""More than forty hostile files, each with its outcome: `accepted`, or the reason for its rejection."""

import struct
import zlib

import numpy as np
from PIL import Image, PngImagePlugin

from tests.faults.decoders import ACCEPTED
from tests.tiny import picture, saved

RNG = np.random.default_rng(7)


def noise(width: int = 96, height: int = 96, format: str = "PNG", **options: object) -> bytes:
    """Make a picture that does not compress."""
    return saved(Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)), format, **options)


def chunk(kind: bytes, data: bytes) -> bytes:
    """Make a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, pixels: bytes, *more: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """Make a PNG from its parts, with compressed `pixels`."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *more, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def grey_rows(width: int, height: int) -> bytes:
    """Make compressed rows of a grey PNG."""
    return zlib.compress((b"\0" + b"\x80" * width) * height, 9)


def tiff(*entries: tuple[int, int, int, int], next_directory: int = 0, data: bytes = b"") -> bytes:
    """Make a little-endian TIFF with one directory; entries are tag, type, count, value."""
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", 8) + directory + struct.pack("<I", next_directory) + data


def tiff_of(width: int, height: int, num_bytes: int, next_directory: int = 0) -> bytes:
    """Make an uncompressed grey TIFF whose only strip has `num_bytes`."""
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    place = 8 + 2 + 12 * 8 + 4
    entries += [(273, 4, 1, place), (278, 4, 1, height), (279, 4, 1, width * height % 2**32)]
    return tiff(*entries, next_directory=next_directory, data=b"\x80" * num_bytes)


def gif(width: int, height: int) -> bytes:
    """Make a GIF with a screen of this size and no frames."""
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + b";"


def with_exif(exif: bytes) -> bytes:
    """Make a valid JPEG with these bytes as its EXIF."""
    data = noise(format="JPEG")
    body = b"Exif\0\0" + exif
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]


def many_scans() -> bytes:
    """Make a progressive JPEG whose last scan is repeated 2,000 times."""
    data = noise(format="JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * 2000 + b"\xff\xd9"


def huge_jpeg() -> bytes:
    """Make a small JPEG whose header declares 65,500 x 65,500."""
    data = bytearray(noise(format="JPEG"))
    place = data.index(b"\xff\xc0")
    data[place + 5 : place + 9] = struct.pack(">HH", 65500, 65500)
    return bytes(data)


def flipped(data: bytes, place: int) -> bytes:
    """Return `data` with one byte inverted."""
    return data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]


def hostile() -> dict[str, tuple[bytes, str]]:
    """Return name → file and outcome, for buckets of 64 and 128 and the default limits."""
    sound = picture(np.random.default_rng(1), 96, 96)
    text = zlib.compress(b"A" * (80 << 20), 1)
    icc = b"icc\0\0" + zlib.compress(bytes(80 << 20), 1)
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "x" * 300_000)
    grey = Image.new("L", (96, 96), 128)
    webp, avif = noise(format="WEBP"), noise(format="AVIF")
    not_an_image, undecodable, too_many = "not_an_image", "undecodable", "too_many_pixels"
    return {
        # no pictures
        "zero bytes": (b"", not_an_image),
        "one byte": (b"\xff", not_an_image),
        "HTML as .jpg": (b"<!DOCTYPE html><html><body>404</body></html>", not_an_image),
        "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg" width="96" height="96"/>', not_an_image),
        "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 96 96\nshowpage\n", not_an_image),
        "PDF": (b"%PDF-1.7\n1 0 obj <<>> endobj\n", not_an_image),
        "BMP, not allowed": (saved(grey, "BMP"), not_an_image),
        "ICO, not allowed": (saved(grey, "ICO"), not_an_image),
        "PPM, not allowed": (b"P6 96 96 255\n" + bytes(96 * 96 * 3), not_an_image),
        "random bytes": (RNG.bytes(4096), not_an_image),
        "zeros": (bytes(1 << 20), not_an_image),
        "JPEG's first three bytes": (b"\xff\xd8\xff", not_an_image),
        "RIFF that is a WAV": (b"RIFF\x24\0\0\0WAVEfmt ", not_an_image),
        # bombs
        "PNG of 400 megapixels": (png(20_000, 20_000, b""), too_many),
        "PNG of 2^31 by 2^31": (png(2**31 - 1, 2**31 - 1, b""), too_many),
        "PNG of 1 bit, 99 megapixels": (png(9_900, 10_000, zlib.compress(bytes(1239 * 10_000), 1), depth=1), ACCEPTED),
        "PNG with 10 MB behind its pixels": (png(96, 96, grey_rows(96, 96) + bytes(10 << 20)), ACCEPTED),
        "PNG whose pixels unpack to 256 MB": (png(96, 96, zlib.compress(bytes(1 << 28), 1)), ACCEPTED),
        "PNG with a zTXt bomb": (png(96, 96, grey_rows(96, 96), chunk(b"zTXt", b"k\0\0" + text)), not_an_image),
        "PNG with an iCCP bomb": (png(96, 96, grey_rows(96, 96), chunk(b"iCCP", icc)), not_an_image),
        "PNG with 300 kB of text": (saved(grey, "PNG", pnginfo=info), ACCEPTED),
        "GIF with a screen of 4 gigapixels": (gif(65535, 65535), not_an_image),
        "WebP of 268 megapixels": (
            b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xfe\x3f\0" * 2 + bytes(4),
            not_an_image,
        ),
        "TIFF of 10^18 pixels": (tiff_of(10**9, 10**9, 64), too_many),
        "JPEG of 4 gigapixels": (huge_jpeg(), too_many),
        # odd dimensions
        "1x1": (saved(Image.new("RGB", (1, 1)), "PNG"), "too_small"),
        "30000x1": (saved(Image.new("L", (30_000, 1)), "PNG"), "too_small"),
        "1x30000": (saved(Image.new("L", (1, 30_000)), "PNG"), "too_small"),
        "30001x64": (saved(Image.new("L", (30_001, 64)), "PNG"), too_many),
        "30000x64": (saved(Image.new("L", (30_000, 64)), "PNG"), ACCEPTED),
        "0x0 PNG": (png(0, 0, b""), not_an_image),
        "0x0 GIF": (gif(0, 0), not_an_image),
        "TIFF without a width": (tiff((257, 4, 1, 96)), not_an_image),
        # cut and corrupt
        "cut JPEG": (sound[: len(sound) // 2], undecodable),
        "cut PNG": (noise()[:5000], undecodable),
        "cut WebP": (webp[: len(webp) // 2], not_an_image),
        "cut AVIF": (avif[: len(avif) // 2], not_an_image),
        "cut GIF": (noise(format="GIF")[:3000], undecodable),
        "cut TIFF": (noise(format="TIFF")[:-9000], undecodable),
        "PNG with a wrong CRC in its pixels": (flipped(noise(), 60), undecodable),
        "PNG with a wrong CRC in its header": (flipped(noise(), 17), not_an_image),
        "PNG without pixels": (png(96, 96, b""), undecodable),
        "JPEG without tables": (sound[:2] + sound[sound.index(b"\xff\xc0") :], undecodable),
        "AVIF of nothing but a header": (b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miaf" + bytes(8), not_an_image),
        "GIF without frames": (gif(96, 96), not_an_image),
        "TIFF whose directory is its own successor": (tiff_of(96, 96, 9216, next_directory=8), ACCEPTED),
        "TIFF whose strip is past the end": (tiff_of(96, 96, 64), undecodable),
        "TIFF with 65535 entries": (b"II*\0\x08\0\0\0\xff\xff" + bytes(64), not_an_image),
        # metadata and other attachments
        "JPEG with a corrupt ICC profile": (noise(format="JPEG", icc_profile=RNG.bytes(3000)), "bad_profile"),
        "JPEG with an empty ICC profile": (noise(format="JPEG", icc_profile=bytes(128)), "bad_profile"),
        "JPEG with corrupt EXIF": (with_exif(RNG.bytes(500)), ACCEPTED),
        "JPEG whose EXIF goes in circles": (with_exif(tiff((0x8769, 4, 1, 8), next_directory=8)), ACCEPTED),
        "JPEG with 2,000 scans": (many_scans(), ACCEPTED),
        "JPEG and ZIP": (sound + b"PK\x03\x04" + RNG.bytes(500) + b"PK\x05\x06" + bytes(18), ACCEPTED),
        "GIF and JavaScript": (gif(96, 96).replace(b"GIF89a`\0", b"GIF89a/*") + b"*/=1;alert(1)", not_an_image),
        "JPEG within HTML": (b"<html>" + sound, not_an_image),
        "PNG that is animated": (
            saved(grey, "PNG", save_all=True, append_images=[Image.new("L", (96, 96), i) for i in range(20)]),
            ACCEPTED,
        ),
    }
