"""What a client and the server say to each other, in the terms of one protocol; and openpi's.

Read next: `server.py`, `evaluation_harness.py`.
"""

from collections.abc import Mapping
from typing import Protocol

from openpi_train.json_object import JsonObject
from openpi_train.policy import wire

# The keys and values of an observation, as `policy/observation.py` reads them.
Observation = Mapping[str, object]


class Dialogue(Protocol):
    """One client's, from its connection on; one message at a time, each in any thread."""

    def read(self, message: bytes) -> Observation | bytes | None:
        """The observation that the policy is asked about; or without that the answer itself, None for no answer.

        Raises WireError or ObservationError if the message is wrong.
        """
        ...

    def answer(self, answer: Mapping[str, object], timing: JsonObject) -> bytes:
        """The message with the policy's answer to the observation that was read last."""
        ...

    def refusal(self, text: str) -> str | bytes:
        """The message that says why the message that was read last has no answer."""
        ...


class OpenpiDialogue:
    """openpi's: every message is an observation, every answer an action chunk, every refusal a text."""

    def read(self, message: bytes) -> Observation:
        """The message, which must be an observation."""
        observation = wire.decode(message)
        if not isinstance(observation, dict):
            raise wire.WireError(f"a request must be a map of keys to values, not a {type(observation).__name__}")
        return observation

    def answer(self, answer: Mapping[str, object], timing: JsonObject) -> bytes:
        """The answer with both of its timings."""
        return wire.encode({**answer, **timing})

    def refusal(self, text: str) -> str:
        """The text."""
        return text
