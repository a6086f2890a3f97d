"""From the start-up configuration to a worker that is ready: device, weights, KV pages, a first step."""

from collections.abc import Callable
from functools import partial

import torch

from ..common.config import ChildConfig, cache_dir
from ..common.messages import KVGroup, WorkerReady
from ..common.model_config import load_model_config
from ..common.model_path import find_model
from ..common.tokenizer import load_tokenizer
from ..kernels import backend
from .connect import make_communicator
from .decoder import Decoder
from .device import choose_device, choose_dtype, take_cores
from .grammar import Grammars
from .kv_memory import agree_on_kv_pages
from .rows import Limits
from .warm_up import warm_up_batches
from .weights import load_weights
from .worker import Worker

FULL_GROUP = "full"


def load_worker(config: ChildConfig, on_progress: Callable[[int, int], None]) -> tuple[Worker, WorkerReady]:
    """Load this rank's part of the model and run a step; `on_progress` as in `load_weights`."""
    args, rank = config.args, config.rank
    backend.configure("torch" if args.kernel_backend == "torch" else "auto", cache_dir())
    take_cores(rank, args.tp_size)
    device = choose_device(args, rank)
    path, dtype = find_model(args.model_path), choose_dtype(args, device)
    model_config = load_model_config(path, args.load_format)
    context_len = args.context_length or model_config.max_position_embeddings
    weights = load_weights(
        path,
        model_config,
        args.load_format,
        dtype,
        device,
        rank,
        args.tp_size,
        on_progress,
        quantization=args.quantization,
        keeps_dense=config.keeps_dense,
        seed=args.random_seed or 0,
    )
    communicator = make_communicator(config, device)
    decoder = Decoder(model_config, weights, communicator)
    page_bytes = decoder.kv_page_bytes(args.page_size)
    num_pages = agree_on_kv_pages(
        args, communicator, device, page_bytes=page_bytes, weight_bytes=weights.num_bytes, context_len=context_len
    )
    decoder.alloc_kv_caches(num_pages, args.page_size)
    limits = Limits(
        max_rows=args.max_running_requests,
        context_len=context_len,
        vocab_size=model_config.vocab_size,
        num_pages=num_pages,
        page_size=args.page_size,
    )
    grammars = Grammars(limits.vocab_size, partial(load_tokenizer, path), torch.get_num_threads() // 2)
    worker = Worker(decoder, communicator, limits, device, grammars if rank == 0 else None)
    for batch in warm_up_batches(limits, args.chunked_prefill_size):
        worker.run_step(batch)
    ready = WorkerReady(
        rank=rank,
        kv_groups=[KVGroup(FULL_GROUP, model_config.num_layers, page_bytes, num_pages)],
        vocab_size=model_config.vocab_size,
        context_len=context_len,
        max_running_requests=args.max_running_requests,
        weight_bytes=weights.num_bytes,
    )
    return worker, ready
