"""Reads the tokenizer of a checkpoint folder and its settings files."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.config import BertConfig
from jaxft.text.batching import TextError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_LONGEST_TOKEN = 1000  # characters of a token of a Unigram model; its tree is freed recursively
_LONGEST_REGEX = 10_000  # characters of all regular expressions; a class such as \\p{L} compiles to 16 kB
_MOST_GROWTH = 10_000  # times that the replacements of normalizers may lengthen a text


def load(folder: Path, do_lower_case: bool) -> "Tokenizer":
    """Loads tokenizer.json, or else a BERT vocab.txt. `do_lower_case` comes before the tokenizer's own normalizer."""
    from tokenizers import Tokenizer, normalizers

    file, vocab = folder / "tokenizer.json", folder / "vocab.txt"
    if os.path.lexists(file):
        _check_cost(file)
        with library_errors(f"{file}: not a tokenizer of the tokenizers library"):
            tokenizer = Tokenizer.from_file(str(file))
    elif os.path.lexists(vocab):
        tokenizer = _bert_tokenizer(vocab)
    else:
        raise CheckpointError(f"{folder}: no tokenizer: neither tokenizer.json nor vocab.txt is there")
    settings_file = folder / "tokenizer_config.json"
    side = read_settings(settings_file).get("truncation_side")
    if side not in (None, "left", "right"):
        raise CheckpointError(f"{settings_file}: truncation_side must be left or right, got {side!r:.80}")
    if side is not None:
        tokenizer.enable_truncation(max_length=sys.maxsize, direction=side)  # `truncating` keeps the direction
    if do_lower_case:
        rest = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    return tokenizer


def _bert_tokenizer(vocab: Path) -> "Tokenizer":
    """Makes BERT's WordPiece tokenizer from its vocabulary (one token a line). Old folders have no other file."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    checkpoint_files.check_file(vocab)
    with library_errors(f"{vocab}: not a vocabulary of one token a line"):
        tokenizer = Tokenizer(models.WordPiece.from_file(str(vocab), unk_token="[UNK]"))
    missing = [token for token in special if tokenizer.token_to_id(token) is None]
    if missing:
        raise CheckpointError(f"{vocab}: not a BERT vocabulary: {', '.join(missing)} missing")
    config_file = vocab.with_name("tokenizer_config.json")
    config = read_settings(config_file)

    def option(name: str, default: bool | None) -> Any:
        value = config.get(name)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{config_file}: {name} must be true, false or null, got {value!r:.80}")
        return default if value is None else value

    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=option("tokenize_chinese_chars", True),
        strip_accents=option("strip_accents", None),
        lowercase=option("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(special)
    return tokenizer


def _check_cost(file: Path) -> None:
    """Checks the parts of a tokenizer.json from which a small file can take gigabytes, before they are made."""
    content = checkpoint_files.read_json_object(file)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    entries = vocabulary if isinstance(vocabulary, list) else []  # [token, score] of a Unigram model
    tokens = [entry[0] for entry in entries if isinstance(entry, list) and entry and isinstance(entry[0], str)]
    # Each character of a token may take 300 bytes, twice.
    if max(map(len, tokens), default=0) > _LONGEST_TOKEN or sum(map(len, tokens)) > 24 * len(tokens) + 200_000:
        raise CheckpointError(f"{file}: has tokens of more than {_LONGEST_TOKEN} characters, or of 24 on average")
    parts, characters, growth = [value for name, value in content.items() if name != "model"], 0, 1.0
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
            pattern, text = part.get("pattern"), part.get("content")
            regex, plain = (pattern.get(k) if isinstance(pattern, dict) else None for k in ("Regex", "String"))
            characters += len(regex) if isinstance(regex, str) else 0
            if part.get("type") == "Replace" and isinstance(text, str):  # a regex may match the empty string
                growth *= max(1, len(text) / len(plain) if isinstance(plain, str) and plain else 1 + len(text))
    if characters > _LONGEST_REGEX:
        raise CheckpointError(f"{file}: has {characters} characters of regular expressions, at most {_LONGEST_REGEX}")
    if not growth <= _MOST_GROWTH:
        raise CheckpointError(f"{file}: the normalizers may make a text more than {_MOST_GROWTH} times as long")


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns errors and panics of the tokenizers library in the block into a CheckpointError that starts with `what`."""
    try:
        yield
    except BaseException as error:
        if not checkpoint_files.is_library_error(error):
            raise
        raise CheckpointError(f"{what}: {error}") from error


def encode(tokenizer: "Tokenizer", texts: "Sequence[str | tuple[str, str]]") -> "list[Encoding]":
    """Tokenises texts or pairs. Raises a TextError for the first one that the tokenizers library cannot tokenise."""
    try:
        return tokenizer.encode_batch_fast(texts)
    except BaseException as error:
        if not checkpoint_files.is_library_error(error):
            raise
        if len(texts) == 1:
            raise TextError(0, texts[0], f"cannot be tokenised: {error}") from error
    found: list[Encoding] = []
    for index, text in enumerate(texts):
        try:
            found += encode(tokenizer, [text])
        except TextError as error:
            raise TextError(index, text, error.reason) from error.__cause__
    return found


def truncating(
    tokenizer: "Tokenizer", max_length: int, config: BertConfig, *, is_pair: bool = False, owner: str, argument: str
) -> "Tokenizer":
    """Copies a tokenizer; the copy truncates at `max_length` tokens, special tokens included, and does not pad.

    Raises a ValueError if there is no room for a token, or if the model lacks a token id or type id of the tokenizer,
    which would give NaN, perhaps hours into a run.
    """
    from tokenizers import Tokenizer, models

    with library_errors(f"{owner}: the tokenizer cannot be used"):
        special_tokens = tokenizer.num_special_tokens_to_add(is_pair=is_pair)
    if max_length <= special_tokens:
        raise ValueError(
            f"{owner}: {argument} must be above {special_tokens}, the number of special tokens that the tokenizer"
            f" adds, got {max_length}"
        )
    with library_errors(f"{owner}: the tokenizer cannot be used"):
        tokens = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
        # Files often contain padding and truncation settings that are left over from training.
        copy = type(tokenizer).from_str(tokenizer.to_str())
        copy.no_padding()
        copy.no_truncation()
        # The post-processor has ids of its own. It runs on texts of one token to show them.
        token = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")
        processed = copy.post_process(token, token if is_pair else None)
        copy.enable_truncation(max_length=max_length, direction=(tokenizer.truncation or {}).get("direction", "right"))
    tokens |= zip(processed.ids, processed.tokens, strict=True)
    if (largest_id := max(tokens, default=0)) >= config.vocab_size:
        raise ValueError(
            f"{owner}: the tokenizer has ids up to {largest_id}, {tokens[largest_id]!r:.80}, but the model's"
            f" vocab_size is only {config.vocab_size}"
        )
    if len(processed) != special_tokens + 1 + is_pair:
        raise ValueError(f"{owner}: the tokenizer's post-processor must keep each text, once")
    # A model without token types gets none, and one text gets type 0 only.
    types = config.type_vocab_size if is_pair else min(config.type_vocab_size, 1)
    if types and (largest_type := max(processed.type_ids)) >= types:
        raise ValueError(f"{owner}: the tokenizer has type ids up to {largest_type}; supported are those below {types}")
    return copy


def max_length(file: Path, name: str) -> int | None:
    """Reads a maximum length from a settings file; None if absent. Huge ones ("no limit") become `sys.maxsize`."""
    value = read_settings(file).get(name)
    if value is None:
        return None
    is_integer = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not is_integer or value < 1:
        raise CheckpointError(f"{file}: the maximum length must be an integer of at least 1, got {value!r:.80}")
    return int(min(value, sys.maxsize))


def read_settings(file: Path) -> dict[str, Any]:
    """Reads the JSON object in `file`; {} if the file does not exist. Raises a CheckpointError if it is malformed."""
    return checkpoint_files.read_json_object(file) if os.path.lexists(file) else {}
