"""Small chat templates in the forms of published families, and a tokenizer trained on a few sentences."""

import datetime
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from openpi_train.data.text.chat_template import ChatTemplate
from openpi_train.data.tokenizers.text_tokenizer import TextTokenizer

TODAY = datetime.date(2024, 7, 26)
SPECIAL = (
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<turn>",
    "</turn>",
)
SENTENCES = (
    "What is two plus two? It is four.",
    "user assistant system model think",
    "The capital of France is Paris, of course; that of Japan is Tokyo.",
    "Ünïcödé, 日本語 and 😀 are texts, too.",
    "#### 42\n\nSo the answer is 42.",
)

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_MARKED = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As Llama 3: a bos token, trimmed contents, tools and a date in the system message.
HEADED = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{{- '<|head|>system<|/head|>\\n\\nToday: ' + date_string + '\\n' + system }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson(indent=2)) }}{%- endfor %}
{%- endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}"""

# As Gemma 3: the system message goes into the user's, roles must alternate, the assistant is called model.
TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate between user and assistant') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for part in message['content'] -%}{{ part['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\\n' }}{%- endif -%}"""

# As Qwen3: the reasoning of earlier answers is left out, that of the last is kept.
FORGETFUL = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

TEMPLATES = {"chatml": CHATML, "marked": CHATML_MARKED, "headed": HEADED, "turns": TURNS, "forgetful": FORGETFUL}

ONE = [{"role": "user", "content": "What is two plus two?"}, {"role": "assistant", "content": "It is four."}]
SYSTEM = [{"role": "system", "content": "  You are a model. "}, *ONE]
TWO = [*SYSTEM, {"role": "user", "content": "日本語 😀?"}, {"role": "assistant", "content": "Ünïcödé\n\n42 "}]
THOUGHT = [ONE[0], {**ONE[1], "reasoning": "two and two"}, {"role": "user", "content": "And?"}, ONE[1]]
CONVERSATIONS = {"one": ONE, "system": SYSTEM, "two": TWO, "thought": THOUGHT}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & ü", "parameters": {}}}]


def byte_level() -> Tokenizer:
    """Byte-level pairs with a bos token by the post-processor, as Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    bos = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    return tokenizer


def word_pieces() -> Tokenizer:
    """Pairs with a sign for spaces, which is also put before a text, and bytes for the rest, as Llama 2's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<pad>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES[:3], trainer)
    return tokenizer


def files(tokenizer: Tokenizer | None = None, template: str | None = None, **config: object) -> dict[str, bytes]:
    """The files of a tokenizer whose pad token is its eos token, as SmolLM2's."""
    tokenizer = tokenizer or byte_level()
    told = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    found = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(told | config).encode()}
    return found | ({} if template is None else {"chat_template.jinja": template.encode()})


def write(folder, **given):
    """Write the `files` to a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files(**given).items():
        (folder / name).write_bytes(content)
    return folder


def tiny(**given) -> TextTokenizer:
    return TextTokenizer(files(**given), "tiny")


def chat(source: str) -> ChatTemplate:
    return ChatTemplate(source, name="tiny", special_tokens=tiny().special_tokens, today=TODAY)
