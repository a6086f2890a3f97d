"""How many KV pages the ranks have: one number, on which they agree before anyone allocates."""

import torch

from ..common.config import ServerArgs
from ..common.memory_plan import available_host_memory, plan_kv_pages
from .communicator import Communicator


def agree_on_kv_pages(
    args: ServerArgs,
    communicator: Communicator,
    device: torch.device,
    *,
    page_bytes: int,
    weight_bytes: int,
    context_len: int,
) -> int:
    """The number of pages of every rank. `page_bytes` and `weight_bytes` are this rank's; weights are loaded.

    On CPU the ranks share a host, and rank 0 plans for all; on CUDA the smallest plan counts.
    """
    own = torch.tensor([page_bytes, weight_bytes, _free_bytes(device)], device=device)
    everyone = communicator.gather_to_first(own)
    agreed = torch.zeros(1, dtype=torch.int64, device=device)
    if everyone is not None:
        ranks = torch.stack(everyone).tolist()
        if device.type == "cpu":
            ranks = [[sum(rank[0] for rank in ranks), sum(rank[1] for rank in ranks), ranks[0][2]]]
        agreed[0] = min(_plan(args, device.type, context_len, *rank) for rank in ranks)
    return int(communicator.broadcast_first(agreed))


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_memory()


def _plan(args: ServerArgs, device: str, context_len: int, page_bytes: int, weight_bytes: int, free_bytes: int) -> int:
    return plan_kv_pages(
        args,
        device=device,
        kv_bytes_per_token=page_bytes // args.page_size,
        weight_bytes=weight_bytes,
        context_len=context_len,
        available_bytes=free_bytes + weight_bytes,
    )
