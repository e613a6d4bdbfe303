"""Decode one image and cut the part that a network sees, in one resampling."""

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fleetx.data.checks import require_plain_file
from fleetx.extras import needs_extra

with needs_extra("images", "Reading images"):
    from PIL import Image, UnidentifiedImageError

# Pillow reads some forty formats, and runs Ghostscript for one of them, whatever the name of the file says.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10
# The short side that a centre crop of 224 is cut from.
SHORT_SIDE = 256 / 224
# A JPEG is decoded at a half, quarter or eighth of its size only if the cut still has twice the pixels asked for:
# the resampling that follows then hides the coarser one before it.
DRAFT_MARGIN = 2.0

Box = tuple[float, float, float, float]
# What Pillow raises for a file that is damaged or no image at all.
DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


def read_train(path: Path, size: int, rng: np.random.Generator) -> Tensor:
    """A random part of the image, perhaps mirrored: bytes of shape (size, size, 3)."""
    with open_image(path) as image:
        box = random_box(*image.size, rng)
        cut = resample(image, box, size)
    if rng.random() < 0.5:
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _as_tensor(cut)


def read_val(path: Path, size: int) -> Tensor:
    """The centre of the image."""
    with open_image(path) as image:
        return _as_tensor(resample(image, centre_box(*image.size), size))


def open_image(path: Path) -> Image.Image:
    """Open an image of one of `FORMATS`; its pixels are read later."""
    require_plain_file(path)
    try:
        return Image.open(path, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is no image in one of the formats {', '.join(FORMATS)}: convert it") from None


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """A box of random area and ratio; where none fits in ten tries, the largest centred one of a permitted ratio."""
    shares, ratios, lefts, tops = rng.random((4, TRIES)).tolist()
    for share, ratio, left, top in zip(shares, ratios, lefts, tops, strict=True):
        area = width * height * (AREA[0] + share * (AREA[1] - AREA[0]))
        shape = math.exp(math.log(RATIO[0]) + ratio * math.log(RATIO[1] / RATIO[0]))
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            x, y = int(left * (width - wide + 1)), int(top * (height - high + 1))
            return x, y, x + wide, y + high
    wide, high = min(width, height * RATIO[1]), min(height, width / RATIO[0])
    return _centred(width, height, wide, high)


def centre_box(width: int, height: int) -> Box:
    """The part that scaling the short side to 256 and cutting 224 from the centre would leave."""
    side = min(width, height) / SHORT_SIDE
    return _centred(width, height, side, side)


def resample(image: Image.Image, box: Box, size: int) -> Image.Image:
    """The box, scaled to a square."""
    width, height = image.size
    wide, high = box[2] - box[0], box[3] - box[1]
    wanted = DRAFT_MARGIN * size
    image.draft(image.mode, (math.ceil(width * wanted / wide), math.ceil(height * wanted / high)))
    if image.size != (width, height):
        across, down = image.size[0] / width, image.size[1] / height
        box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _grey_of_16_bits(image)
    if image.mode not in ("RGB", "L"):
        # Pillow warns when a palette with transparency loses it in one go.
        picture = image.convert("RGBA") if "transparency" in image.info else image
        return picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
    cut = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return cut if cut.mode == "RGB" else cut.convert("RGB")


def _grey_of_16_bits(image: Image.Image) -> Image.Image:
    """The upper eight bits, as Pillow takes them of colours; its own conversion makes all brighter than 255 white."""
    # Tags 258 and 262 are the bits of a value and whether 0 is black: 12 bits and negatives have the same mode.
    tags = getattr(image, "tag_v2", {})
    if image.format != "PNG" and not (image.mode != "I" and tags.get(258) == (16,) and tags.get(262) == 1):
        raise ValueError(
            f"its values (mode {image.mode}) have no known white: of images with one channel of more than 8 bits only "
            "PNG and unsigned 16-bit TIFF files with black as 0 can be read; convert it"
        )
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _centred(width: int, height: int, wide: float, high: float) -> Box:
    x, y = (width - wide) / 2, (height - high) / 2
    return x, y, x + wide, y + high


def _as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image))
