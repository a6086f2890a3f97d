"""SGLang's scoring: how likely each of some tokens is to come next after a query and an item. No text is generated.

Items that come behind the query share its prefix, which is computed once.
"""

import math
from typing import Any

import msgspec

from ...common.logprobs import MAX_ASKED_TOKEN_IDS, LogprobReq, TokenLogprobs
from ...common.sampling_params import SamplingParams
from ..api_error import bad_request, internal_error
from ..call import Call
from ..failure import failure
from ..families import GenerateReq
from ..json_body import CacheSalt, Int32, Int64, Label
from ..prompt_encoder import check_ids
from ..tokenizer_manager import TokenizerManager
from .logprob_format import entries

MAX_ITEMS = 2048
MAX_QUERY_COPIES = 2**26  # characters or ids of the query, which stands in each item's prompt
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


class ScoreRequest(msgspec.Struct, kw_only=True):
    """POST /v1/score: query and items are texts, or token ids."""

    query: str | list[Int64]
    items: str | list[str | list[Int64]]
    label_token_ids: list[Int64]
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None
    rid: Label | None = None
    cache_salt: CacheSalt | None = None
    priority: Int32 | None = None

    def prompts(self) -> list[str | list[int]]:
        """One for each item; APIError for a mixture of texts and ids."""
        items = [self.items] if isinstance(self.items, str) else self.items
        if not 0 < len(items) <= MAX_ITEMS:
            raise bad_request(f"items must hold 1 to {MAX_ITEMS} items, not {len(items)}", "items")
        if len(self.query) * len(items) > MAX_QUERY_COPIES:
            message = f"query times the number of items must be at most {MAX_QUERY_COPIES:,} characters or ids"
            raise bad_request(message, "query")
        return [self._prompt(item) for item in items]

    def check_labels(self, vocab_size: int) -> None:
        """APIError for none, too many, or ids that are not in the vocabulary."""
        if len(self.label_token_ids) > MAX_ASKED_TOKEN_IDS:
            raise bad_request(f"label_token_ids holds at most {MAX_ASKED_TOKEN_IDS} ids", "label_token_ids")
        check_ids(self.label_token_ids, "label_token_ids", vocab_size)

    def _prompt(self, item: str | list[int]) -> str | list[int]:
        query = self.query
        if isinstance(query, str) and isinstance(item, str):
            return item + query if self.item_first else query + item
        if isinstance(query, list) and isinstance(item, list):
            return [*item, *query] if self.item_first else [*query, *item]
        raise bad_request("query and items must both be texts, or both token ids", "items", "invalid_type")


class ScoreService:
    """Answers bodies over one tokenizer manager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def score(self, call: Call, body: ScoreRequest) -> dict[str, Any]:
        """SGLang's answer: for each item the probability of each label; APIError if one of them fails."""
        manager = self._manager
        manager.check_model(body.model)
        manager.check_priority(body.priority)
        body.check_labels(manager.vocab_size)
        prompts = body.prompts()
        async with manager.queue_place(call, len(prompts)):
            sequences = await manager.encoder.prompt_ids(
                prompts, "items", vocab_size=manager.vocab_size, context_len=manager.context_len
            )
            call.label = body.rid or call.label
            found = await self._run(call, body, sequences)
        num_tokens = sum(map(len, sequences))
        return {
            "scores": [_scores(each, apply_softmax=body.apply_softmax) for each in found],
            "model": body.model or manager.served_model_names[0],
            "usage": {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens},
            "object": "scoring",
        }

    async def _run(self, call: Call, body: ScoreRequest, sequences: list[list[int]]) -> list[TokenLogprobs]:
        requests = [
            GenerateReq(
                input_ids=input_ids,
                sampling_params=ONE_TOKEN,
                label=f"{call.label}-{index}" if call.label and len(sequences) > 1 else call.label,
                cache_salt=body.cache_salt,
                priority=body.priority,
                logprobs=LogprobReq(token_ids=tuple(body.label_token_ids)),
            )
            for index, input_ids in enumerate(sequences)
        ]
        found: dict[int, TokenLogprobs] = {}
        with self._manager.generate(call, requests, stream=False) as generation:
            while not generation.done:
                req, output = await generation.next()
                error = failure(req, output.end)
                if error is not None:
                    raise error
                if output.logprobs is not None:
                    found[req.index] = output.logprobs
        if len(found) != len(sequences):
            raise internal_error()
        return [found[index] for index in range(len(sequences))]


def _scores(logprobs: TokenLogprobs, *, apply_softmax: bool) -> list[float]:
    """Probabilities of the labels: of all tokens, or of the labels alone with a softmax over them."""
    asked = next(entries([0], logprobs)).asked
    if not all(map(math.isfinite, asked)):
        raise internal_error()
    probabilities = [math.exp(each - (max(asked) if apply_softmax else 0.0)) for each in asked]
    total = sum(probabilities) if apply_softmax else 1.0
    return [each / total for each in probabilities]
