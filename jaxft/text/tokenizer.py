"""Reads the tokenizer of a checkpoint folder and its settings files."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint.files import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load(folder: Path, do_lower_case: bool) -> "Tokenizer":
    """Loads tokenizer.json, or else a BERT vocab.txt. `do_lower_case` comes before the tokenizer's own normalizer."""
    from tokenizers import Tokenizer, normalizers

    file, vocab = folder / "tokenizer.json", folder / "vocab.txt"
    if file.exists():
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file}: not a tokenizer of the tokenizers library: {error}") from error
    elif vocab.exists():
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
    try:
        tokenizer = Tokenizer(models.WordPiece.from_file(str(vocab), unk_token="[UNK]"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{vocab}: not a vocabulary of one token a line: {error}") from error
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


def truncating(
    tokenizer: "Tokenizer", max_length: int, *, is_pair: bool = False, owner: str, argument: str
) -> "Tokenizer":
    """Copies a tokenizer; the copy truncates at `max_length` tokens, special tokens included, and does not pad."""
    special_tokens = tokenizer.num_special_tokens_to_add(is_pair=is_pair)
    if max_length <= special_tokens:
        raise ValueError(
            f"{owner}: {argument} must be above {special_tokens}, the number of special tokens that the tokenizer"
            f" adds, got {max_length}"
        )
    # Files often contain padding and truncation settings that are left over from training.
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.no_padding()
    copy.enable_truncation(max_length=max_length, direction=(tokenizer.truncation or {}).get("direction", "right"))
    return copy


def check_vocabulary(tokenizer: "Tokenizer", folder: Path, vocab_size: int) -> None:
    """Checks that the model has an embedding for each token id. A missing one gives NaN, perhaps hours into a run."""
    largest_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest_id >= vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {largest_id}, the model's vocab_size is only {vocab_size}"
        )


def max_length(file: Path, name: str) -> int | None:
    """Reads a maximum length from a settings file; None if absent. Huge ones ("no limit") become `sys.maxsize`."""
    value = read_settings(file).get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value >= 1:  # `not` also rejects NaN, which Python reads from JSON
        raise CheckpointError(f"{file}: the maximum length must be a number of at least 1, got {value!r:.80}")
    return int(min(value, sys.maxsize))


def read_settings(file: Path) -> dict[str, Any]:
    """Reads the JSON object in `file`; {} if the file does not exist. Raises a CheckpointError if it is malformed."""
    return checkpoint_files.read_json_object(file) if file.exists() else {}
