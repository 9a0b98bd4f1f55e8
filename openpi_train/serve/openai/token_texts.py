"""The text and bytes of single tokens, for answers with log-probabilities. Read next: `answers.py`.

A token of a byte-level tokenizer may be a part of a character, so that tokens have bytes, and some have no text.
"""

import functools
import json
import re
from typing import Any

from openpi_train.data.tokenizers.text_tokenizer import TOKENIZER, TextTokenizer

_SPACE, _BYTE = "\u2581", re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """The texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._bytes = _byte_of_letter() if "ByteLevel" in _decoders(json.loads(tokenizer.files[TOKENIZER])) else None

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; of a special one, those of its name."""
        return self._bytes_of(self._tokenizer.piece(token))

    def text_of(self, token: int) -> str:
        """The token's text; as in OpenAI's answers `bytes:\\xe2` for what is only a part of a character."""
        found = self.bytes_of(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _bytes_of(self, piece: str) -> bytes:
        if self._bytes is not None:
            if all(letter in self._bytes for letter in piece):
                return bytes(self._bytes[letter] for letter in piece)
            return piece.encode()  # an added token
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode()


def _decoders(said: Any) -> set[str]:
    """The types of the decoders that tokenizer.json names."""
    decoder = said.get("decoder") or {}
    return {one.get("type", "") for one in (decoder, *decoder.get("decoders", ()))}


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable ones stand for themselves.

    Source: GPT-2's `encoder.py`, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
