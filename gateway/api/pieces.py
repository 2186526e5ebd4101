"""A long JSON body, decoded field by field when a field is asked for.

A decoder holds the interpreter until it is done, whatever thread it is in. Most of a hostile body stands in fields that
nobody reads, and most of an honest one in a list of messages: the first is only skimmed (a gigabyte a second), the
second decoded an element at a time, so that other threads get their turn between two.

What skimming does not look at in a field that is not read, the worker judges: a number with too many digits.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping

import msgspec

_skim = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode

_LISTS_OF_OBJECTS = frozenset({"messages", "tools"})
_SLICE_BYTES = 1 << 20


class Pieces(Mapping[str, object]):
    """The fields of one body. `decode` reads one value, and its errors are those of asking for a field."""

    __slots__ = ("_decode", "_raw", "_read")

    def __init__(self, body: bytes, decode: Callable[[bytes | msgspec.Raw], object]) -> None:
        """Raises UnicodeDecodeError, RecursionError, or MsgspecError for what is no JSON object."""
        if not body.isascii():
            reader = codecs.getincrementaldecoder("utf-8")()
            for at in range(0, len(body), _SLICE_BYTES):
                reader.decode(body[at : at + _SLICE_BYTES])
            reader.decode(b"", final=True)
        self._raw = _skim(body)
        self._decode = decode
        self._read: dict[str, object] = {}

    def __getitem__(self, name: str) -> object:
        read = self._read
        if name in read:
            return read[name]
        raw = self._raw[name]
        if name in _LISTS_OF_OBJECTS and bytes(memoryview(raw)[:1]) == b"[":
            read[name] = [self._decode(element) for element in _elements(raw)]
        else:
            read[name] = self._decode(raw)
        return read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)
