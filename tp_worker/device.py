"""Where and in which type a rank computes, and with how many threads."""

import os

import torch

from ..common import cpu
from ..common.config import ServerArgs
from ..common.flags import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(args: ServerArgs, rank: int) -> torch.device:
    """The rank's device; ConfigError where CUDA is asked for and there are not enough devices."""
    has_cuda = torch.cuda.is_available()
    if args.device == "cpu" or (args.device == "auto" and not has_cuda):
        return torch.device("cpu")
    num_devices = torch.cuda.device_count() if has_cuda else 0
    if args.tp_size > num_devices:
        raise ConfigError(f"--device cuda with --tp-size {args.tp_size}: torch finds {num_devices} CUDA devices")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def choose_dtype(args: ServerArgs, device: torch.device) -> torch.dtype:
    """What `--dtype` says; auto is bfloat16 where the device multiplies it in hardware."""
    if args.dtype != "auto":
        return DTYPES[args.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if cpu.multiplies_bfloat16() else torch.float32


def take_cores(rank: int, tp_size: int) -> None:
    """Share the cores among the ranks of this host: a thread for each of a rank's cores, on which the rank then stays.

    Where a CPU quota allows fewer cores than there are, or ranks outnumber cores, the kernel places the threads. Before
    the first parallel operator: its threads keep the cores that they start with.
    """
    cores, num_cores = cpu.physical_cores(), cpu.num_physical_cores()
    torch.set_num_threads(max(1, num_cores // tp_size))
    if num_cores == len(cores) >= tp_size:
        os.sched_setaffinity(0, cores[rank * num_cores // tp_size : (rank + 1) * num_cores // tp_size])
