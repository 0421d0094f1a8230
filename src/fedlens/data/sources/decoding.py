"""From any image that Pillow opens to RGB pixels of one size.

Grey, palette, CMYK and 16-bit images become RGB, transparency is laid over white, and photographs
are turned as their EXIF tag says. A square is cut from the centre, or the image is squashed.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

Crop = Literal["centre", "squash"]
Pixels = npt.NDArray[np.uint8]

VERSION = 1  # increase it whenever the same image gives other pixels
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
WITH_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")


def square(image: Image.Image, size: int, crop: Crop) -> Pixels:
    """uint8 [3, size, size], bicubic and antialiased.

    `centre`: the shorter side becomes `size` pixels, and what is beyond the central square of the
    longer one is cut off. `squash`: both sides become `size`, whatever the shape.
    """
    upright = as_rgb(image)
    if upright.size != (size, size):
        if crop == "centre":
            upright = ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC)
        else:
            upright = upright.resize((size, size), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(upright, dtype=np.uint8).transpose(2, 0, 1))


def as_rgb(image: Image.Image) -> Image.Image:
    """The image's first frame, upright, in RGB."""
    image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BITS:  # the high byte: Pillow's own conversion would clip at 255
        high = np.clip(np.asarray(image, dtype=np.int64) >> 8, 0, 255).astype(np.uint8)
        image = Image.fromarray(high)
    if image.mode in WITH_ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
