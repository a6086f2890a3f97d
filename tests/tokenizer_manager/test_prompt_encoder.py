"""Long texts are tokenized beside the event loop, huge ones one after another, whoever still waits for them."""

import asyncio
import time

from millstream.tokenizer_manager.prompt_encoder import HUGE_CHARS, PromptEncoder
from tests.text.sample_tokenizers import byte_level_backend, tokenizer_of


def test_huge_texts_are_worked_on_one_at_a_time_also_where_their_clients_have_left() -> None:
    num_running = most = 0

    def work() -> None:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        time.sleep(0.05)
        num_running -= 1

    async def check() -> None:
        encoder = PromptEncoder(tokenizer_of(byte_level_backend()))
        for _ in range(3):
            task = asyncio.ensure_future(encoder._run(HUGE_CHARS + 1, work))
            await asyncio.sleep(0.01)
            task.cancel()
        await encoder._run(HUGE_CHARS + 1, work)

    asyncio.run(check())
    assert most == 1
