"""The detokenizer process: tokens from the scheduler in, text to the tokenizer manager and text ends back out."""

import gc
import time
from pathlib import Path
from typing import NoReturn

from ..common.channel import Hub, Receiver, Sender
from ..common.config import ChildConfig
from ..common.links import detokenizer_to_manager, detokenizer_to_scheduler, scheduler_to_detokenizer
from ..common.messages import DetokenizerHeartbeat, DetokenizerReady
from ..common.model_path import find_model
from ..common.text_messages import BatchStrOutput, BatchTokenIDOutput
from ..common.tokenizer import load_tokenizer
from .detokenizer import Detokenizer

BACK_PRESSURE_SECONDS = 0.005
HEARTBEAT_MS = 1000


def run(config: ChildConfig) -> None:
    """Load the tokenizer, say so, and serve until the parent goes."""
    hub = Hub(Path(config.run_dir), config.instance_id)
    tokens: Receiver[BatchTokenIDOutput] = hub.open_receiver(scheduler_to_detokenizer(), BatchTokenIDOutput)
    to_manager = hub.open_sender(detokenizer_to_manager())
    to_scheduler = hub.open_sender(detokenizer_to_scheduler())
    try:
        tokenizer = load_tokenizer(find_model(config.args.model_path))
        to_manager.send(DetokenizerReady())
        gc.freeze()  # the vocabulary stays: collections need not walk it
        event_loop(hub, tokens, Detokenizer(tokenizer), to_manager, to_scheduler)
    finally:
        hub.close()


def event_loop(
    hub: Hub, tokens: Receiver[BatchTokenIDOutput], detokenizer: Detokenizer, to_manager: Sender, to_scheduler: Sender
) -> NoReturn:
    """Wait, decode, send; while a reader is far behind, take nothing new."""
    next_heartbeat = 0.0
    while True:
        hub.wait(HEARTBEAT_MS)
        if time.monotonic() >= next_heartbeat:
            to_manager.send(DetokenizerHeartbeat(hub.num_dropped))
            next_heartbeat = time.monotonic() + HEARTBEAT_MS / 1000
        if hub.is_full:
            time.sleep(BACK_PRESSURE_SECONDS)
            continue
        for message in tokens.drain(limit=64):
            done = detokenizer.handle(message)
            for text_ended in done.text_ends:
                to_scheduler.send(text_ended)
            if done.outputs:
                to_manager.send(BatchStrOutput(done.outputs))
