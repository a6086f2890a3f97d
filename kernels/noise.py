"""Noise that is a function of (seed, absolute position, token id) alone: Philox4x32-10, then Gumbel.

Philox is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), written
here from the paper. Key: the 64 bits of the seed. Counter: (token id // 4, position low, position high, 0); the token
takes word (token id % 4) of the block. Everything after the words uses IEEE additions, multiplications and divisions of
doubles in a fixed order, so every version gives the same bits.
"""

import torch

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 10
MASK = 0xFFFFFFFF

LN2 = 0.6931471805599453
SQRT2 = 1.4142135623730951
MAX_GUMBEL = 22.9  # above -log(-log(1 - 2^-33)): no noise is larger

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """One block of four 32-bit words per element; all words are int64 tensors with values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIER_0)
        high1, low1 = _multiply(c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def random_words(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """One 32-bit word (int64) per element of three int64 tensors of one shape; a seed's 64 bits are taken as they are."""
    blocks = torch.stack(_blocks(seeds, positions, token_ids >> 2))
    return blocks.gather(0, (token_ids & 3)[None])[0]


def vocabulary_words(seed_R: torch.Tensor, positions_R: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The words of all tokens [R, num_tokens]: each block is computed once."""
    block_ids = torch.arange(-(-num_tokens // 4), device=seed_R.device).expand(len(seed_R), -1)
    blocks = _blocks(seed_R[:, None].expand_as(block_ids), positions_R[:, None].expand_as(block_ids), block_ids)
    return torch.stack(blocks, dim=-1).flatten(1)[:, :num_tokens]


def _blocks(seeds: torch.Tensor, positions: torch.Tensor, block_ids: torch.Tensor) -> Words:
    counter = (block_ids, positions & MASK, (positions >> 32) & MASK, torch.zeros_like(block_ids))
    return philox4x32(counter, (seeds & MASK, (seeds >> 32) & MASK))


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Doubles in (0, 1): (word + 1/2) / 2^32, exact."""
    return (words.double() + 0.5) * 2.0**-32


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise (float64), below MAX_GUMBEL."""
    return -log(-log(uniform(random_words(seeds, positions, token_ids))))


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal doubles, within 2 units in the last place, in a fixed order of operations.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(s) with s = (m - 1) / (m + 1), as a series in s^2.
    """
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).view(torch.float64)
    is_high = mantissa >= SQRT2
    mantissa = torch.where(is_high, mantissa * 0.5, mantissa)
    exponent = exponent + is_high
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, 1.0 / 21.0)
    for denominator in range(19, 0, -2):
        series = series * square + 1.0 / denominator
    return exponent.double() * LN2 + (s * 2.0) * series


def _multiply(x: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, without leaving signed 64-bit range."""
    low_product = (x & 0xFFFF) * multiplier
    high_product = (x >> 16) * multiplier + (low_product >> 16)
    return high_product >> 16, ((high_product & 0xFFFF) << 16) | (low_product & 0xFFFF)
