"""Chat templates: what they render, and that no template can hurt the server."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from millstream.common.config import child_environment
from millstream.common.tokenizer import load_tokenizer
from millstream.tokenizer_manager.sandbox.template_pool import TemplateError, TemplateRenderer, check_template_kwargs
from tests.text.sample_tokenizers import byte_level_backend, smollm2, write_directory
from tests.text.transformers_oracle import transformers_smollm2, transformers_tokenizer

BROKEN = "{% for"
USER = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "Be \u00fcber brief."},
    {"role": "user", "content": "2 + 2?\n"},
    {"role": "assistant", "content": "4", "tool_calls": None},
    {"role": "user", "content": "<b>&amp; \U0001f600"},
]
FEATURES = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if loop.index > 9 %}{% break %}{% endif %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson(indent=2) }}{% endfor %}{{ thinking }}"
    "{% generation %}{% if add_generation_prompt %}[assistant]{% endif %}{% endgeneration %}"
)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% if messages[0].content == 'loop' %}x{% else %}"
ENDLESS += "{{ messages[0].content }}{% break %}{% endif %}{% endfor %}{% if messages[0].content != 'loop' %}"
ENDLESS += "{% break %}{% endif %}{% endfor %}"
LIMIT = 30.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(coroutine, 2 * LIMIT))


@asynccontextmanager
async def renderer_of(
    templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None, render_seconds: float = LIMIT
) -> AsyncIterator[TemplateRenderer]:
    """A started renderer; afterwards its child is gone."""
    before = set(psutil.Process().children())
    renderer = TemplateRenderer(render_seconds=render_seconds)
    renderer.start({"default": templates} if isinstance(templates, str) else templates, special_tokens or {})
    try:
        yield renderer
    finally:
        renderer.close()
        await asyncio.sleep(0)
    assert set(psutil.Process().children()) <= before


def child_of(renderer: TemplateRenderer) -> psutil.Process:
    assert renderer._child is not None
    return psutil.Process(renderer._child.pid)


def test_smollm2_renders_and_encodes_as_transformers_does() -> None:
    async def check() -> None:
        ours, theirs = smollm2(), transformers_smollm2()
        async with renderer_of(ours.chat_templates, ours.special_tokens) as renderer:
            for chat in (USER, CHAT, CHAT[1:]):
                for prompt in (True, False):
                    text = await renderer.render(chat, add_generation_prompt=prompt)
                    assert text == theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
                    expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"]
                    assert ours.encode(text, add_special_tokens=False) == expected
            text = await renderer.render(CHAT[:3], add_generation_prompt=False, continue_final_message=True)
            assert text == theirs.apply_chat_template(CHAT[:3], continue_final_message=True, tokenize=False)

    run(check())


def test_a_directory_renders_as_transformers_does(tmp_path: Path) -> None:
    async def check() -> None:
        path = write_directory(tmp_path, byte_level_backend(), chat_template=FEATURES)
        ours, theirs = load_tokenizer(path), transformers_tokenizer(path)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "<int>"}}}]
        async with renderer_of(ours.chat_templates, ours.special_tokens) as renderer:
            for chosen in (None, tools):
                expected = theirs.apply_chat_template(
                    CHAT, tools=chosen, add_generation_prompt=True, tokenize=False, thinking=True
                )
                text = await renderer.render(CHAT, tools=chosen, chat_template_kwargs={"thinking": True})
                assert text == expected

    run(check())


def test_the_template_for_tools_is_taken_where_there_are_tools() -> None:
    async def check() -> None:
        async with renderer_of({"default": "plain", "tool_use": "tools"}) as renderer:
            assert await renderer.render(USER) == "plain"
            assert await renderer.render(USER, tools=[{"type": "function"}]) == "tools"

    run(check())


def test_a_model_without_a_template_says_so_and_starts_no_process() -> None:
    async def check() -> None:
        renderer = TemplateRenderer()
        renderer.start({}, {})
        with pytest.raises(TemplateError, match="this model has no chat template"):
            await renderer.render(USER)
        assert renderer._child is None
        renderer.close()

    run(check())


FAILING = {
    "{{ raise_exception('Roles must alternate') }}": "^Roles must alternate$",
    "{{ messages[5].content }}": "no element 5",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "recursion",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ messages[0].update(a=1) }}": "SecurityError",
    "{% set ns = namespace(__init__=1) %}": "SecurityError",
    "{{ range(200000) | list | length }}": "OverflowError",
    "{% include '/etc/passwd' %}": "no loader",
    "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}": "characters, more than",
    "{% set ns = namespace(a='x' * 1000000) %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}": (
        "too much memory"
    ),
}
HIDDEN = ("{{ ''.__class__ }}", "{{ '{0.__class__}'.format(1) }}", "{{ messages | attr('__class__') }}")


def by_number(templates: Iterable[str]) -> str:
    """One template that renders the template whose number is the first message."""
    return "".join(
        "{% if messages[0].content == 'NUMBER' %}".replace("NUMBER", str(number)) + template + "{% endif %}"
        for number, template in enumerate(templates)
    )


def test_a_template_that_fails_or_tries_to_get_out_is_an_error_with_its_cause() -> None:
    async def check() -> None:
        async with renderer_of(by_number([*FAILING, *HIDDEN])) as renderer:
            for number, message in enumerate(FAILING.values()):
                with pytest.raises(TemplateError, match=message):
                    await renderer.render([{"role": "user", "content": str(number)}])
                assert child_of(renderer).memory_info().rss < 256 * 2**20
            for number in range(len(FAILING), len(FAILING) + len(HIDDEN)):
                assert await renderer.render([{"role": "user", "content": str(number)}]) == ""

    run(check())


def test_a_template_that_is_no_template_is_known_at_the_start() -> None:
    async def check() -> None:
        for template, message in ((BROKEN, "TemplateSyntaxError"), ("{{ messages }}", "")):
            async with renderer_of(template) as renderer:
                assert message in (await renderer.setup_error() or "")

    run(check())


@pytest.mark.parametrize(
    ("template", "message"),
    [(BROKEN, "TemplateSyntaxError"), ("{{ ('a' * 1000000000) | length }}", "too much memory")],
)
def test_a_template_that_cannot_be_compiled_is_an_error_of_each_chat(template: str, message: str) -> None:
    async def check() -> None:
        async with renderer_of(template) as renderer:
            for _ in range(2):
                with pytest.raises(TemplateError, match=message):
                    await renderer.render(USER)
            assert child_of(renderer).memory_info().rss < 256 * 2**20

    run(check())


def test_an_endless_template_is_killed_in_time_and_the_next_chat_is_rendered() -> None:
    async def check() -> None:
        async with renderer_of(ENDLESS, render_seconds=1.0) as renderer:
            assert await renderer.render(USER) == "Hi"
            first = child_of(renderer)
            start = time.monotonic()
            with pytest.raises(TemplateError, match="took longer than 1 s"):
                await renderer.render([{"role": "user", "content": "loop"}])
            assert time.monotonic() - start < 2.5
            assert not first.is_running()
            assert await renderer.render(USER) == "Hi"

    run(check())


def test_the_loop_runs_on_while_a_template_is_busy() -> None:
    async def check() -> None:
        async with renderer_of(ENDLESS, render_seconds=0.5) as renderer:
            await renderer.render(USER)
            task = asyncio.create_task(renderer.render([{"role": "user", "content": "loop"}]))
            longest, last = 0.0, time.monotonic()
            while not task.done():
                await asyncio.sleep(0.005)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
            assert isinstance(task.exception(), TemplateError)
            assert longest < 0.3

    run(check())


def test_chats_wait_their_turn_and_a_client_that_leaves_takes_nobody_elses_answer() -> None:
    async def check() -> None:
        async with renderer_of("{{ messages[0].content }}") as renderer:
            chats = [[{"role": "user", "content": f"chat {i}"}] for i in range(20)]
            tasks = [asyncio.create_task(renderer.render(chat)) for chat in chats]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            kept = [i for i in range(20) if i % 3]
            assert [found[i] for i in kept] == [f"chat {i}" for i in kept]
            assert all(isinstance(found[i], asyncio.CancelledError) for i in range(0, 20, 3))

    run(check())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "x"},
        {"tokenize": True},
        {"messages": []},
        {"add_generation_prompt": True},
        {"eos_token": "x"},
        {"self": 1},
        {"__x": 1},
        {"not a name": 1},
        {"x": {"deep": 1}},
        {"x": [[1]]},
        {"x": 10**30},
        {"x": [2**63]},
    ],
)
def test_template_kwargs_are_plain_data_under_names_of_their_own(kwargs: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="chat_template_kwargs") as caught:
        check_template_kwargs(kwargs, {"eos_token": "</s>"})
    assert caught.value.param == "chat_template_kwargs"


PARENT = """
import asyncio, sys, time
from millstream.tokenizer_manager.sandbox.template_pool import TemplateRenderer
async def main():
    renderer = TemplateRenderer()
    renderer.start({"default": "x"}, {})
    if sys.argv[1] == "ready":
        await renderer.render([{"role": "user", "content": ""}])
    print(renderer._child.pid, flush=True)
    time.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["starting", "ready"])
def test_the_child_dies_with_its_parent(when: str) -> None:
    command = [sys.executable, "-c", PARENT, when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(), text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(LIMIT)


def test_the_child_has_no_open_files_and_leaves_ctrl_c_to_its_parent() -> None:
    async def check() -> None:
        inherited = os.open("/dev/null", os.O_RDONLY)
        os.set_inheritable(inherited, True)
        try:
            async with renderer_of("{{ messages[0].content }}") as renderer:
                await renderer.render(USER)
                child = child_of(renderer)
                assert child.num_fds() <= 4
                child.send_signal(signal.SIGINT)
                child.send_signal(signal.SIGTERM)
                assert await renderer.render(USER) == "Hi"
                assert child_of(renderer).pid == child.pid
        finally:
            os.close(inherited)

    run(check())
