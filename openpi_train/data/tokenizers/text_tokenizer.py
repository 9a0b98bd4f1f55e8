"""Tokenizers of language models: a folder with a `tokenizer.json`, as Hugging Face publishes it.

The `tokenizers` library computes the tokens; this module adds what transformers reads from the other files of the
folder: special tokens by role, and chat templates. Read next: `text/chat_template.py`, `text/text_encoder.py`.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsInt

import tokenizers

from openpi_train.data.core.hub import SCHEME, hub_folder
from openpi_train.runtime.exits import UsageError

# A model's tokenizer, in a checkpoint.
FOLDER = "tokenizer"
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_SPECIAL, _TEMPLATE, _OLD_TEMPLATE = "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
# What is read of the folder.
FILES = (TOKENIZER, CONFIG, _SPECIAL, _TEMPLATE, _OLD_TEMPLATE)
# What is kept in checkpoints: also files that other programs read of a published model.
GENERATION = "generation_config.json"
_OF_THE_MODEL = ("config.json", GENERATION)
KEPT = (*FILES, *_OF_THE_MODEL, "tokenizer.model", "added_tokens.json", "vocab.json", "merges.txt")
_PROBE = "a"
_HOW = "--data.tokenizer takes a folder with a tokenizer.json, or hub:USER/NAME"


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The tokens of a text, and the characters that each stands for: from `starts`, before `ends`."""

    tokens: list[int]
    spans: list[tuple[int, int]]


class TextTokenizer:
    """A tokenizer from the content of its files by name. Picklable, with those that are read; `name` is for messages.

    Raises ValueError if a file is damaged.
    """

    def __init__(self, files: Mapping[str, bytes], name: str):
        self.files, self.name = dict(files), name
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self.files[TOKENIZER])
        except Exception as error:  # the library raises plain Exceptions
            raise ValueError(f"{name}: {TOKENIZER} cannot be read ({error}); fetch it again") from error
        # Published files often contain the settings of their author's last call.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = {**self._json(_SPECIAL), **self._json(CONFIG)}

    def __reduce__(self) -> tuple[Any, ...]:
        return TextTokenizer, ({file: content for file, content in self.files.items() if file in FILES}, self.name)

    def __repr__(self) -> str:
        return f"TextTokenizer({self.name!r}, {self.num_tokens} tokens)"

    @functools.cached_property
    def num_tokens(self) -> int:
        """One more than the largest token."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def beyond(self, vocab_size: int) -> list[str]:
        """The tokens that a model with a table of `vocab_size` rows does not have, without those added for other uses.

        Gemma 3's tokenizer has one such addition, for images, which its text models lack.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return [text for text, token in vocabulary.items() if token >= vocab_size and token not in added]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of the vocabulary in order: under another fingerprint the same tokens mean other text."""
        vocabulary = sorted((token, text) for text, token in self._tokenizer.get_vocab().items())
        return hashlib.sha256("\n".join(f"{token} {text}" for token, text in vocabulary).encode()).hexdigest()[:16]

    @functools.cached_property
    def digest(self) -> str:
        """Digest of everything that the tokens of a text depend on, without the chat template."""
        parts = [hashlib.sha256(self.files[TOKENIZER]).hexdigest(), list(self.begin), self.eos]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @functools.cached_property
    def special_tokens(self) -> dict[str, str]:
        """The text of each special token by role: `bos_token`, `eos_token`, ..."""
        found = {}
        for role, token in self.config.items():
            text = token.get("content") if isinstance(token, Mapping) else token
            if role.endswith("_token") and isinstance(text, str):
                found[role] = text
        return found

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens by role, of those that are in the vocabulary."""
        found = {role: self._tokenizer.token_to_id(text) for role, text in self.special_tokens.items()}
        return {role: token for role, token in found.items() if token is not None}

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that become a special token wherever they stand in a text."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(sorted(token.content for token in added if token.special and token.content.strip()))

    @functools.cached_property
    def eos(self) -> int | None:
        """The token that ends a text; None if the files name none. Raises ValueError if it is not in the vocabulary."""
        text = self.special_tokens.get("eos_token")
        token = None if text is None else self._tokenizer.token_to_id(text)
        if text is not None and token is None:
            raise ValueError(f"{self.name}: the eos_token {text!r} of {CONFIG} is not in the vocabulary of {TOKENIZER}")
        return token

    @functools.cached_property
    def unknown(self) -> int | None:
        """The token that stands for whatever is not in the vocabulary; None if there is none.

        A token that begins or ends texts is none, which some files name for want of another.
        """
        model = json.loads(self.files[TOKENIZER])["model"]
        token = model.get("unk_id")
        if model.get("unk_token") is not None:
            token = self._tokenizer.token_to_id(model["unk_token"])
        return None if token in (self.eos, *self.begin) else token

    @functools.cached_property
    def begin(self) -> tuple[int, ...]:
        """The tokens before every text, usually a bos token or none.

        They are those that tokenizer.json's post-processor puts there. As in transformers 5, `add_bos_token` of the
        config has no influence.
        """
        plain = self._tokenizer.encode(_PROBE, add_special_tokens=False).ids
        whole = self._tokenizer.encode(_PROBE, add_special_tokens=True).ids
        places = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return tuple(whole[: next(places, 0)])

    def begun(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of a text after `begin`, which a text that was rendered beforehand has already."""
        is_there = tuple(tokens[: len(self.begin)]) == self.begin
        return [*(() if is_there else self.begin), *tokens]

    @functools.cached_property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates of the files by name; the usual one is `default`. Raises ValueError if they are none."""
        if _TEMPLATE in self.files:
            try:
                return {"default": self.files[_TEMPLATE].decode()}
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name}: {_TEMPLATE} is not UTF-8 ({error}); save it as UTF-8") from error
        template = self._json(_OLD_TEMPLATE).get("chat_template") or self.config.get("chat_template")
        if template is None:
            return {}
        named = template if isinstance(template, list) else [{"name": "default", "template": template}]
        found: dict[Any, Any] = {}
        try:
            found |= {entry["name"]: entry["template"] for entry in named}
        except (KeyError, TypeError):
            found |= {"default": None}
        if not all(isinstance(text, str) for text in (*found, *found.values())):
            raise ValueError(
                f"{self.name}: chat_template is {template!r:.60}; needed is a text, or a list of objects with name and "
                "template: fetch the file again"
            )
        return found

    def encode(self, texts: Sequence[str]) -> list[Pieces]:
        """The tokens of each text, without tokens before or after it; special tokens in the text are recognised.

        Raises ValueError for a text with half of a surrogate pair, which JSON can write.
        """
        for text in texts:
            text.encode()  # the library's own error does not say what is wrong
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [Pieces(one.ids, one.offsets) for one in found]

    def decode(self, tokens: Iterable[SupportsInt], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=skip_special_tokens)

    def piece(self, token: int) -> str:
        """The token as the vocabulary spells it; nothing if it has no such token."""
        return self._tokenizer.id_to_token(token) or ""

    def _json(self, file: str) -> dict[str, Any]:
        try:
            found = json.loads(self.files.get(file, b"{}"))
        except ValueError as error:
            raise ValueError(f"{self.name}: {file} is not JSON ({error}); fetch it again") from error
        if not isinstance(found, dict):
            raise ValueError(f"{self.name}: {file} holds {type(found).__name__}, not an object; fetch it again")
        return found


def end_tokens(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's own, and those of its model's generation_config.json.

    Chat models end a turn with another token than a document.
    """
    found = [] if tokenizer.eos is None else [tokenizer.eos]
    try:
        said = json.loads(tokenizer.files.get(GENERATION, b"{}")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{tokenizer.name}: {GENERATION} is damaged ({error}); fetch it again") from error
    found += said if isinstance(said, list) else [said]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def load_text_tokenizer(name: str, *, offline: bool = False) -> TextTokenizer:
    """The tokenizer of a folder or of a repository `hub:USER/NAME` on the hub.

    Raises FileNotFoundError if there is none, DataError if the hub does not give it, ValueError if it is damaged.
    """
    if name.startswith(SCHEME):
        folder = hub_folder(name, repo_type="model", patterns=KEPT, offline=offline)
    else:
        folder = Path(name).expanduser()
        folder = folder.parent if folder.name == TOKENIZER else folder
    if not (folder / TOKENIZER).is_file():
        raise FileNotFoundError(f"no {TOKENIZER} in {name or 'the empty path'}: {_HOW}")
    return TextTokenizer({file: (folder / file).read_bytes() for file in KEPT if (folder / file).is_file()}, name)
