"""Which communicator connects the ranks."""

from pathlib import Path

import torch

from ..common.config import ChildConfig
from ..kernels.collectives import can_share_memory
from .communicator import Communicator, SingleCommunicator
from .gloo import GlooCommunicator
from .nccl import NcclCommunicator
from .shared_memory import SharedMemoryCommunicator

STORE_NAME = "ranks"  # torch.distributed's meeting point


def make_communicator(config: ChildConfig, device: torch.device) -> Communicator:
    """NCCL on CUDA; on CPU shared memory, or gloo where it is switched off or cannot work."""
    size, timeout = config.args.tp_size, config.args.watchdog_timeout
    store_file = Path(config.run_dir) / STORE_NAME
    if size == 1:
        return SingleCommunicator()
    if device.type == "cuda":
        return NcclCommunicator(config.rank, size, store_file, device, timeout=timeout)
    if config.args.disable_custom_all_reduce or config.shared_memory_fd < 0 or not can_share_memory():
        return GlooCommunicator(config.rank, size, store_file, timeout=timeout)
    return SharedMemoryCommunicator(config.rank, size, config.shared_memory_fd, timeout=timeout)
