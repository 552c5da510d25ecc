"""The picture of a row order: which parts of the table the first steps touch, per split."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.splits import RankShare

if TYPE_CHECKING:
    from ray_lance_stream.stream import LanceStream

MAX_PARTS = 1000
MAX_LINES = 1000  # splits beyond that share lines
_LEFT, _TOP, _BOTTOM, _RIGHT = 150, 50, 70, 20
_MIN_HEIGHT = 300
_GOLDEN = 0.618034  # turns of the colour circle from one worker to the next, far from each other
_GREY, _BLACK = (245, 245, 245), (0, 0, 0)


@dataclass(frozen=True)
class Touched:
    """What the first steps of an epoch touch.

    Attributes:
        parts: int32 [lines, parts], the first step that touches a part of the table in a line of splits; -1: none does.
        ranks: int32 [lines], the worker that owns the splits of a line.
        blocks: (first split, end split) of each worker.
        num_steps, num_rows: drawn in all.
        table_rows: rows of the table.
        title: what is drawn.
    """

    parts: np.ndarray
    ranks: np.ndarray
    blocks: tuple[tuple[int, int], ...]
    num_steps: int
    num_rows: int
    table_rows: int
    title: str


def touched_parts(stream: LanceStream, epoch: int, num_steps: int, workers: int) -> Touched:
    """Compute what to draw; reads no rows.

    Raises:
        ConfigError: more workers than splits, or a number that is no multiple of replicas.
    """
    summary, grid = stream.plan, stream._plan.grid
    assert summary.steps_per_epoch is not None
    num_steps = min(num_steps, summary.steps_per_epoch)
    shares = [RankShare.of(grid, workers, rank, summary.replicas) for rank in range(workers)]
    num_lines, num_parts = min(grid.num_splits, MAX_LINES), min(summary.table_rows, MAX_PARTS)
    parts = np.full((num_lines, num_parts), -1, np.int32)
    num_rows = 0
    for step in reversed(range(num_steps)):  # so that the first step that touches a part stays
        rows = np.asarray(stream.row_ids(epoch, step))  # cycle by cycle, a row of each split
        splits = np.arange(len(rows)) % grid.num_splits
        parts[splits * num_lines // grid.num_splits, rows * num_parts // summary.table_rows] = step
        num_rows += len(rows)
    owners = np.zeros(grid.num_splits, np.int32)
    for rank, share in reversed(list(enumerate(shares))):  # of workers that share their rows, the first one
        owners[share.block.lo : share.block.hi] = rank
    return Touched(
        parts=parts,
        ranks=owners[np.arange(num_lines) * grid.num_splits // num_lines],
        blocks=tuple((share.block.lo, share.block.hi) for share in shares),
        num_steps=num_steps,
        num_rows=num_rows,
        table_rows=summary.table_rows,
        title=f"{summary.table}, version {summary.version}: epoch {epoch}, {num_steps} steps of {summary.global_batch_size:,}"
        f" rows, {summary.order}",
    )


def require_pillow() -> Any:
    """The modules of Pillow that draw.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ConfigError(
            "drawing needs Pillow, which is not installed: pip install 'ray_lance_stream[plot]'"
        ) from None
    return Image, ImageDraw, ImageFont


def colour(rank: int, step: int, num_steps: int) -> tuple[int, int, int]:
    """Of a worker's step: later steps are darker."""
    light = 0.65 - 0.4 * (step / max(num_steps - 1, 1))
    red, green, blue = colorsys.hls_to_rgb(0.6 + rank * _GOLDEN, light, 0.75)
    return round(255 * red), round(255 * green), round(255 * blue)


def raster(touched: Touched) -> np.ndarray:
    """uint8 [lines, parts, 3]: the colours of the parts."""
    image = np.full((*touched.parts.shape, 3), _GREY, np.uint8)
    for line, rank in enumerate(touched.ranks.tolist()):
        steps = np.array([colour(rank, step, touched.num_steps) for step in range(touched.num_steps)], np.uint8)
        found = touched.parts[line] >= 0
        image[line, found] = steps[touched.parts[line, found]]
    return image


def draw(touched: Touched, path: str) -> None:
    """Write the picture, with the workers beside the lines and the rows of the table below."""
    image_module, draw_module, font_module = require_pillow()
    cells = raster(touched)
    num_lines, num_parts = touched.parts.shape
    high, wide = max(1, -(-_MIN_HEIGHT // num_lines)), max(1, MAX_PARTS // num_parts)
    cells = cells.repeat(high, axis=0).repeat(wide, axis=1)
    height, width = cells.shape[:2]
    picture = image_module.new("RGB", (_LEFT + width + _RIGHT, _TOP + height + _BOTTOM), "white")
    picture.paste(image_module.fromarray(cells), (_LEFT, _TOP))
    pen, font = draw_module.Draw(picture), font_module.load_default(size=12)
    pen.text((_LEFT, 16), touched.title, fill=_BLACK, font=font)
    num_splits = touched.blocks[-1][1]
    last_y = -100
    for rank, (lo, hi) in enumerate(touched.blocks):
        top, end = (_TOP + split * height // num_splits for split in (lo, hi))
        pen.rectangle((_LEFT - 12, top, _LEFT - 5, max(top, end - 1)), fill=colour(rank, 0, 1))
        middle = (top + end) // 2 - 7
        if middle - last_y >= 14:  # of many workers, as many have a label as there is room for
            pen.text((8, middle), f"{rank}: splits {lo}-{hi - 1}", fill=_BLACK, font=font)
            last_y = middle
    bottom = _TOP + height
    pen.text((8, 32), "worker: splits", fill=_BLACK, font=font)
    pen.text((_LEFT, bottom + 6), "row 0 of the table", fill=_BLACK, font=font)
    last = f"row {touched.table_rows - 1:,}"
    pen.text((_LEFT + width - pen.textlength(last, font=font), bottom + 6), last, fill=_BLACK, font=font)
    for step in range(min(touched.num_steps, 20)):
        left = _LEFT + 90 + step * 44
        pen.rectangle((left, bottom + 38, left + 12, bottom + 50), fill=colour(0, step, touched.num_steps))
        pen.text((left + 16, bottom + 37), str(step), fill=_BLACK, font=font)
    pen.text((_LEFT, bottom + 37), "darker: step", fill=_BLACK, font=font)
    picture.save(path, format="PNG")
