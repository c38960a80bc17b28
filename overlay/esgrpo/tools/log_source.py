"""A log as lines of text, whatever it is packed and encoded in; or why it cannot be read."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from esgrpo.errors import EsgrpoError

PACKED = {b"\x1f\x8b": ("gzip", gzip.open), b"BZh": ("bzip2", bz2.open), b"\xfd7zXZ\x00": ("xz", lzma.open)}
OTHERS = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf": "7-zip"}  # the standard library has none
MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
SAMPLE = 1 << 16  # bytes that decide what a file is
ODD = 0.05  # share of control characters above which a sample is no text; random bytes have 9 %
ZEROS = 0.3  # share of NULs in one half of UTF-16 that is mostly ASCII; above it, other bytes are no text either
_TEXT_CONTROLS = b"\t\n\r\x0b\x0c\x1b\x07\x08\x00"
_CONTROLS = bytes(set(range(32)) - set(_TEXT_CONTROLS)) + b"\x7f"


class Unreadable(Exception):
    """The bytes are no log; the message says what they are."""


class Source:
    """Lines of one log. `packed` and `encoding` are known once it is open; `cut` says why it ended early, if it did."""

    def __init__(self, raw: BinaryIO):
        """Raises Unreadable for bytes that are no text."""
        self.cut = self.packed = ""
        buffered = io.BufferedReader(raw, SAMPLE)
        head = buffered.peek(SAMPLE)
        for magic, name in OTHERS.items():
            if head.startswith(magic):
                raise Unreadable(name)
        for magic, (name, unpack) in PACKED.items():
            if head.startswith(magic):
                self.packed, buffered = name, io.BufferedReader(_Unpacked(unpack(buffered), self), SAMPLE)
                head = buffered.peek(SAMPLE)
                if not head and self.cut:
                    raise Unreadable(f"{name}: {self.cut}")
        self.encoding = _encoding(head)
        self._bytes = buffered

    def __iter__(self) -> Iterator[str]:
        text = io.TextIOWrapper(self._bytes, encoding=self.encoding, errors="replace", newline="\n")
        try:
            for line in text:
                yield line.replace("\x00", "") if "\x00" in line else line  # holes of a file that was cut while it grew
        except OSError as error:  # a file system that fails in the middle
            self.cut = str(error)


class _Unpacked(io.RawIOBase):
    """What a packed file has, up to where it is damaged or ends too early."""

    def __init__(self, packed, source: Source):
        self._packed, self._source = packed, source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            data = self._packed.read1(len(buffer)) if not self._source.cut else b""
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            self._source.cut, data = str(error), b""
        buffer[:len(data)] = data
        return len(data)


def _encoding(head: bytes) -> str:
    """Of text. Raises Unreadable where the bytes are none."""
    for mark, name in MARKS:
        if head.startswith(mark):
            return name
    body = head.strip(b"\x00") or head  # a log that was cut while it grew begins or ends with a hole
    even, odd = head[0::2].count(0), head[1::2].count(0)
    half = max(1, len(head) // 2)
    if odd > ZEROS * half > even or even > ZEROS * half > odd:
        return "utf-16-le" if odd > even else "utf-16-be"
    if body.count(0) > ZEROS * len(body) or len(body.translate(None, _CONTROLS)) < (1 - ODD) * len(body):
        raise Unreadable("binary")
    return "utf-8"


def opened(name: str, who: str) -> BinaryIO:
    """A file, or standard input as "-". Raises EsgrpoError of the command `who` when it cannot be opened."""
    try:
        return sys.stdin.buffer if name == "-" else open(name, "rb")
    except OSError as error:
        raise EsgrpoError(who, f"{name}: {error.strerror}", "a log file", "nothing was read",
                          "give the file, or - for standard input") from None
