"""Block maps (bmap 2.0): the blocks of an image that must be written, with their SHA-256.

bmaptool reads these maps. bmaptool can also create maps, but its maps omit all holes in a sparse file. However, the
file system may use blocks that lie in a hole, such as those of an empty journal, and these blocks must be zero on the
card. This module omits only the blocks that are free in the file system.
"""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from toolchain.errors import ArtefactDamaged

BLOCK = 4096
"""The size of a block in bytes."""

_LONGEST_RANGE = 4096
"""The maximum number of blocks in a range. It is limited because the comparison reads a whole range into memory."""
_NO_CHECKSUM = "0" * 64


@dataclass(frozen=True)
class Range:
    """Blocks from ``first`` to ``last``, and the SHA-256 of their content."""

    first: int
    last: int
    sha256: str

    @property
    def size(self) -> int:
        """The size of the range in bytes."""
        return (self.last - self.first + 1) * BLOCK


@dataclass(frozen=True)
class BlockMap:
    """The size of an image in bytes, and the ranges of blocks to write."""

    size: int
    ranges: tuple[Range, ...]


def measured(image: Path, mapped: Iterable[tuple[int, int]]) -> BlockMap:
    """Return an image's block map. ``mapped`` lists the ranges of blocks (first, last) to write to the card."""
    ranges = []
    with image.open("rb") as stream:
        for first, last in _split(mapped):
            stream.seek(first * BLOCK)
            content = stream.read((last - first + 1) * BLOCK)
            ranges.append(Range(first, last, hashlib.sha256(content).hexdigest()))
    return BlockMap(image.stat().st_size, tuple(ranges))


def _split(mapped: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for first, last in mapped:
        for start in range(first, last + 1, _LONGEST_RANGE):
            yield start, min(last, start + _LONGEST_RANGE - 1)


def text_of(found: BlockMap) -> str:
    """Return the block map as XML."""
    top = ET.Element("bmap", version="2.0")
    for name, value in (
        ("ImageSize", found.size),
        ("BlockSize", BLOCK),
        ("BlocksCount", -(-found.size // BLOCK)),
        ("MappedBlocksCount", sum(item.size for item in found.ranges) // BLOCK),
        ("ChecksumType", "sha256"),
        ("BmapFileChecksum", _NO_CHECKSUM),
    ):
        ET.SubElement(top, name).text = f" {value} "
    blocks = ET.SubElement(top, "BlockMap")
    for item in found.ranges:
        ET.SubElement(blocks, "Range", chksum=item.sha256).text = f" {item.first}-{item.last} "
    ET.indent(top, "    ")
    text = '<?xml version="1.0" ?>\n' + ET.tostring(top, encoding="unicode") + "\n"
    return text.replace(_NO_CHECKSUM, hashlib.sha256(text.encode()).hexdigest(), 1)


def read(path: Path) -> BlockMap:
    """Read a map that ``text_of`` made. Raises ArtefactDamaged if the file is not a block map or was changed."""
    text = path.read_text(errors="replace")
    claimed = re.search(r"<BmapFileChecksum> ([0-9a-f]{64}) <", text)
    whole = text.replace(claimed[1], _NO_CHECKSUM, 1) if claimed else ""
    if claimed is None or hashlib.sha256(whole.encode()).hexdigest() != claimed[1]:
        raise ArtefactDamaged(
            f"{path} is not an intact block map",
            expected="a bmap file whose checksum matches its content",
            found=f"checksum {claimed[1]}, which does not match" if claimed else "no checksum",
            fix="run ./inv sd-image",
        )
    top = ET.fromstring(text)  # noqa: S314 (this build made it)
    ranges = []
    for item in top.iter("Range"):
        first, _, last = (item.text or "").strip().partition("-")
        ranges.append(Range(int(first), int(last or first), item.get("chksum", "")))
    return BlockMap(int(top.findtext("ImageSize", "0")), tuple(ranges))
