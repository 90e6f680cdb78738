"""Chats render as the field renders them, and follow-ups never depend on what was sampled."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from helpers.templates import APPENDING, CHATML, LLAMA3, NO_SYSTEM, STRIPS_REASONING, TRIMS, make_tokenizer
from palestra.environments.chat import Chat
from palestra.errors import ChatError
from palestra.types import Message

USER = Message("user", "  Hi, {{ you }}!\n")
LONG = (
    Message("user", "What is 1 + 1?"),
    Message("assistant", "2"),
    Message("user", "And 2 + 2? \u00e9\u4e2d<|im_end|>"),
)


def chat_of(folder: Path, template: str, **options: str) -> Chat:
    return Chat(make_tokenizer(folder, template, **options))


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize("messages", [(USER,), LONG, (Message("system", "Be brief."), *LONG)])
def test_the_first_prompt_equals_what_transformers_renders(
    tmp_path: Path, name: str, messages: tuple[Message, ...]
) -> None:
    transformers = pytest.importorskip("transformers")
    chat = chat_of(tmp_path, APPENDING[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    plain = [{"role": m.role, "content": m.content} for m in messages]
    if name == "no_system" and messages[0].role == "system":
        with pytest.raises(ChatError, match="System role not supported"):
            chat.first(messages)
        return
    expected = theirs.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(chat.first(messages)) == list(expected)


@pytest.mark.parametrize("name", ["chatml", "llama3", "no_system", "generation_marks"])
def test_prompt_answer_and_follow_up_join_to_the_template_of_the_whole_chat(
    tmp_path: Path, name: str
) -> None:
    eos = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    chat = chat_of(tmp_path, APPENDING[name], eos=eos)
    tokenizer = chat.tokenizer
    end = tokenizer.encode(eos)[0]
    before = (Message("user", "Hi"), Message("assistant", "Hello there."))
    new = (Message("user", "How are you?"),)
    joined = [
        *chat.first(before[:1]),
        *tokenizer.encode("Hello there."),
        end,
        *chat.follow(before, new, ended_by=end),
    ]
    assert joined == list(chat.first((*before, *new)))


def test_an_answer_cut_by_a_limit_gets_the_end_of_turn_from_the_template(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, CHATML)
    before, new = (Message("user", "Hi"), Message("assistant", "Hel")), (Message("user", "Go on"),)
    cut = chat.follow(before, new, ended_by=None)
    end = chat.tokenizer.encode("<|im_end|>")[0]
    assert cut[0] == end
    assert cut[1:] == chat.follow(before, new, ended_by=end)
    assert (
        chat.tokenizer.decode(cut) == "<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_ended_by_another_token_still_gets_the_templates_end_of_turn(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, CHATML, ends=("<|endoftext|>",))
    before, new = (
        (Message("user", "Hi"), Message("assistant", "Hel")),
        (Message("user", "Go on<|endoftext|>"),),
    )
    other = chat.tokenizer.encode("<|endoftext|>")[0]
    assert chat.follow(before, new, ended_by=other) == chat.follow(before, new, ended_by=None)


def test_a_template_that_trims_and_spaces_answers_is_followed_without_repeating_the_end(
    tmp_path: Path,
) -> None:
    chat = chat_of(tmp_path, TRIMS)
    before, new = (Message("user", "Hi"), Message("assistant", "  padded  ")), (Message("user", "More"),)
    end = chat.tokenizer.encode("<|im_end|>")[0]
    assert chat.tokenizer.decode(chat.follow(before, new, ended_by=end)) == "[user] More [end]"
    assert chat.tokenizer.decode(chat.follow(before, new, ended_by=None)) == " <|im_end|>[user] More [end]"


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize(
    "sampled", ["", " ", "palestra0x0q", "<think>a</think>b", "<|im_end|>", "{{ 7 }}", "\ufffd", "x" * 999]
)
def test_what_follows_does_not_depend_on_what_was_sampled(tmp_path: Path, name: str, sampled: str) -> None:
    """Case 13 (trl#5224, prime-rl#1334): re-rendering sampled text drifts from the sampled tokens."""
    chat = chat_of(tmp_path, APPENDING[name])
    new = (Message("user", "Next"),)
    plain = chat.follow((USER, Message("assistant", "ok")), new, ended_by=None)
    assert chat.follow((USER, Message("assistant", sampled)), new, ended_by=None) == plain


@pytest.mark.parametrize("sampled", ["<think>hm</think>4", "4"])
def test_a_template_that_strips_earlier_reasoning_is_refused_whatever_was_sampled(
    tmp_path: Path, sampled: str
) -> None:
    """Case 13 (SkyRL#123, ART#726): a template dropped text that the model had been trained on."""
    chat = chat_of(tmp_path, STRIPS_REASONING)
    with pytest.raises(ChatError, match="between <think> and </think>") as caught:
        chat.follow((USER, Message("assistant", sampled)), (Message("user", "Next"),), ended_by=None)
    assert "the model's chat template" in caught.value.what
    assert "segments are not supported yet" in caught.value.what


def test_reasoning_marks_that_only_the_template_names_are_probed_too(tmp_path: Path) -> None:
    template = STRIPS_REASONING.replace("</think>", "</reasoning>")
    with pytest.raises(ChatError, match="between <reasoning> and </reasoning>"):
        chat_of(tmp_path, template).follow(LONG[:2], LONG[2:], ended_by=None)


@pytest.mark.parametrize(
    ("template", "how"),
    [
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "writes the earlier messages",
        ),
        (
            "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}",
            "leaves out the assistant",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ (messages[1] or {}).content }}",
            "repeats an assistant",
        ),
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
            "generation prompt does not hold",
        ),
    ],
)
def test_a_template_that_does_more_than_append_is_refused_by_name(
    tmp_path: Path, template: str, how: str
) -> None:
    with pytest.raises(ChatError, match=how) as caught:
        chat_of(tmp_path, template).follow(LONG[:2], LONG[2:], ended_by=None)
    assert "chat template" in caught.value.what
    assert caught.value.next_command


def test_a_follow_up_of_several_messages_and_a_tools_answer_are_appended(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, CHATML)
    new = (Message("tool", "exit 0"), Message("user", "Well?"))
    text = chat.tokenizer.decode(chat.follow(LONG[:2], new, ended_by=None))
    assert text == (
        "<|im_end|>\n<|im_start|>tool\nexit 0<|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_raises_is_quoted_and_the_roles_are_named(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="refuses this chat: System role not supported") as caught:
        chat_of(tmp_path, NO_SYSTEM).first((Message("system", "x"), USER))
    assert caught.value.where == "messages of the roles system, user"


def test_a_missing_template_names_where_it_looked_and_three_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="no chat template") as caught:
        Chat(make_tokenizer(tmp_path, None))
    text = str(caught.value)
    for part in (
        "tokenizer_config.json",
        "chat_template.jinja",
        "='none'",
        "FILE.jinja",
        "comes with a template",
    ):
        assert part in text


def test_raw_text_joins_contents_as_they_are(tmp_path: Path) -> None:
    chat = Chat(make_tokenizer(tmp_path, None), "none")
    decode = chat.tokenizer.decode
    assert decode(chat.first((Message("system", "a "), Message("user", "b")))) == "a b"
    before = (Message("user", "b"), Message("assistant", "c"))
    assert decode(chat.follow(before, (Message("user", " d"), Message("tool", "e")), ended_by=None)) == " de"


def test_a_template_comes_from_a_file_a_path_or_inline_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, CHATML)
    file = tmp_path / "mine.jinja"
    file.write_text(LLAMA3)
    by_name, by_path, inline = Chat(tokenizer, str(file)), Chat(tokenizer, file), Chat(tokenizer, LLAMA3)
    assert by_name.first(LONG) == by_path.first(LONG) == inline.first(LONG) != Chat(tokenizer).first(LONG)
    assert "mine.jinja" in by_name.name


@pytest.mark.parametrize("template", ["nowhere.jinja", "chatml"])
def test_a_template_that_is_no_file_is_refused_with_what_is_valid(tmp_path: Path, template: str) -> None:
    with pytest.raises(ChatError, match=template) as caught:
        Chat(make_tokenizer(tmp_path, None), template)
    assert "'auto', 'none', a file" in caught.value.expected


def test_a_template_with_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="not a valid Jinja template") as caught:
        chat_of(tmp_path, "{{ bos_token }}\n{% for m in messages %}\n{% endif %}\n")
    assert caught.value.where == "line 3: {% endif %}"


@pytest.mark.parametrize(
    "template", ["{{ messages[9].content.strip() }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"]
)
def test_a_template_that_fails_while_rendering_is_a_chat_error_with_its_cause(
    tmp_path: Path, template: str
) -> None:
    with pytest.raises(ChatError, match="the model's chat template raised") as caught:
        chat_of(tmp_path, template).first((USER,))
    assert caught.value.__cause__ is not None
    assert caught.value.where == "line 1 of the template"
    assert "Traceback" in caught.value.detail


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__subclasses__() }}", "{{ messages.append(1) }}"],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, template: str) -> None:
    with pytest.raises(ChatError, match="SecurityError"):
        chat_of(tmp_path, template).first((USER,))


def test_tojson_is_plain_json_and_the_date_is_fixed_for_the_life_of_a_chat(tmp_path: Path) -> None:
    template = "{{ strftime_now('%Y-%m-%d') }}{{ {'b': '<é&>', 'a': 1} | tojson }}{{ tools is none }}"
    chat = Chat(make_tokenizer(tmp_path, template), now=datetime(2026, 2, 3))
    assert chat.tokenizer.decode(chat.first((USER,))) == '2026-02-03{"b": "<é&>", "a": 1}True'


def test_a_chat_that_ends_with_the_assistant_or_is_empty_is_refused(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, CHATML)
    with pytest.raises(ChatError, match="assistant's own"):
        chat.first(LONG[:2])
    with pytest.raises(ChatError, match="assistant's own"):
        chat.follow(LONG[:2], (Message("assistant", "x"),), ended_by=None)
    with pytest.raises(ChatError, match="at least one message"):
        chat.first(())
    with pytest.raises(ChatError, match="must end with the assistant"):
        chat.follow((USER,), (USER,), ended_by=None)
    with pytest.raises(ChatError, match="nothing new"):
        chat.follow(LONG[:2], (), ended_by=None)
