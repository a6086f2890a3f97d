"""The scheduler's start: its links, the wait for the workers, and what they and the flags make of its configuration."""

from typing import NamedTuple

from ..common.channel import Hub, Receiver, Sender
from ..common.config import ServerArgs
from ..common.links import (
    FromRank,
    ToScheduler,
    detokenizer_to_scheduler,
    manager_to_scheduler,
    rank_to_scheduler,
    scheduler_to_detokenizer,
    scheduler_to_manager,
    scheduler_to_rank,
)
from ..common.messages import LoadProgress, SchedulerReady, WorkerReady
from ..common.text_messages import TextEnded
from .scheduler_config import SchedulerConfig

SAME_NAMES = (  # fields of SchedulerConfig that are flags
    "chunked_prefill_size",
    "max_prefill_tokens",
    "schedule_policy",
    "schedule_ageing_steps",
    "schedule_conservativeness",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "priority_scheduling_preemption_threshold",
    "max_queued_requests",
    "max_queued_tokens",
    "request_waiting_timeout",
    "request_timeout",
    "radix_eviction_policy",
    "disable_overlap_schedule",
    "disable_radix_cache",
)


class Links(NamedTuple):
    """The ends of all links of this process."""

    from_manager: Receiver[ToScheduler]
    from_detokenizer: Receiver[TextEnded]
    from_ranks: list[Receiver[FromRank]]
    to_manager: Sender
    to_detokenizer: Sender
    to_ranks: list[Sender]


def open_links(hub: Hub, tp_size: int) -> Links:
    """Bind what this process receives from, connect to what it sends to."""
    return Links(
        from_manager=hub.open_receiver(manager_to_scheduler(), ToScheduler),
        from_detokenizer=hub.open_receiver(detokenizer_to_scheduler(), TextEnded),
        from_ranks=[hub.open_receiver(rank_to_scheduler(rank), FromRank) for rank in range(tp_size)],
        to_manager=hub.open_sender(scheduler_to_manager()),
        to_detokenizer=hub.open_sender(scheduler_to_detokenizer()),
        to_ranks=[hub.open_sender(scheduler_to_rank(rank)) for rank in range(tp_size)],
    )


def wait_for_workers(hub: Hub, links: Links, tp_size: int) -> list[WorkerReady]:
    """Forward the progress of loading until every rank is ready; returns what they said, by rank."""
    ready: dict[int, WorkerReady] = {}
    while len(ready) < tp_size:
        hub.wait()
        for message in (message for receiver in links.from_ranks for message in receiver.drain()):
            if isinstance(message, LoadProgress):
                links.to_manager.send(message)
            elif isinstance(message, WorkerReady):
                ready[message.rank] = message
    return [ready[rank] for rank in range(tp_size)]


def scheduler_config(args: ServerArgs, workers: list[WorkerReady]) -> SchedulerConfig:
    """What the flags ask and the ranks can do; RuntimeError when the ranks do not agree."""
    first = workers[0]
    for worker in workers:
        if (worker.vocab_size, worker.context_len) != (first.vocab_size, first.context_len):
            raise RuntimeError(f"rank {worker.rank} has another vocabulary or context than rank 0")
        if [group.name for group in worker.kv_groups] != [group.name for group in first.kv_groups]:
            raise RuntimeError(f"rank {worker.rank} has other KV groups than rank 0")
    if len(first.kv_groups) != 1:
        raise RuntimeError(f"the scheduler serves one KV group, and the workers have {len(first.kv_groups)}")
    num_pages = min(worker.kv_groups[0].num_pages for worker in workers)
    if num_pages < 1:
        raise RuntimeError("the workers have no room for a KV page")
    return SchedulerConfig(
        num_pages=num_pages,
        page_size=args.page_size,
        vocab_size=first.vocab_size,
        context_len=first.context_len,
        max_running_requests=min(args.max_running_requests, *(worker.max_running_requests for worker in workers)),
        random_seed=args.random_seed or 0,
        **{name: getattr(args, name) for name in SAME_NAMES},
    )


def ready_message(config: SchedulerConfig, workers: list[WorkerReady]) -> SchedulerReady:
    """What the tokenizer manager should know once all ranks are ready."""
    return SchedulerReady(
        num_kv_pages=config.num_pages,
        page_size=config.page_size,
        vocab_size=config.vocab_size,
        context_len=config.context_len,
        max_running_requests=config.max_running_requests,
        weight_bytes=sum(worker.weight_bytes for worker in workers),
    )
