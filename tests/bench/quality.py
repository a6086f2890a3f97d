"""What quantised weights cost in quality: perplexity, and agreement with dense bf16 weights on the same text.

    python -m tests.bench.quality [--num-tokens N] [--only int4] [--dtype float32]     (one JSON line each)

The text is English prose (prose/), cut into requests of 1,024 tokens, each through the real decoder in one step. At
every position the weights are asked for the next token after the text itself (teacher forcing). They agree where their
first choice is that of dense weights, by the rule of design.md section 8 also where it is the second choice of those
and close. Quantised copies serve alone here, though a server may serve long steps with dense copies of the same values.

int8 and int4 quantise the file's values as if they had come from safetensors; `stored` is what the file itself packs.
Where the file is Q4_1 already, int4 finds its grid again and looks better than it would on a model in bf16.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from millstream.common.config import cache_dir
from millstream.common.gguf_file import GGUFFile
from millstream.common.model_config import load_model_config
from millstream.common.model_path import find_model
from millstream.common.tensor_parallel import shard_plan, tensor_shards
from millstream.common.tokenizer import load_tokenizer
from millstream.kernels import backend
from millstream.tp_worker.communicator import SingleCommunicator
from millstream.tp_worker.decoder import Decoder
from millstream.tp_worker.forward_batch import ForwardBatch
from millstream.tp_worker.gguf_weights import GGUFSource
from millstream.tp_worker.weights import load_weights
from tests.e2e.teacher_forced import BF16_GAP

PROSE = Path(__file__).parent / "prose" / "news_from_nowhere.txt"
CHUNK_LEN, PAGE_SIZE = 1024, 16
REFERENCE = "none"
STORED = "auto"
MODES = (STORED, "int8", "int4", "w8a8")


@dataclass(frozen=True)
class Choices:
    """What weights say about a text, at every position but the first of each request."""

    losses: torch.Tensor  # -log p of the text's next token
    tokens: torch.Tensor  # [T, 2]: the first and the second choice
    gaps: torch.Tensor  # between their logits

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return math.exp(self.losses.double().mean())


@dataclass(frozen=True)
class Quality:
    """Of quantised weights, beside dense ones. Shares are 0 to 1."""

    perplexity: float
    perplexity_change: float
    same_token: float
    agreement: float


def main() -> None:
    """Measure the chosen modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=10**9)
    parser.add_argument("--only", choices=MODES)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    backend.configure("auto", cache_dir())
    token_ids = prose_tokens()[: options.num_tokens]
    modes = [options.only] if options.only else list(MODES)
    for mode, seconds, quality in compare(token_ids, modes, getattr(torch, options.dtype)):
        figures = {name: round(value, 5) for name, value in vars(quality).items()}
        name = "stored" if mode == STORED else mode
        print(json.dumps({"weights": name, "num_tokens": len(token_ids), **figures, "seconds": round(seconds, 1)}))


def prose_tokens() -> list[int]:
    """The text in the packaged model's tokens."""
    return load_tokenizer(find_model("smollm2")).encode(PROSE.read_text())


def compare(token_ids: Sequence[int], modes: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, float, Quality]]:
    """(mode, seconds, its quality) of the packaged model; the first is that of the dense weights themselves."""
    with tempfile.TemporaryDirectory() as directory:
        plain = write_plain_model(Path(directory))
        reference = None
        for mode in (REFERENCE, *modes):
            start = time.monotonic()
            path = plain if mode in ("int8", "int4") else find_model("smollm2")
            found = choices(load_decoder(path, mode, dtype), token_ids)
            reference = reference or found
            yield mode, time.monotonic() - start, judge(found, reference)


def judge(found: Choices, reference: Choices) -> Quality:
    """The figures of one beside the other."""
    first = found.tokens[:, 0]
    is_same = first == reference.tokens[:, 0]
    is_close_second = (first == reference.tokens[:, 1]) & (reference.gaps < BF16_GAP)
    change = found.perplexity / reference.perplexity - 1
    shares = (float(x.double().mean()) for x in (is_same, is_same | is_close_second))
    return Quality(found.perplexity, change, *shares)


def choices(decoder: Decoder, token_ids: Sequence[int]) -> Choices:
    """Run a text through a decoder."""
    losses, tokens, gaps = [], [], []
    for start in range(0, len(token_ids) - 1, CHUNK_LEN):
        chunk = token_ids[start : start + CHUNK_LEN]
        if len(chunk) < 2:
            break
        logits_TV = decoder.forward(make_batch(chunk)).logits_SV
        assert logits_TV is not None
        logits_TV = logits_TV[:-1]
        losses.append(torch.nn.functional.cross_entropy(logits_TV, torch.tensor(chunk[1:]), reduction="none"))
        top = logits_TV.topk(2, dim=-1)
        tokens.append(top.indices)
        gaps.append(top.values[:, 0] - top.values[:, 1])
    return Choices(torch.cat(losses), torch.cat(tokens), torch.cat(gaps))


def make_batch(token_ids: Sequence[int]) -> ForwardBatch:
    """One request, whole, and the logits of all its positions."""
    num_tokens = len(token_ids)
    return ForwardBatch(
        token_ids_T=torch.tensor(token_ids),
        positions_T=torch.arange(num_tokens, dtype=torch.int32),
        row_of_T=torch.zeros(num_tokens, dtype=torch.int32),
        page_table_RP=torch.arange(CHUNK_LEN // PAGE_SIZE, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        kv_lens_R=torch.tensor([num_tokens], dtype=torch.int32),
        logits_indices_S=torch.arange(num_tokens),
        num_tokens=num_tokens,
        num_reqs=1,
        max_query_len=num_tokens,
        max_kv_len=num_tokens,
    )


def load_decoder(path: Path, quantization: str, dtype: torch.dtype) -> Decoder:
    """A decoder whose quantised layers have no dense copy."""
    config = load_model_config(path, "auto")
    weights = load_weights(
        path,
        config,
        "auto",
        dtype,
        "cpu",
        0,
        1,
        lambda loaded, total: None,
        quantization=quantization,
        keeps_dense=False,
    )
    decoder = Decoder(config, weights, SingleCommunicator())
    decoder.alloc_kv_caches(CHUNK_LEN // PAGE_SIZE, PAGE_SIZE)
    return decoder


def write_plain_model(folder: Path) -> Path:
    """The packaged model's values in float32, as a directory of safetensors."""
    path = find_model("smollm2")
    config = load_model_config(path, "auto")
    source = GGUFSource(GGUFFile(path), config)
    tensors = {}
    for name, shard in tensor_shards(config, shard_plan(config, 0, 1)).items():
        tensors[name] = torch.empty(shard.local_shape)
        source.read_into(tensors[name], name, shard)
    save_file(tensors, folder / "model.safetensors")
    fields = {
        "architectures": [config.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": config.hidden_act,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


if __name__ == "__main__":
    main()
