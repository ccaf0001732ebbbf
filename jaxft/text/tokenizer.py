"""Reads the tokenizer of a checkpoint folder as transformers 5 does: its class, settings files and added tokens."""

import base64
import contextlib
import copy
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint import tensors
from jaxft.checkpoint.files import CheckpointError, read_settings
from jaxft.models.config import BertConfig
from jaxft.ops import checks
from jaxft.text.growth import Growth
from jaxft.text.long_texts import LongTexts

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer

_LONGEST_TOKEN = 1000  # characters of a token of a Unigram model; its tree is freed recursively
_LONGEST_REGEX = 10_000  # characters of all regular expressions; a class such as \\p{L} compiles to 16 kB
_MOST_PRE_TOKENIZERS = 16  # two of them may double the time of `Growth.bound`
_MOST_GROWTH = 10_000  # times that the replacements of normalizers may lengthen a text

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BERT = dict(zip(_NAMES, (None, None, "[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]"), strict=True))
_ROBERTA = dict(zip(_NAMES, ("<s>", "</s>", "<unk>", "</s>", "<pad>", "<s>", "<mask>"), strict=True))
_DEBERTA = _BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]"}


@dataclasses.dataclass(frozen=True)
class _Class:
    """Tokenizer class of transformers. It builds everything but the vocabulary from settings and its defaults."""

    model: str | None  # class of the vocabulary in the tokenizers library; None takes tokenizer.json as it is
    vocabulary: tuple[str, ...] = ()  # files that may hold the vocabulary in place of tokenizer.json
    named: dict[str, Any] = dataclasses.field(default_factory=dict)  # default of each special token that has a name
    extra: tuple[str, ...] = ()  # default of the additional special tokens
    token_types: bool = False  # whether models get its token type ids by default
    rules: str = ""  # of what comes before a Unigram vocabulary: a case of `_set_up`
    ends: tuple[str, str] = ("cls_token", "sep_token")  # names of the tokens around a text
    two_ends: bool = False  # whether two end tokens separate a pair, and its second text has the type 0
    keeps_ends: bool = False  # whether the post-processor of tokenizer.json, if it has one, wins
    strips_mask: bool = False  # whether a mask token that is given as text takes the spaces before it


# By name, without the suffix "Fast".
CLASSES = {
    "BertTokenizer": _Class("WordPiece", ("vocab.txt",), _BERT, token_types=True),
    "ElectraTokenizer": _Class("WordPiece", ("vocab.txt",), _BERT, token_types=True),
    "DistilBertTokenizer": _Class("WordPiece", ("vocab.txt",), _BERT),
    "MPNetTokenizer": _Class(
        "WordPiece", ("vocab.txt",), _ROBERTA | {"unk_token": "[UNK]"}, two_ends=True, strips_mask=True
    ),
    "RobertaTokenizer": _Class("BPE", ("vocab.json", "merges.txt"), _ROBERTA, two_ends=True),
    "XLMRobertaTokenizer": _Class("Unigram", (), _ROBERTA, ends=("bos_token", "eos_token"), two_ends=True),
    "CamembertTokenizer": _Class(
        "Unigram",
        (),
        _ROBERTA,
        ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"),
        rules="camembert",
        ends=("bos_token", "eos_token"),
        two_ends=True,
        strips_mask=True,
    ),
    "AlbertTokenizer": _Class(
        "Unigram", (), _DEBERTA | {"unk_token": "<unk>", "pad_token": "<pad>"}, rules="albert", keeps_ends=True
    ),
    "DebertaV2Tokenizer": _Class("Unigram", (), _DEBERTA, token_types=True, rules="deberta"),
    "PreTrainedTokenizer": _Class(None),
    "TokenizersBackend": _Class(None),
}
_OTHER = _Class(None)  # a class that only transformers can build
_OF_MODEL_TYPE = {
    "bert": "BertTokenizer",
    "ernie": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "nomic_bert": "BertTokenizer",
    "mpnet": "MPNetTokenizer",
    "roberta": "RobertaTokenizer",
    "data2vec-text": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "gte": "XLMRobertaTokenizer",
    "jina_embeddings_v3": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "albert": "AlbertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
}
_IGNORES_CLASS = ("modernbert",)  # model types of which transformers takes tokenizer.json as it is, in any case
# Vocabularies that only transformers reads, each of one file or more.
_FOREIGN = (("spm.model",), ("sentencepiece.bpe.model",), ("spiece.model",), ("tokenizer.model",),
            ("vocab.json", "merges.txt"))  # fmt: skip
REFUSED = ("auto_map", "fast_tokenizer_files", "init_inputs", "processor_class")  # fields of tokenizer_config.json
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "config.json")  # these may name a processor_class


class Settings:
    """Settings of a folder's tokenizer: tokenizer_config.json, and special_tokens_map.json if transformers reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, file = folder, folder / "tokenizer_config.json", folder / "config.json"
        self.values = values = read_settings(self.file)
        of_file = values.get("tokenizer_class")  # not of special_tokens_map.json, which transformers reads later
        self._of_map: set[str] = set()  # names of the fields that special_tokens_map.json has
        refused = [(self.file, name) for name in REFUSED]
        for source, name in refused + [(folder / other, "processor_class") for other in PROCESSORS]:
            if value := read_settings(source).get(name):
                raise CheckpointError(f"{source}: {name} is not supported, got {value!r:.80}")
        if "additional_special_tokens" in values and not values.get("extra_special_tokens"):
            values["extra_special_tokens"] = values.pop("additional_special_tokens")  # the new name
        extra = values.get("extra_special_tokens")
        more = [name for name in values if name.endswith("_token") and isinstance(values[name], str)]
        if (isinstance(extra, dict) and extra) or {*more} - {*_NAMES}:  # these replace it in transformers
            values.pop("model_specific_special_tokens", None)
        if "added_tokens_decoder" not in values:
            for name, value in read_settings(folder / "special_tokens_map.json").items():
                earlier = values.get(name) if name == "extra_special_tokens" else None
                both = isinstance(earlier, list) and isinstance(value, list)
                values[name] = earlier + value if both else value
                self._of_map.add(name)
        self.source, config = self.file if of_file else file, read_settings(file)
        if of_file == "":  # in transformers the name of no class, not the default
            raise CheckpointError(f"{self.file}: tokenizer_class must be a name, got ''")
        named = of_file or config.get("tokenizer_class")
        if config.get("model_type") in _IGNORES_CLASS:
            named = "TokenizersBackend"
        self.name = named or _OF_MODEL_TYPE.get(str(config.get("model_type")), "TokenizersBackend")
        self.is_named, self.kind = named is not None, CLASSES.get(str(self.name).removesuffix("Fast"), _OTHER)
        size = config.get("vocab_size")
        self.vocab_size = size if isinstance(size, int) else sys.maxsize

    def file_of(self, name: str) -> Path:
        """Returns the file that has a field."""
        return self.folder / "special_tokens_map.json" if name in self._of_map else self.file

    def _error(self, name: str, problem: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{self.file_of(name)}: {name} {problem}, got {value!r:.80}")

    def option(self, name: str, default: bool | None) -> Any:
        """Returns a setting that is true, false or null."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise self._error(name, "must be true, false or null", value)
        return default if value is None else value

    def side(self, name: str, saved: dict[str, Any] | None) -> str:
        """Returns a setting that is left or right; its default is the direction in tokenizer.json."""
        side = self.values.get(name) or (saved or {}).get("direction", "right")
        if side not in ("left", "right"):
            raise self._error(name, "must be left or right", side)
        return side

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a text; None if there is no limit."""
        name = self.max_length_field
        return check_length(self.file_of(name), name, self.values.get(name))

    @property
    def max_length_field(self) -> str:
        """Name of the field that has `max_length`."""
        return "model_max_length" if "model_max_length" in self.values else "max_len"

    @property
    def token_types(self) -> bool:
        """True if the model gets the token type ids of the tokenizer."""
        names = self.values.get("model_input_names")
        if not isinstance(names, list | None):
            raise self._error("model_input_names", "must be a list", names)
        if names is not None and "attention_mask" not in names:  # sentence-transformers then attends to padding
            raise self._error("model_input_names", "must have 'attention_mask'", names)
        return self.kind.token_types if names is None else "token_type_ids" in names

    def named_tokens(self) -> "dict[str, AddedToken]":
        """Returns the special tokens that have a name, in the order in which transformers adds them."""
        extra = self.values.get("extra_special_tokens")
        given = {name: token for name, token in self.values.items() if name.endswith("_token")}
        specific = self.values.get("model_specific_special_tokens") or {}
        if not isinstance(specific, dict):
            raise self._error("model_specific_special_tokens", "must map names to tokens", specific)
        extra = extra if isinstance(extra, dict) else {}
        tokens = dict.fromkeys(_NAMES) | self.kind.named | given | specific | extra
        if wrong := [name for name in _NAMES if not isinstance(tokens[name], str | dict | None)]:
            raise self._error(wrong[0], "must be a token or null", tokens[wrong[0]])
        mask = tokens["mask_token"]
        if self.kind.strips_mask and isinstance(mask, str):
            tokens["mask_token"] = {"content": mask, "lstrip": True, "special": True}
        given = {name: token for name, token in tokens.items() if isinstance(token, str | dict)}
        return {name: self._added(name, token, special=True) for name, token in given.items()}

    def content(self, name: str) -> str:
        """Returns the text of a special token that the tokenizer's class needs."""
        token = self.named_tokens().get(name)
        if token is None or not token.content:
            raise self._error(name, "must be a token", self.values.get(name))
        return token.content

    def tokens(self, saved: "dict[int, AddedToken]", tokenizer: "Tokenizer") -> "list[AddedToken]":
        """Returns the tokens to add to a tokenizer, in order. `saved` are the tokens that tokenizer.json adds."""
        named, extra = self.named_tokens(), self.values.get("extra_special_tokens")
        is_list = extra is not None and not isinstance(extra, dict)  # an object has names, see `named_tokens`
        field = "extra_special_tokens" if is_list else "additional_special_tokens"
        extra = extra if is_list else self.values.get(field, self.kind.extra)
        if not isinstance(extra, list | tuple | None):
            raise self._error(field, "must be a list of tokens", extra)
        extra = [self._added(field, token) for token in extra or ()]
        if "added_tokens_decoder" in self.values:
            decoder = self.values["added_tokens_decoder"]
            if not isinstance(decoder, dict) or not all(name.isdecimal() and len(name) < 20 for name in decoder):
                raise self._error("added_tokens_decoder", "must map token ids to tokens", decoder)
            by_id = {int(number): self._added("added_tokens_decoder", token) for number, token in decoder.items()}
        else:
            file = self.folder / "added_tokens.json"
            if not all(map(checks.is_natural, (ids := read_settings(file)).values())):
                raise CheckpointError(f"{file}: must map tokens to token ids, got {ids!r:.80}")
            given = {token.content for name, token in named.items() if name in self.values}
            given |= {token.content for token in extra} if is_list else set()
            by_id = {
                number: self._added(file.name, {"content": x, "normalized": x not in given}, special=x in given)
                for x, number in ids.items()
            } | saved
        special = {token.content for token in named.values()}
        for token in by_id.values():
            token.special = token.special or token.content in special
        known = {token.content for token in (*tokenizer.get_added_tokens_decoder().values(), *by_id.values())}
        # Defaults that neither the files nor the vocabulary has are only added if the model has a row for them.
        has_room = tokenizer.get_vocab_size() < self.vocab_size
        new = [
            *(
                t
                for n, t in named.items()
                if has_room
                or n not in self.kind.named
                or n in self.values
                or tokenizer.token_to_id(t.content) is not None
            ),
            *extra,
        ]
        return [by_id[number] for number in sorted(by_id)] + [token for token in new if token.content not in known]

    def _added(self, name: str, token: Any, *, special: bool = False) -> "AddedToken":
        """Returns a token of the field `name`: a text, or an object with its content and flags."""
        from tokenizers import AddedToken

        if isinstance(token, str):
            return AddedToken(token, special=True)
        try:
            added = AddedToken(**{field: value for field, value in token.items() if field != "__type"})
            added.special = added.special or special
            return added
        except (AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{self.file_of(name)}: a token of {name} must be a text or an object with content and flags, got"
                f" {token!r:.80}"
            ) from error


def load(settings: Settings, do_lower_case: bool = False, *, may_pad_left: bool = True) -> "Tokenizer":
    """Loads the tokenizer of the settings' folder. `do_lower_case` comes before the tokenizer's own normalizer.

    Without `may_pad_left`, padding on the left is refused: in sentence-transformers it changes the numbers of a text.
    """
    from tokenizers import Tokenizer, normalizers

    file, saved = settings.folder / "tokenizer.json", None
    content: dict[str, Any] = {}
    if os.path.lexists(file):
        content = _check_cost(file)
        with library_errors(f"{file}: not a tokenizer of the tokenizers library"):
            saved = Tokenizer.from_file(str(file))
            growth = Growth(saved)
            if (steps := growth.pre_tokenizers) > _MOST_PRE_TOKENIZERS:
                raise CheckpointError(f"{file}: has {steps} pre-tokenizers, at most {_MOST_PRE_TOKENIZERS}")
            longer = growth.of_rules
        if not longer <= _MOST_GROWTH:
            raise CheckpointError(f"{file}: the normalizers may make a text more than {_MOST_GROWTH} times as long")
    if reason := _why_foreign(settings, saved):
        tokenizer = saved = _from_transformers(settings, reason)
    else:
        tokenizer = _build(settings, saved, content)
    tokenizer.encode_special_tokens = settings.option("split_special_tokens", False)
    # Checked only: no text is padded in the tokenizer.
    if settings.side("padding_side", saved and saved.padding) == "left" and not may_pad_left:
        source = settings.file_of("padding_side") if settings.values.get("padding_side") else file
        raise CheckpointError(
            f"{source}: padding_side 'left' is not supported: the numbers of a text would depend on the longest text of"
            " its batch"
        )
    side = settings.side("truncation_side", saved and saved.truncation)
    if side != (tokenizer.truncation or {}).get("direction", "right"):
        tokenizer.enable_truncation(max_length=sys.maxsize, direction=side)  # `truncating` keeps the direction
    if do_lower_case:
        rest = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    return tokenizer


def _build(settings: Settings, saved: "Tokenizer | None", content: dict[str, Any]) -> "Tokenizer":
    """Builds a tokenizer as its class does. `saved` is the tokenizer of tokenizer.json, whose content is `content`."""
    from tokenizers import Tokenizer

    folder, file = settings.folder, settings.folder / "tokenizer.json"
    model = saved.model if saved else _vocabulary(folder, settings)
    found, expected = type(model).__name__, settings.kind.model
    if found != expected and settings.is_named and expected:
        raise CheckpointError(f"{file}: the folder's tokenizer_class needs a {expected} vocabulary, got {found}")
    if found != expected:
        settings = copy.copy(settings)
        settings.kind = CLASSES["TokenizersBackend"]
    tokenizer = saved if saved and found != expected else Tokenizer(model)
    with library_errors(f"{folder}: the tokenizer's files do not fit together"):
        if tokenizer is not saved:
            _set_up(tokenizer, settings, saved, content)
        added = saved.get_added_tokens_decoder() if saved else {}
        tokenizer.add_tokens(settings.tokens(added, tokenizer))
        if saved and saved.post_processor and settings.kind.keeps_ends:
            tokenizer.post_processor = saved.post_processor
        elif tokenizer is not saved:
            tokenizer.post_processor = _post_processor(tokenizer, settings)
    return tokenizer


def _why_foreign(settings: Settings, saved: "Tokenizer | None") -> str | None:
    """Returns why only transformers can build a folder's tokenizer, or None."""
    folder, kind = settings.folder, settings.kind
    if kind is _OTHER:
        return (
            f"{settings.source}: tokenizer_class {settings.name!r:.80} is not supported; supported are"
            f" {', '.join(CLASSES)}. PreTrainedTokenizer takes tokenizer.json as it is"
        )
    if saved is None and not _are_there(folder, kind.vocabulary):
        for files in _FOREIGN:
            if _are_there(folder, files):
                return f"{folder}: there is no tokenizer.json, and jaxft makes no {settings.name} from {files[0]}"
    return None


def _are_there(folder: Path, names: Sequence[str]) -> bool:
    return len(names) > 0 and all(os.path.lexists(folder / name) for name in names)


def _from_transformers(settings: Settings, reason: str) -> "Tokenizer":
    """Loads a tokenizer with transformers, if it is installed. The settings get what its class decides."""
    for name in {name for files in _FOREIGN for name in files}:
        if os.path.lexists(settings.folder / name):
            checkpoint_files.check_file(settings.folder / name)
    extra = "The extra jaxft[hf] (transformers, sentencepiece and protobuf) reads such folders"
    try:
        import google.protobuf  # noqa: F401
        import sentencepiece  # noqa: F401
        import transformers
    except ImportError as error:
        raise CheckpointError(f"{reason}. {extra}, but is not installed: {error}") from error
    with library_errors(f"{reason}. {extra}, but transformers refuses this one"):
        # `local_files_only`, because transformers would ask Hugging Face about a large vocabulary.
        found = transformers.AutoTokenizer.from_pretrained(
            settings.folder, trust_remote_code=False, local_files_only=True
        )
    tokenizer = getattr(found, "backend_tokenizer", None)
    if tokenizer is None:
        raise CheckpointError(f"{reason}. {extra}, but transformers' {type(found).__name__} runs in Python only")
    settings.values = {"model_input_names": found.model_input_names, **found.special_tokens_map, **settings.values}
    return tokenizer


def save(tokenizer: "Tokenizer", folder: Path, settings: Settings) -> None:
    """Writes a tokenizer that was loaded with `settings`, so that transformers takes it as it is."""
    special_tokens = {name: token.content for name, token in settings.named_tokens().items()}
    tensors.write(folder, files(tokenizer, special_tokens, settings.token_types, settings.max_length))


def files(
    tokenizer: "Tokenizer", special_tokens: Mapping[str, str], token_types: bool, max_length: int | None
) -> dict[str, Any]:
    """Returns the files of a tokenizer by name, for `tensors.write`. transformers takes the tokenizer as it is."""
    direction = (tokenizer.truncation or {}).get("direction", "right")
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *["token_type_ids"] * token_types, "attention_mask"],
        "split_special_tokens": tokenizer.encode_special_tokens,
        **({} if direction == "right" else {"truncation_side": direction}),
        **({} if max_length is None else {"model_max_length": max_length}),
        **special_tokens,
    }
    return {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": values}


def _vocabulary(folder: Path, settings: Settings) -> Any:
    """Reads the vocabulary of a folder without tokenizer.json."""
    from tokenizers import models

    kind, files = settings.kind, [folder / name for name in settings.kind.vocabulary]
    if not _are_there(folder, kind.vocabulary):
        others = "".join(f" nor {name}" for name in kind.vocabulary)
        absent = f"{'neither' if files else 'no'} tokenizer.json{others} is there"
        raise CheckpointError(f"{folder}: no tokenizer: {absent} for {settings.name}")
    for file in files:
        checkpoint_files.check_file(file)
    both = folder / " and ".join(kind.vocabulary)
    with library_errors(f"{both}: not a vocabulary" + " of one token a line" * (kind.model == "WordPiece")):
        if kind.model == "BPE":
            return models.BPE.from_file(*map(str, files))
        vocabulary = models.WordPiece.from_file(str(files[0]), unk_token="[UNK]")
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    defaults = [kind.named[name] for name in names if name not in settings.values]
    if missing := [token for token in defaults if vocabulary.token_to_id(token) is None]:
        raise CheckpointError(f"{files[0]}: not a vocabulary of {settings.name}: {', '.join(missing)} missing")
    return vocabulary


def _set_up(tokenizer: "Tokenizer", settings: Settings, saved: "Tokenizer | None", content: dict[str, Any]) -> None:
    """Sets everything that comes before the post-processor, as the tokenizer's class does."""
    from tokenizers import normalizers, pre_tokenizers

    if settings.kind.model == "WordPiece":
        options = {
            "unk_token": settings.content("unk_token"),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        }
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=settings.option("tokenize_chinese_chars", True),
            strip_accents=settings.option("strip_accents", None),
            lowercase=settings.option("do_lower_case", True),
        )
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif settings.kind.model == "BPE":
        options = {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
        options |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.option("add_prefix_space", False))
    else:
        options = {}
        _set_up_unigram(tokenizer, settings, saved, content)
    for name, value in options.items():
        setattr(tokenizer.model, name, value)


def _set_up_unigram(
    tokenizer: "Tokenizer", settings: Settings, saved: "Tokenizer | None", content: dict[str, Any]
) -> None:
    from tokenizers import Regex, models, normalizers, pre_tokenizers

    rules, steps, scheme = settings.kind.rules, list[Any](), "never"
    words: list[Any] = [pre_tokenizers.WhitespaceSplit()]
    if rules == "deberta":
        words = [pre_tokenizers.Punctuation("isolated")] if settings.option("split_by_punct", False) else []
        scheme = "first"
        if settings.option("do_lower_case", False):
            steps.append(normalizers.Lowercase())
        steps += [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC()]
        steps.append(normalizers.Strip(left=False, right=True))
    elif rules == "albert":
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if not settings.option("keep_accents", False):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        if settings.option("do_lower_case", "do_lower_case" not in settings.values):  # null is false in these classes
            steps.append(normalizers.Lowercase())
    found = json.loads(saved.normalizer.__getstate__()) if saved and saved.normalizer else {}
    maps = [rule for rule in found.get("normalizers", [found]) if rule.get("type") == "Precompiled"]
    if maps and rules != "deberta":
        steps.append(normalizers.Precompiled(base64.b64decode(maps[0]["precompiled_charsmap"])))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    if settings.option("add_prefix_space", "add_prefix_space" not in settings.values):
        scheme = "always"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.Metaspace(prepend_scheme=scheme)])

    # The class says which token is the unknown one, whatever tokenizer.json says.
    model, entries = content["model"], content["model"]["vocab"]
    token = getattr(settings.named_tokens().get("unk_token"), "content", "None")
    unknown: Any = {"": 3, "albert": 1}.get(rules)
    if rules == "camembert":
        unknown = next((index for index, entry in enumerate(entries) if entry[0] == token), 0)
    elif rules == "deberta":
        unknown = entries.index([token, 0]) if [token, 0] in entries else settings.values.get("unk_id", 1)
    if not checks.is_natural(unknown):
        raise CheckpointError(f"{settings.file_of('unk_id')}: unk_id must be the id of a token, got {unknown!r:.80}")
    if unknown != model.get("unk_id") or model.get("byte_fallback"):
        tokenizer.model = models.Unigram([(text, score) for text, score in entries], unknown, False)


def _post_processor(tokenizer: "Tokenizer", settings: Settings) -> Any:
    from tokenizers import processors

    kind = settings.kind
    first, last = map(settings.content, kind.ends)
    single = [f"{first}:0", "$A:0", f"{last}:0"]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, f"{last}:0", "$B:0", f"{last}:0"] if kind.two_ends else [*single, "$B:1", f"{last}:1"],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (first, last)],
    )


def _check_cost(file: Path) -> dict[str, Any]:
    """Checks the parts of a tokenizer.json from which a small file can take gigabytes, before they are made.

    Returns the content of the file.
    """
    content = checkpoint_files.read_json_object(file)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    entries = vocabulary if isinstance(vocabulary, list) else []  # [token, score] of a Unigram model
    tokens = [entry[0] for entry in entries if isinstance(entry, list) and entry and isinstance(entry[0], str)]
    # Each character of a token may take 300 bytes, twice.
    if max(map(len, tokens), default=0) > _LONGEST_TOKEN or sum(map(len, tokens)) > 24 * len(tokens) + 200_000:
        raise CheckpointError(f"{file}: has tokens of more than {_LONGEST_TOKEN} characters, or of 24 on average")
    parts, characters = [value for name, value in content.items() if name != "model"], 0
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
            regex = part["pattern"].get("Regex") if isinstance(part.get("pattern"), dict) else None
            characters += len(regex) if isinstance(regex, str) else 0
    if characters > _LONGEST_REGEX:
        raise CheckpointError(f"{file}: has {characters} characters of regular expressions, at most {_LONGEST_REGEX}")
    return content


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns errors and panics of the tokenizers library in the block into a CheckpointError that starts with `what`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, CheckpointError) or not checkpoint_files.is_library_error(error):
            raise
        raise CheckpointError(f"{what}: {error!s:.500}") from error


def encode(tokenizer: "Tokenizer", texts: Sequence[str]) -> "list[Encoding]":
    """Tokenises texts with a tokenizer of `truncating`. Raises a TextError for the first that it cannot tokenise."""
    return [*LongTexts(tokenizer).encodings(texts)]


def prompt_length(tokenizer: "Tokenizer", prompt: str) -> int:
    """Returns the number of tokens of a prompt, special tokens before it included."""
    (encoding,) = encode(tokenizer, [prompt])
    if not encoding.ids:
        return 0
    added = tokenizer.get_added_tokens_decoder().get(encoding.ids[-1])
    ends_special = encoding.special_tokens_mask[-1] or (added is not None and added.special)
    return len(encoding.ids) - bool(ends_special)


def checked_limit(owner: str, argument: str, value: Any, config: BertConfig) -> int:
    """Returns a maximum number of tokens as an integer. Raises a ValueError if the model has fewer positions."""
    if not checks.is_natural(value):
        raise ValueError(f"{owner}: {argument} must be a positive integer, got {value!r:.80}")
    if value > config.most_tokens:
        raise ValueError(
            f"{owner}: {argument} must be at most {config.most_tokens}, the positions of the model, got {value}"
        )
    return int(value)


def check_room(tokenizer: "Tokenizer", length: int, *, is_pair: bool = False, owner: str, argument: str) -> int:
    """Raises a ValueError if there is no room for a token. Returns the number of special tokens."""
    with library_errors(f"{owner}: the tokenizer cannot be used"):
        special_tokens = tokenizer.num_special_tokens_to_add(is_pair=is_pair)
    if length <= special_tokens:
        raise ValueError(
            f"{owner}: {argument} must be above {special_tokens}, the number of special tokens that the tokenizer"
            f" adds, got {length}"
        )
    return special_tokens


def truncating(
    tokenizer: "Tokenizer", max_length: int, config: BertConfig, *, is_pair: bool = False, token_types: bool = True,
    owner: str, argument: str,
) -> "Tokenizer":  # fmt: skip
    """Copies a tokenizer; the copy truncates at `max_length` tokens, special tokens included, and does not pad.

    Raises a ValueError if there is no room for a token, or if the model lacks a token id or (with `token_types`) a type
    id of the tokenizer, which would give NaN, perhaps hours into a run.
    """
    from tokenizers import Tokenizer, models

    special_tokens = check_room(tokenizer, max_length, is_pair=is_pair, owner=owner, argument=argument)
    with library_errors(f"{owner}: the tokenizer cannot be used"):
        tokens = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    _check_ids(tokens, config.vocab_size, owner)  # before the copy, which takes as long as there are smaller numbers
    with library_errors(f"{owner}: the tokenizer cannot be used"):
        # Files often contain padding and truncation settings that are left over from training.
        copy = type(tokenizer).from_str(tokenizer.to_str())
        copy.no_padding()
        copy.no_truncation()
        # The post-processor has ids of its own. It runs on texts of one token to show them.
        token = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")
        processed = copy.post_process(token, token if is_pair else None)
        copy.enable_truncation(max_length=max_length, direction=(tokenizer.truncation or {}).get("direction", "right"))
        copy.encode_special_tokens = tokenizer.encode_special_tokens  # not part of the JSON
    _check_ids(dict(zip(processed.ids, processed.tokens, strict=True)), config.vocab_size, owner)
    if len(processed) != special_tokens + 1 + is_pair:
        raise ValueError(f"{owner}: the tokenizer's post-processor must keep each text, once")
    # A model without token types gets none, and one text gets type 0 only.
    types = config.type_vocab_size if is_pair else min(config.type_vocab_size, 1)
    if token_types and types and (largest_type := max(processed.type_ids)) >= types:
        raise ValueError(f"{owner}: the tokenizer has type ids up to {largest_type}; supported are those below {types}")
    return copy


def keep_whole(tokenizer: "Tokenizer", prefixes: Sequence[str]) -> None:
    """Makes the prefixes that the vocabulary has special tokens, so that each stays one token.

    A prefix is in the vocabulary as it is, "[Q] ", or without what follows its first word, "[unused0]".
    """
    from tokenizers import AddedToken

    new = []
    for prefix in prefixes:
        known = [
            token
            for token in (prefix, *prefix.split(None, 1)[:1])
            if token and tokenizer.token_to_id(token) is not None
        ]
        if known and prefix.split() and tokenizer.encode(known[0], add_special_tokens=False).tokens != known[:1]:
            new.append(AddedToken(known[0], normalized=False, special=True))
    tokenizer.add_special_tokens(new)


def _check_ids(tokens: dict[int, str], vocab_size: int, owner: str) -> None:
    """Raises a ValueError if the model has no row for one of the token ids."""
    if (largest_id := max(tokens, default=0)) >= vocab_size:
        raise ValueError(
            f"{owner}: the tokenizer has ids up to {largest_id}, {tokens[largest_id]!r:.80}, but the model's"
            f" vocab_size is only {vocab_size}"
        )


def check_length(file: Path, name: str, value: Any) -> int | None:
    """Checks the field `name` of a settings file, a maximum length. Huge ones ("no limit") become `sys.maxsize`."""
    if value is None:
        return None
    is_integer = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not is_integer or value < 1:
        raise CheckpointError(f"{file}: {name} must be an integer of at least 1, got {value!r:.80}")
    return int(min(value, sys.maxsize))
