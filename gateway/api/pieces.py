"""A long JSON body, decoded field by field when a field is asked for.

A decoder holds the interpreter until it is done, whatever thread it is in. Most of a hostile body stands in fields that
nobody reads, and most of an honest one in a list of messages: the first is only skimmed (a gigabyte a second), the
second decoded an element at a time, so that other threads get their turn between two.

That is why this module is never compiled (`setup.py`): Python's loops let other threads in, compiled ones do not.

What skimming does not look at in a field that is not read, the worker judges: a number with too many digits.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping

import msgspec

from gateway.errors import BadRequest

_skim = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode

_LISTS_OF_OBJECTS = frozenset({"messages", "tools"})
_SLICE_BYTES = 1 << 20
_MOST = ((b",", 4_000_000, "commas"), (b"{", 250_000, "objects"), (b"[", 250_000, "lists"), (b'":', 500_000, "keys"))
"""A value costs the decoder 40 ns, an object or list 200, a key 350: together below half a second, where all of it
stands in one field that is read."""


def count_values(body: bytes) -> None:
    """Refuses a body of so many small values that decoding it would hold up the process: decoding runs under the
    interpreter's lock, whatever thread it is in. Counting takes a millisecond a megabyte, a slice at a time; what
    stands in texts is counted too, as the limits are far beyond any model's context."""
    for sign, limit, what in _MOST:
        seen = 0
        for at in range(0, len(body), _SLICE_BYTES):
            seen += body.count(sign, at, at + _SLICE_BYTES)
            if seen > limit:
                raise BadRequest(f"the body has more than {limit} {what}", code="too_many_values")


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
