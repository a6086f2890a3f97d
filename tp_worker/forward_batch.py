"""What the decoder computes in one step: built once, then only read.

T tokens of the step, R requests (rows of the step), P pages of a page table, S rows that sample, N tokens whose hidden
states are wanted.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step, request after request: extend rows first, then decode rows (one token each).

    Request r owns tokens query_starts[r]..query_starts[r + 1]; they are the last of its kv_lens_R[r] tokens. All
    tensors lie on the decoder's device. Requests that failed the checks are not in it, so every number can be trusted.
    """

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int32, absolute
    row_of_T: torch.Tensor  # int32: index into page_table_RP and kv_lens_R
    page_table_RP: torch.Tensor  # int32: page ids; those behind a request's last page are arbitrary
    query_starts: torch.Tensor  # int32 [R + 1]
    kv_lens_R: torch.Tensor  # int32: tokens known to the KV cache after this step
    logits_indices_S: torch.Tensor  # int64: the T indices whose logits are wanted, in request order; may be empty
    num_tokens: int  # T
    num_reqs: int  # R
    max_query_len: int
    max_kv_len: int
    hidden_indices_N: torch.Tensor | None = None  # int64: the T indices whose hidden states are wanted; None: none

    @property
    def is_decode(self) -> bool:
        """Whether every request computes one token."""
        return self.max_query_len == 1
