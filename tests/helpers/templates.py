"""Small chat templates of the kinds in use, and a byte-level tokenizer that knows their special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from palestra.models.tokenizer import Tokenizer, byte_alphabet

SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|endoftext|>",
)  # fmt: skip

CHATML = """\
{%- for message in messages %}
{%- if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TRIMS = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- ' ' + message['content'].strip() + ' ' + eos_token }}
{%- else %}
{{- '[' + message['role'] + '] ' + message['content'].strip() + ' [end]' }}
{%- endif %}
{%- endfor %}
"""
NO_SYSTEM = """\
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
STRIPS_REASONING = """\
{%- for message in messages %}
{%- set content = message['content'] %}
{%- if message['role'] == 'assistant' and '</think>' in content and not loop.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
GENERATION_MARKS = """\
{% for message in messages %}
{% if message['role'] == 'assistant' %}
{% generation %}{{ '<|im_start|>assistant\\n' + message['content'] + '<|im_end|>\\n' }}{% endgeneration %}
{% else %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
APPENDING = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "trims": TRIMS,
    "no_system": NO_SYSTEM,
    "generation_marks": GENERATION_MARKS,
}
"""Templates that only ever append."""


def make_tokenizer(
    folder: Path,
    template: str | None = CHATML,
    *,
    bos: str = "<|begin_of_text|>",
    eos: str = "<|im_end|>",
    ends: tuple[str, ...] = (),
) -> Tokenizer:
    """Token b is byte b, then the specials. ``ends`` are further end-of-sequence tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    core = tokenizers.Tokenizer(models.BPE(vocab={c: b for b, c in byte_alphabet().items()}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    core.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = [core.token_to_id(text) for text in (eos, *ends)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return Tokenizer.from_folder(folder)
