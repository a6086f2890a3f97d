"""Why a request ended. Names and JSON are SGLang's."""

from typing import Any

import msgspec


class FINISH_LENGTH(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`max_new_tokens` or the context was reached."""

    length: int

    def to_json(self) -> dict[str, Any]:
        """SGLang's JSON."""
        return {"type": "length", "length": self.length}


class FINISH_MATCHED_TOKEN(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An EOS id or one of `stop_token_ids` was sampled; it is the last of `output_ids`, and not in the text."""

    matched: int

    def to_json(self) -> dict[str, Any]:
        """SGLang's JSON."""
        return {"type": "stop", "matched": self.matched}


class FINISHED_GRAMMAR(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The output is all that its grammar allows: nothing more may come. Its last token is part of the text."""

    @property
    def matched(self) -> None:
        """No token or text ended it."""
        return None

    def to_json(self) -> dict[str, Any]:
        """In the shape of SGLang's other stops."""
        return {"type": "stop", "matched": None}


class FINISH_MATCHED_STR(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the stop strings appeared in the text."""

    matched: str

    def to_json(self) -> dict[str, Any]:
        """SGLang's JSON."""
        return {"type": "stop", "matched": self.matched}


class FINISHED_MATCHED_REGEX(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the stop regexes matched in the text; `matched` is the pattern."""

    matched: str

    def to_json(self) -> dict[str, Any]:
        """SGLang's JSON."""
        return {"type": "stop", "matched": self.matched}


class FINISH_ABORT(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request was refused, aborted or failed; `status_code` is the HTTP status for a waiting client."""

    message: str
    status_code: int
    err_type: str

    def to_json(self) -> dict[str, Any]:
        """SGLang's JSON."""
        return {
            "type": "abort",
            "message": self.message,
            "status_code": self.status_code,
            "err_type": self.err_type,
        }


FinishReason = (
    FINISH_LENGTH | FINISH_MATCHED_TOKEN | FINISHED_GRAMMAR | FINISH_MATCHED_STR | FINISHED_MATCHED_REGEX | FINISH_ABORT
)
