"""How text is cut before byte-level BPE, by the name that a GGUF file gives it (`tokenizer.ggml.pre`).

A vocabulary's merges only fit the cut with which they were learned, so an unknown name is refused. The patterns are
those of the models' own tokenizer.json files; the names and which of them ignore merges are llama.cpp's.
"""

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from .model_error import ModelError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)

PATTERNS = {
    LLAMA3: ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"),
    QWEN2: ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"),
    QWEN35: ("qwen35",),
    TEKKEN: ("tekken",),
    GPT4O: ("gpt-4o", "llama4", "kanana2"),
}
PATTERN_OF = {name: pattern for pattern, names in PATTERNS.items() for name in names}
WHOLE_DIGIT_RUNS = ("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling")
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
IGNORE_MERGES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken", "llama4")
ADD_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")


def make_pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer called `name`; ModelError with the known names where there is none."""
    if name in PATTERN_OF:
        split = Split(Regex(PATTERN_OF[name]), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    if name in SINGLE_DIGITS:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if name in WHOLE_DIGIT_RUNS:
        return ByteLevel(add_prefix_space=False)
    known = ", ".join(sorted([*PATTERN_OF, *SINGLE_DIGITS, *WHOLE_DIGIT_RUNS]))
    raise ModelError(f"tokenizer.ggml.pre is {name!r}, which is not known; known are {known}")
