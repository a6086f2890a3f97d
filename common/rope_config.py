"""Rope scaling as configurations ask for it; the oracle is transformers' ROPE_INIT_FUNCTIONS."""

import math

from .config_fields import Fields
from .model_error import ModelError
from .model_struct import MAX_CONTEXT, RopeConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def hf_rope(fields: Fields, rope: Fields, theta: float | None = None) -> RopeConfig:
    """From the `rope_scaling` or `rope_parameters` object of config.json; `theta` is what holds without one there."""
    rope_type = rope.string("rope_type", rope.raw("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"{rope.source}: rope type {rope_type!r} is not known; known are {', '.join(ROPE_TYPES)}")
    for place in (fields, rope):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{place.source}: partial_rotary_factor other than 1 is not supported")
    if theta is None:
        theta = fields.number("rope_theta", 10_000.0)
    theta = rope.number("rope_theta", theta, low=1.0)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=rope.number("factor"))
    holder = fields if "original_max_position_embeddings" in fields else rope
    context = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
    original = holder.integer("original_max_position_embeddings", context, high=MAX_CONTEXT)
    return _llama3(rope, theta, original) if rope_type == "llama3" else _yarn(rope, theta, original, context / original)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cos and sin with (https://arxiv.org/abs/2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(rope: Fields, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ModelError(f"{rope.source}: low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Fields, theta: float, original: int, usual_factor: float) -> RopeConfig:
    factor = rope.number("factor", usual_factor)
    attention_factor = yarn_attention_factor(factor)
    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        scales = [yarn_attention_factor(factor, rope.number(name)) for name in ("mscale", "mscale_all_dim")]
        attention_factor = scales[0] / scales[1]
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        attention_factor=rope.number("attention_factor", attention_factor),
    )
