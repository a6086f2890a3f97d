"""transformers' own tokenizers, which ours must equal. Loading one takes seconds, so each test run does it once."""

from functools import cache
from pathlib import Path
from typing import Any

from millstream.common.model_path import find_model


@cache
def transformers_smollm2() -> Any:
    from transformers import AutoTokenizer

    path = find_model("smollm2")
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def transformers_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))
