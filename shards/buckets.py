"""Resolution buckets: every sample of a bucket has one picture size, so one latent shape. Pure arithmetic."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """A picture size in pixels; its name, WIDTHxHEIGHT, is the name of its folder."""

    width: int
    height: int

    @classmethod
    def parse(cls, name: str) -> "Bucket":
        """`"576x448"` → Bucket(576, 448).

        Raises:
            ValueError: not WIDTHxHEIGHT with both at least 1.
        """
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", name)
        if not match:
            raise ValueError(f"a bucket is WIDTHxHEIGHT in pixels, such as 512x512, not {name!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    def fits(self, width: int, height: int) -> bool:
        """Whether a width × height picture covers this bucket without being enlarged."""
        return width >= self.width and height >= self.height

    def latent_hw(self, downsampling: int) -> tuple[int, int]:
        """(h, w) of the latents of a VAE that shrinks each side `downsampling` times.

        Raises:
            ValueError: a side is not a multiple of `downsampling`.
        """
        if self.width % downsampling or self.height % downsampling:
            raise ValueError(f"bucket {self} is not a multiple of the VAE's downsampling, {downsampling}")
        return self.height // downsampling, self.width // downsampling
