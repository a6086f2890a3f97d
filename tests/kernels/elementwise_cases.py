"""Cases of normalisation, gated activations, rows of tables and rotary embedding."""

import torch

from millstream.kernels.kv_cache import alloc_kv_cache
from millstream.kernels.rotary import rotary_tables
from tests.kernels.operator_cases import Call, Draw, call, cases

NUM_TOKENS = (0, 1, 2, 7, 130)
WIDTHS = (1, 15, 64, 576, 2049)
GATED_WIDTHS = (1, 17, 64, 1536)
PAGE_SIZES = (1, 2, 8, 16, 32, 64)
HEAD_DIMS = (64, 80, 96, 112, 128, 256, 6, 10)


def num_tokens_of(draw: Draw) -> int:
    """Neighbouring seeds have other numbers."""
    return NUM_TOKENS[draw.seed % len(NUM_TOKENS)]


def rows(draw: Draw, num_features: int) -> torch.Tensor:
    """Random rows, some with a large spread."""
    return draw.randn(num_tokens_of(draw), num_features) * draw.values.choice((0.01, 1, 8))


def weight_of(draw: Draw, num_features: int) -> torch.Tensor:
    """A norm's weight, in the rows' type or fp32."""
    return torch.linspace(-2, 2, num_features).to(draw.shapes.choice((draw.dtype, torch.float32)))


@cases("rms_norm", num_seeds=20)
def rms_norm_case(draw: Draw) -> Call:
    """Contiguous rows, or the heads of a fused projection."""
    if draw.seed % 3 == 0:
        num_features = draw.shapes.choice((15, 64, 256))
        heads = draw.randn(num_tokens_of(draw), 5, num_features)[:, 1:4]
        return call(heads, weight_of(draw, num_features), 1e-6)
    num_features = draw.shapes.choice(WIDTHS)
    return call(rows(draw, num_features), weight_of(draw, num_features), 1e-5)


@cases("add_rms_norm", num_seeds=20)
def add_rms_norm_case(draw: Draw) -> Call:
    """The residual is changed in place."""
    num_features = draw.shapes.choice(WIDTHS)
    x = rows(draw, num_features)
    return call(x, torch.flip(x, (0,)) * 2, weight_of(draw, num_features), 1e-5)


@cases("silu_and_mul")
@cases("gelu_tanh_and_mul")
def gated_case(draw: Draw) -> Call:
    """Widths on and off the vector and block size."""
    return call(rows(draw, 2 * draw.shapes.choice(GATED_WIDTHS)))


@cases("embed")
def embed_case(draw: Draw) -> Call:
    """Ids of this rank's part, its first and last one included, and of its neighbours'."""
    first_id, num_rows = draw.shapes.choice((0, 40)), draw.shapes.choice((1, 30))
    ids = [draw.values.randrange(first_id + num_rows + 9) for _ in range(num_tokens_of(draw))]
    ids[:4] = [first_id, first_id + num_rows - 1, first_id + num_rows, first_id - 1][: len(ids)]
    scale = draw.shapes.choice((1.0, 24.0, 0.3125))
    return call(torch.tensor(ids, dtype=torch.int64), draw.randn(num_rows, draw.shapes.choice(WIDTHS)), first_id, scale)


@cases("select_rows")
def select_rows_case(draw: Draw) -> Call:
    """Some rows more than once, or none."""
    x = draw.randn(130, draw.shapes.choice(WIDTHS))
    indices = [draw.values.randrange(130) for _ in range(num_tokens_of(draw))]
    return call(x, torch.tensor(indices, dtype=torch.int64))


@cases("rotary_tables", dtypes=(torch.float32,), tolerances={torch.float32: (2e-6, 2e-6)})
def rotary_tables_case(draw: Draw) -> Call:
    """Positions up to the longest contexts."""
    num_pairs = draw.shapes.choice((1, 5, 32, 128))
    positions = [draw.values.choice((0, 1, 1000, 131071)) for _ in range(num_tokens_of(draw))]
    inv_freq = 10000 ** (-torch.arange(num_pairs) / num_pairs)
    return call(torch.tensor(positions, dtype=torch.int32), inv_freq, draw.shapes.choice((1.0, 1.25)))


@cases("rotary_and_store", num_seeds=40)
def rotary_case(draw: Draw) -> Call:
    """Tokens of two requests as views of one fused projection, on shuffled pages, from any position on."""
    page_size, head_dim = draw.shapes.choice(PAGE_SIZES), HEAD_DIMS[draw.seed % len(HEAD_DIMS)]
    num_pairs = draw.shapes.choice((head_dim // 2, head_dim // 4))
    num_tokens, num_kv_heads = num_tokens_of(draw), draw.shapes.randint(1, 3)
    num_heads = num_kv_heads * draw.shapes.randint(1, 8)
    pages_each = 150 // page_size + 1
    cache = alloc_kv_cache(2 * pages_each, page_size, num_kv_heads, head_dim, draw.dtype, "cpu")
    page_table = torch.randperm(2 * pages_each, generator=draw.generator).int().view(2, pages_each)
    fused = draw.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    first, split = draw.values.randrange(20), draw.values.randint(0, num_tokens)
    positions = torch.cat((torch.arange(split), torch.arange(num_tokens - split))).int() + first
    row_of = (torch.arange(num_tokens) >= split).int()
    cos, sin = rotary_tables.reference(positions, 100 ** (-torch.arange(num_pairs) / num_pairs), 1.0)
    return call(q, k, v, cos, sin, cache, page_table, row_of, positions)
