"""What chat templates know, found in their text, and chats made so that each of them takes them.

The templates are our own, as short as the habit of the real ones that they have.
"""

import time
from typing import Any

import jinja2
import msgspec
import pytest

from millstream.common.flags import ConfigError
from millstream.tokenizer_manager.chat.chat_family import ChatFamily, find_chat_family
from millstream.tokenizer_manager.chat.chat_prompt import ChatMessage, template_messages
from millstream.tokenizer_manager.chat.template_habits import TemplateHabits, find_habits
from millstream.tokenizer_manager.chat.tool_format import (
    DEEPSEEK_CALLS,
    DEEPSEEK_SEPARATOR,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
)
from tests.tokenizer_manager.parsed_answers import TOOLS

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "sun"}]},
]


def history() -> list[dict[str, Any]]:
    return template_messages(msgspec.convert(HISTORY, list[ChatMessage]))


def test_messages_for_a_template_that_knows_tools() -> None:
    habits = TemplateHabits(takes_tools=True, takes_tool_calls=True, takes_developer=True)
    developer, _, assistant, tool, _ = habits.messages(history(), TOOLS)
    assert developer["role"] == "developer"
    assert assistant["content"] == ""
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    assert tool == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}


def test_messages_for_deepseeks_template_and_that_of_gpt_oss() -> None:
    template = f"{{{{ tools }}}}{{{{ tool_calls }}}}{{{{ tool['function']['name'] + '{DEEPSEEK_SEPARATOR}' }}}}"
    deepseek = find_chat_family({"default": template + "{{ tool['function']['arguments'] + '' }}"}, "deepseek", "none")
    assert deepseek.forced_format == DEEPSEEK_V31
    call = deepseek.habits.messages(history(), TOOLS)[2]["tool_calls"][0]
    assert call["function"]["arguments"] == '{"city":"Bern"}'
    template = "{{ tools }}{{ tool_calls }}{{ message.thinking }}{{ arguments|tojson }}"
    assistant = find_chat_family({"default": template}, "gpt-oss", "gpt-oss").habits.messages(history(), TOOLS)[2]
    assert assistant["thinking"] == "hm"
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}


def test_ids_for_a_template_that_takes_short_ones() -> None:
    template = "{{ tools }}{{ tool_calls }}{% if tool_call.id|length != 9 %}"
    habits = find_chat_family({"default": template}, "mistral", "none").habits
    *_, assistant, first, second = habits.messages(history(), TOOLS)
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert [first["tool_call_id"], second["tool_call_id"]] == ids
    assert ids[0] != ids[1]
    assert [len(call_id) for call_id in ids] == [9, 9]


def test_messages_for_a_template_that_knows_none() -> None:
    system, _, assistant, answers = TemplateHabits().messages(history(), TOOLS)
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n")
    assert '"name":"weather"' in system["content"]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"{call}\n{call}", "reasoning_content": "hm"}
    responses = [f"<tool_response>\n{text}\n</tool_response>" for text in ("rain", "sun")]
    assert answers == {"role": "user", "content": "\n".join(responses)}


def test_arguments_that_are_no_object_stay_a_text() -> None:
    cut_off = {**CALL, "function": {"name": "weather", "arguments": '{"ci'}}
    message = msgspec.convert({"role": "assistant", "tool_calls": [cut_off]}, ChatMessage)
    assert template_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == '{"ci'


@pytest.mark.parametrize(
    ("template", "parsers"),
    [
        ("{{ messages }}", ("hermes", "none")),
        ("{% for tool in xml_tools %}{{ '<tools>' }}{% endfor %} tools <tool_call>", ("hermes", "none")),
        (f"{{{{ messages }}}} {DEEPSEEK_CALLS}", ("deepseek", "none")),
        ("{{ tools }} <tool_call> {{ enable_thinking }} <think>", ("hermes", "think")),
        ("{{ tools }} [TOOL_CALLS]", ("mistral", "none")),
        ('{{ tools }} {"name": function name, "parameters": ...} <|python_tag|>', ("llama3", "none")),
        ("{{ tools }} <|python_tag|>", ("none", "none")),
        ("{{ tools }} <\uff5ctool\u2581calls\u2581begin\uff5c> </think>", ("deepseek", "deepseek-r1")),
        ("{{ tools }} <|channel|> <|message|>", ("gpt-oss", "gpt-oss")),
        ("{{ tools }} <tool_call> <arg_key>", ("none", "none")),
        ("{{ tools }}", ("none", "none")),
    ],
)
def test_parsers_are_found_in_the_template(template: str, parsers: tuple[str, str]) -> None:
    family = find_chat_family({"default": template}, "auto", "auto")
    assert (family.tool_call_parser, family.reasoning_parser) == parsers
    named = find_chat_family({"default": template}, "qwen", "none")
    assert (named.tool_call_parser, named.reasoning_parser) == ("hermes", "none")


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser must be one of auto, none, deepseek"):
        find_chat_family({}, "pythonic", "auto")


def rendered(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] = TOOLS
) -> tuple[ChatFamily, str]:
    """A chat as the template shows it, which must not ask for anything that is not there."""
    family = find_chat_family({"default": template}, "auto", "auto")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    known = family.habits.messages(messages, tools, family.forced_format)
    return family, environment.from_string(template).render(messages=known, tools=family.habits.tools(tools) or None)


def refuse(message: str) -> None:
    """As templates do it."""
    raise jinja2.TemplateError(message)


SHOW_MESSAGES = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
SHOW_CALLS = """{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% for call in m.get('tool_calls', []) %}
<tool_call>{{ call.function.name }}{% endfor %}|{% endfor %}"""
ONE_CALL = """{{ tools }}{% for m in messages %}{% if m.get('tool_calls', []) | length > 1 %}
{{ raise_exception("This model only supports single tool-calls at once!") }}{% endif %}{% endfor %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DESCRIBED = "{% for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}{% endfor %}"
LONG_IDS = """{{ tools }}{% for m in messages %}{% for call in m.get('tool_calls', []) %}
{% if call.id|length < 9 %}{{ raise_exception("too short") }}{% endif %}{% endfor %}{% endfor %}"""
TEXT_ARGUMENTS = """{{ tools }}{% for m in messages %}{% for tool_call in m.get('tool_calls', []) %}
{{ '>' + tool_call['function']['arguments'] }}{% endfor %}{% endfor %}"""
ONLY_WITHOUT_CONTENT = (
    """{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}
{{ message['tool_calls'] }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"""
    + DEEPSEEK_CALLS
)


def test_a_template_of_one_call_a_message_gets_each_with_its_answer() -> None:
    _, text = rendered(ONE_CALL + SHOW_CALLS, [*history(), {"role": "user", "content": "so?"}])
    shown = [message.strip() for message in text.replace("\n", "").split("|")]
    call = "<tool_call>weather"
    answers = [f"assistant:{call}", "tool:rain", f"assistant:{call}", "tool:sun", "user:so?", ""]
    assert shown[-6:] == answers


def test_a_template_without_a_system_role_has_the_user_say_it() -> None:
    _, text = rendered(NO_SYSTEM + SHOW_MESSAGES, history()[:2], tools=[])
    assert text == "user:Be brief.\n\nWeather?|"
    _, text = rendered(NO_SYSTEM + SHOW_MESSAGES, history()[1:2])
    assert text.startswith("user:You may call functions")
    assert text.endswith("Weather?|")
    _, text = rendered(NO_SYSTEM + SHOW_MESSAGES, [history()[0]], tools=[])
    assert text == "user:Be brief.|"
    later = [{"role": role, "content": role[0]} for role in ("user", "system", "assistant", "system", "user", "user")]
    assert rendered(NO_SYSTEM + SHOW_MESSAGES, later, tools=[])[1] == "user:u\n\ns|assistant:a|user:s\n\nu|user:u|"


def test_a_tool_without_a_description_has_an_empty_one_and_no_more_is_shown() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert rendered(DESCRIBED, history()[1:2], tools=tools)[1] == "f: "
    shown = TemplateHabits(takes_tools=True).tools(tools)[0]["function"]
    assert shown == {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert "strict" not in rendered(SHOW_MESSAGES, history()[1:2], tools=tools)[1]


def test_ids_that_are_long_enough_and_arguments_joined_to_other_text() -> None:
    assert rendered(LONG_IDS, history())
    family, text = rendered(TEXT_ARGUMENTS, history())
    assert family.habits.takes_text_arguments
    assert '>{"city":"Bern"}' in text


def test_calls_are_written_where_a_template_would_drop_them() -> None:
    family, text = rendered(ONLY_WITHOUT_CONTENT, history())
    assert family.forced_format == DEEPSEEK_V3
    call = DEEPSEEK_V3.write("weather", '{"city":"Bern"}')
    assert f"{DEEPSEEK_CALLS}{call}\n{call}" in text
    assert DEEPSEEK_V3.write_all([("function-name", '{"argument-name": "value"}')]) in text
    assert text.index("rain") < text.index("sun")


@pytest.mark.parametrize("unit", ["{{'", "{{'a' ", "{% ", '{{ "\\', "+ a.b['", "'\\", "{{ x }}"])
def test_a_hostile_template_costs_no_time(unit: str) -> None:
    started = time.process_time()
    find_habits(unit * 20_000)
    assert time.process_time() - started < 2.0
