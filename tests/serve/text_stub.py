"""A text generator whose model is a rule, and a server around it in a thread of this process.

A prompt that ends with `say WORDS` is completed with these words and ends; any other with endless random letters.
"""

import asyncio
import contextlib
import hashlib
import socket
import threading
import time

import chats
import numpy as np

from openpi_train.generation.generator import GenerationRequest, Generator, NewTokens
from openpi_train.generation.text_generator import TextGenerator
from openpi_train.serve.limits import TextLimits
from openpi_train.serve.openai.text_server import TextServer

NAME, CHUNK = "tiny", 4
TOKENIZER = chats.tiny(template=chats.CHATML, eos_token="<|im_end|>")
LETTERS = [TOKENIZER.encode([letter])[0].tokens[0] for letter in "abcdefghijklmnopqrstuvwxyz"]


class RuleGenerator(Generator):
    """In place of a `Generator`: `CHUNK` tokens of each row in a step of `seconds`. `gate` holds it up."""

    def __init__(self, num_rows=4, max_length=256, seconds=0.0):
        self.num_rows, self.max_length, self.seconds = num_rows, max_length, seconds
        self.waiting, self.rows, self.broken = [], {}, False
        self.most_running = 0
        self.gate = threading.Event()
        self.gate.set()

    @property
    def num_running(self):
        return len(self.rows)

    @property
    def num_waiting(self):
        return len(self.waiting)

    def check(self, prompt, settings):
        problems = settings.check()
        if not prompt:
            problems.append("the prompt has no token")
        elif max(prompt) >= TOKENIZER.num_tokens:
            problems.append("the prompt has tokens that the model does not have")
        return problems

    def submit(self, request: GenerationRequest):
        assert len(request.prompt) + request.settings.max_new_tokens <= self.max_length
        assert not self.check(request.prompt, request.settings)
        self.waiting.append(request)

    def cancel(self, id):
        self.waiting = [one for one in self.waiting if one.id != id]
        self.rows.pop(id, None)

    def step(self):
        assert self.gate.wait(20)
        time.sleep(self.seconds)
        if self.broken:
            raise RuntimeError("out of memory: secret of the server")
        while self.waiting and len(self.rows) < self.num_rows:
            request = self.waiting.pop(0)
            self.rows[request.id] = (request, completion(request))
        self.most_running = max(self.most_running, len(self.rows))
        return [self._event(id, *row) for id, row in list(self.rows.items())]

    def _event(self, id, request, left):
        part, rest = left[:CHUNK], left[CHUNK:]
        self.rows[id] = (request, rest)
        reason, ending = None, None
        if not rest:
            reason = "length"
            if part and part[-1] == TOKENIZER.eos:
                reason, ending = "stop", (part.pop(), -0.5)
            del self.rows[id]
        return NewTokens(
            id=id,
            tokens=part,
            log_probs=[log_prob(token) for token in part],
            top=[[(token + other, log_prob(token) - other) for other in range(request.num_top)] for token in part],
            finish_reason=reason,
            ending=ending,
        )


def log_prob(token):
    return -1.0 - token / 1000


def completion(request):
    """The tokens that the rule gives for a request."""
    most = request.settings.max_new_tokens
    text = TOKENIZER.decode(request.prompt)
    _, said, words = text.rpartition("say ")
    if said:
        tokens = [*TOKENIZER.encode([words.partition("<|im_end|>")[0]])[0].tokens, TOKENIZER.eos]
        return tokens[:most]
    settings = request.settings
    what = text if settings.temperature == 0 else (text, settings.seed, request.row)
    seed = int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big")
    return np.random.default_rng(seed).choice(LETTERS, most).tolist()


def rule_texts(**given):
    """A `TextGenerator` of the rule."""
    template = chats.ChatTemplate(
        chats.CHATML, name="of tiny", special_tokens=TOKENIZER.special_tokens, today=chats.TODAY
    )
    return TextGenerator(RuleGenerator(**given), TOKENIZER, {"default": template})


@contextlib.contextmanager
def serving(texts=None, *, tls=None, **options):
    """Yields a `Served`; stops it at the end, which must not take long."""
    texts = rule_texts() if texts is None else texts
    limits = TextLimits(**{"drain_s": 5.0, "open_s": 30.0, "send_s": 5.0, **options.pop("limits", {})})
    listener = socket.create_server(("127.0.0.1", 0))
    found = Served(listener.getsockname()[1], texts.generator)
    started = threading.Event()

    async def main():
        found.server, found.loop = TextServer(texts, name=NAME, limits=limits, **options), asyncio.get_running_loop()
        found.loop.call_soon(started.set)
        found.finished = await found.server.run(listener, tls)

    found.thread = threading.Thread(target=lambda: asyncio.run(main()))
    found.thread.start()
    assert started.wait(10)
    try:
        yield found
    finally:
        texts.generator.gate.set()
        found.stop()
        found.thread.join(20)
        assert not found.thread.is_alive()


class Served:
    """A server: its port, its generator, and once it has ended whether all requests were finished."""

    def __init__(self, port, generator):
        self.port, self.generator, self.finished = port, generator, None
        self.server = self.loop = self.thread = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def stop(self):
        with contextlib.suppress(RuntimeError):  # it has stopped already
            self.loop.call_soon_threadsafe(self.server.stop)
