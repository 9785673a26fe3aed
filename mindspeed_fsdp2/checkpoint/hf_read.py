"""Read tensors of ``.safetensors`` files, and compare what was read with the checksums of the export."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..full_files import Entry, Header
from .folder import read_json
from .hf_work import RECORD

_POLYNOMIAL = 0xEDB88320  # of CRC-32, the lowest power in the highest bit


def read_tensor(entry: Entry, key: str) -> torch.Tensor:
    """Return one tensor, read from its file now.

    Raises:
        CheckpointError: It cannot be read.
    """
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    if not entry.nbytes:
        return tensor
    try:
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.start)
            # By reads, not by a mapping of the file: mapped pages count as this process's memory.
            read_into(stream, memoryview(tensor.flatten().view(torch.uint8).numpy()))
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{entry.file}: {key!r} cannot be read: {error}. Get the file again.") from error
    return tensor


def read_into(stream: Any, memory: memoryview) -> None:
    """Fill ``memory`` from an unbuffered stream.

    Raises:
        EOFError: The stream ends before.
        OSError: It cannot be read.
    """
    done = 0
    while done < memory.nbytes:
        count = stream.readinto(memory[done : done + (1 << 30)])
        if not count:
            raise EOFError(f"the file ends {memory.nbytes - done} bytes early")
        done += count


class Checksums:
    """Compares tensors that are read anyway with the checksums of the files they come from.

    An export notes one checksum for each file. Tensors are read in another order, and by several processes, so each
    gets a sum of its own; those of a file are joined in the end.

    Attributes:
        found: Key in the files -> sum of a tensor that was read.
    """

    def __init__(self, folder: Path, headers: Mapping[str, Header]) -> None:
        """Expect the sums noted in ``folder``; of files without one, those of others say, nothing is looked at."""
        self.found: dict[str, int] = {}
        self._folder = folder
        written = written_sums(folder)
        self._headers = {name: header for name, header in headers.items() if name in written}
        self._written = {name: written[name] for name in self._headers}
        self._keys = {key for header in self._headers.values() for key in header.entries}

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Note a tensor as it came from its file."""
        if key in self._keys:
            raw = tensor.flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
            self.found[key] = zlib.crc32(memoryview(raw.numpy()))

    def raise_if_changed(self, found: Mapping[str, int], advice: str = "") -> None:
        """Raise unless all files are as they were written; reads what is not among ``found``.

        Raises:
            CheckpointError: Lists the files that are not.
        """
        changed = [
            f"{self._folder / name}: {differs(there, self._written[name])}"
            for name, header in self._headers.items()
            if (there := self._sum_of(self._folder / name, header, found)) != self._written[name]
        ]
        if changed:
            listed = "\n".join(changed)
            raise CheckpointError(
                f"{listed}\nGet the files again, or remove {self._folder / RECORD} if they were changed on purpose."
                f"{advice}"
            )

    def _sum_of(self, file: Path, header: Header, found: Mapping[str, int]) -> str:
        try:
            with file.open("rb") as stream:
                total = zlib.crc32(stream.read(header.begin))
        except OSError as error:
            raise CheckpointError(f"{file}: it cannot be read: {error.strerror}. Get the file again.") from error
        for key, entry in header.entries.items():
            if key not in found:
                self.add(key, read_tensor(entry, key))
            total = _joined(total, found.get(key, self.found.get(key, 0)), entry.nbytes)
        return f"{total:08x}"


def written_sums(folder: Path) -> dict[str, str]:
    """Return name of a file -> checksum that it was exported with; empty for files of others."""
    record = read_json(folder / RECORD)
    files = record.get("files") if isinstance(record, dict) else None
    if not isinstance(files, dict):
        return {}
    return {name: str(said.get("crc32")) for name, said in files.items() if isinstance(said, dict)}


def differs(there: str, written: str) -> str:
    """Return the words for another checksum than was written."""
    return f"its checksum is {there}, not {written} as when it was written"


def _joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two runs of bytes from that of each; the second has ``length`` bytes."""
    power, square, left = 1 << 31, 1 << 30, 8 * length  # 1 and x: the first sum is moved on by as many bits
    while left:
        if left & 1:
            power = _times(power, square)
        square = _times(square, square)
        left >>= 1
    return _times(power, first) ^ second


def _times(one: int, other: int) -> int:
    """Return the product of two polynomials over GF(2), modulo that of CRC-32."""
    product, bit = 0, 1 << 31
    while bit:
        if one & bit:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return product
