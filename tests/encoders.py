"""Tiny encoders of each model type, with weights that transformers' models and jaxft's can both be given.

`make test-encoders` runs it as a program, in three steps:

- `python tests/encoders.py` computes `data/encoders.npz` and `data/config_defaults.json` with transformers.
- `python tests/encoders.py --save FOLDER` loads the same weights with jaxft, saves them again, and writes the tables of
  types and errors of `docs/models.md`.
- `python tests/encoders.py --check FOLDER` loads with transformers what jaxft has saved, and compares embeddings and
  scores of texts with sentence-transformers.
"""

import json
import sys
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data" / "encoders.npz"
DEFAULTS = DATA.with_name("config_defaults.json")
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
LENGTHS = (70, 7, 23)
VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
         "intermediate_size": 40, "max_position_embeddings": 130}  # fmt: skip
_DEBERTA = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
            "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
_MORE = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True,
         "classifier_pooling": "mean"}  # fmt: skip
# Case -> start of the classes' names in transformers, and arguments of the config's class.
CASES = {
    "bert": ("Bert", {}),
    "ernie": ("Ernie", {}),
    "roberta": ("Roberta", {}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "camembert": ("Camembert", {"type_vocab_size": 1}),
    "data2vec-text": ("Data2VecText", {}),
    "distilbert": ("DistilBert", {"hidden_dim": 40}),
    "mpnet": ("MPNet", {}),
    "modernbert": ("ModernBert", _TOKENS | {"local_attention": 16}),
    "modernbert with biases": ("ModernBert", _TOKENS | _MORE | {"local_attention": 6}),
    "nomic_bert": ("NomicBert", {}),
    "gte": ("Gte", {}),
    "gte without types": ("Gte", {"type_vocab_size": 0}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {}),
    "electra": ("Electra", {"embedding_size": 16}),
    "electra without projection": ("Electra", {"embedding_size": 24}),
    "albert": ("Albert", {"embedding_size": 16}),
    "deberta-v2": ("DebertaV2", _DEBERTA),
}

# Name of a type -> its `model_type`s in config.json, and well-known checkpoints.
TYPES = {
    "BERT": (
        "bert",
        "google-bert/bert-base-uncased, sentence-transformers/all-MiniLM-L6-v2, BAAI/bge-base-en-v1.5, "
        "intfloat/e5-base-v2",
    ),
    "ERNIE": (
        "ernie",
        "nghuyong/ernie-2.0-base-en",
    ),
    "RoBERTa, XLM-RoBERTa, CamemBERT": (
        "roberta, xlm-roberta, camembert",
        "FacebookAI/roberta-base, BAAI/bge-m3, intfloat/multilingual-e5-large, almanach/camembert-base",
    ),
    "data2vec-text": (
        "data2vec-text",
        "facebook/data2vec-text-base",
    ),
    "DistilBERT": (
        "distilbert",
        "distilbert/distilbert-base-uncased, sentence-transformers/msmarco-distilbert-base-v4",
    ),
    "MPNet": (
        "mpnet",
        "sentence-transformers/all-mpnet-base-v2, sentence-transformers/multi-qa-mpnet-base-dot-v1",
    ),
    "ModernBERT": (
        "modernbert",
        "answerdotai/ModernBERT-base, Alibaba-NLP/gte-modernbert-base, nomic-ai/modernbert-embed-base, "
        "ibm-granite/granite-embedding-english-r2, jhu-clsp/mmBERT-base",
    ),
    "NomicBERT": (
        "nomic_bert",
        "nomic-ai/nomic-embed-text-v1.5, Snowflake/snowflake-arctic-embed-m-long",
    ),
    "GTE v1.5": (
        "new, gte",
        "Alibaba-NLP/gte-base-en-v1.5, Alibaba-NLP/gte-multilingual-base, Snowflake/snowflake-arctic-embed-m-v2.0",
    ),
    "Jina v3": (
        "jina_embeddings_v3",
        "jinaai/jina-embeddings-v3-hf",
    ),
    "Jina v2": (
        "bert, with position_embedding_type alibi",
        "jinaai/jina-embeddings-v2-small-en, jinaai/jina-embeddings-v2-base-en",
    ),
    "DeBERTa-v3": (
        "deberta-v2",
        "microsoft/deberta-v3-base, cross-encoder/nli-deberta-v3-base",
    ),
    "ELECTRA": (
        "electra",
        "google/electra-base-discriminator, cross-encoder/ms-marco-electra-base",
    ),
    "ALBERT": (
        "albert",
        "albert/albert-base-v2, sentence-transformers/paraphrase-albert-small-v2",
    ),
}


def weights(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Returns random tensors by their names in the checkpoint."""
    found = {}
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        values = np.random.RandomState(number).standard_normal(shape).astype(np.float32)
        is_gamma = len(shape) == 1 and name.endswith("weight")
        found[name] = 1 + 0.3 * values if is_gamma else values * (0.2 if "embed" not in name else 1.0)
    return found


def batch(padding: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and mask of three texts, padded."""
    ids = np.random.RandomState(0).randint(5, VOCABULARY, (3, max(LENGTHS)))
    mask = np.arange(max(LENGTHS))[None] < np.asarray(LENGTHS)[:, None]
    return np.where(mask, ids, padding), mask


def used(task: str, result: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns the part of a result that is stored: not the padding, and of logits of tokens only the second text."""
    if task == "ForSequenceClassification":
        return result
    return result[mask] if task == "Model" else result[1][mask[1]]


def write(folder: Path, stored, case: str, task: str) -> None:
    """Writes the checkpoint of a case."""
    import safetensors.numpy

    about = json.loads(str(stored[f"{case} {task}"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about["config"]))
    safetensors.numpy.save_file(weights(about["shapes"]), folder / "model.safetensors", metadata={"format": "pt"})


def compute() -> None:
    """Computes the stored values with transformers."""
    import tempfile

    import safetensors.torch
    import torch
    import transformers

    stored = {"versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    for case, (start, options) in CASES.items():
        for task in TASKS:
            labels = {"ForSequenceClassification": {"num_labels": 3}, "ForTokenClassification": {"num_labels": 5}}
            config = getattr(transformers, start + "Config")(**SIZES | options | labels.get(task, {}))
            kind = getattr(transformers, start + task)
            with tempfile.TemporaryDirectory() as folder:
                kind(config).save_pretrained(folder)
                file = Path(folder) / "model.safetensors"
                shapes = {name: [*tensor.shape] for name, tensor in safetensors.torch.load_file(file).items()}
                about = {"config": json.loads((Path(folder) / "config.json").read_text()), "shapes": shapes}
                stored[f"{case} {task}"] = json.dumps(about)
                write(Path(folder), stored, case, task)
                model = kind.from_pretrained(folder).eval()
            ids, mask = batch(config.pad_token_id)
            for dtype in (torch.float32, torch.float64):
                with torch.no_grad():
                    found = model.to(dtype)(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long())
                result = (found.last_hidden_state if task == "Model" else found.logits).double().numpy()
                name = str(dtype).removeprefix("torch.")
                stored[f"{case} {task} {name}"] = used(task, result, mask)
            exact, own = stored.pop(f"{case} {task} float64"), stored.pop(f"{case} {task} float32")
            stored[f"{case} {task} result"] = exact.astype(np.float32)
            stored[f"{case} {task} error"] = np.abs(own - exact).max()
        print(case, flush=True)
    np.savez_compressed(DATA, **stored)


def write_defaults() -> None:
    """Writes the content of config.json that transformers' config class of each type has without arguments."""
    import transformers

    defaults = {}
    for start, _ in CASES.values():
        config = getattr(transformers, start + "Config")()
        own = config.to_dict().keys() - transformers.PreTrainedConfig().to_dict().keys()
        defaults[config.model_type] = {name: getattr(config, name) for name in sorted(own)}
    DEFAULTS.write_text(json.dumps(defaults, indent=1, sort_keys=True) + "\n")


def save(saved: Path) -> None:
    """Saves each model with jaxft in `saved/<case> <task>`, and writes the table of its errors."""
    import tempfile

    import jax

    import test_encoders

    stored = np.load(DATA)
    rows, most = [f"| model | {' | '.join(TASKS)} |", "| --- " + "| ---: " * len(TASKS) + "|"], {}
    for case in CASES:
        cells, all_errors = [], []
        for task in TASKS:
            with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision("highest"):
                write(Path(folder), stored, case, task)
                model = test_encoders.CLASSES[task].from_pretrained(folder)
                found = test_encoders.results(model, *batch(model.config.pad_token_id))
            model.save_pretrained(saved / f"{case} {task}")
            expected = stored[f"{case} {task} result"]
            if task in ("ForMaskedLM", "ForTokenClassification"):
                found = [tokens[LENGTHS[0] :][: LENGTHS[1]] for tokens in found]
            errors = [*(np.abs(own - expected).max() for own in found), stored[f"{case} {task} error"]]
            all_errors.append([error / np.abs(expected).max() for error in errors])
            cells.append(" / ".join(f"{error:.1e}" for error in all_errors[-1]))
        kind = model.config.model_type
        most[kind] = np.maximum(most.get(kind, 0), np.max(all_errors, axis=0))
        rows.append(f"| {case} | {' | '.join(cells)} |")
    versions = f"\nfloat32 on a CPU; {stored['versions']}, jax {jax.__version__}."
    fill("encoders", [*rows, versions])
    fill("types", [*type_rows(most), versions])
    save_texts(saved)


def type_rows(most: dict[str, np.ndarray]) -> list[str]:
    """Returns the table of the types, given the largest errors of each `BertConfig.model_type`."""
    heads = "masked LM, texts, tokens"
    rows = ["| type | `model_type` | well-known checkpoints | heads | largest error |", "|---|---|---|---|---|"]
    for name, (kinds, checkpoints) in TYPES.items():
        names, *more = kinds.split(", with ")
        errors = [most[kind] for kind in names.split(", ") if kind in most and not more]
        found = " / ".join(f"{error:.1e}" for error in np.max(errors, axis=0)) if errors else "not in transformers"
        shown = ", ".join(f"`{kind}`" for kind in names.split(", ")) + "".join(f", with `{part}`" for part in more)
        rows.append(f"| {name} | {shown} | {checkpoints} | {heads} | {found} |")
    return rows


def fill(table: str, lines: list[str]) -> None:
    """Replaces a table of the page, which is between two comments."""
    begin, end = f"<!-- table: {table} -->\n", "<!-- end -->"
    before, found, rest = PAGE.read_text().partition(begin)
    assert found, f"{PAGE} has no table {table}"
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2])


def save_texts(saved: Path) -> None:
    """Saves encoders of texts and of pairs, and their results."""
    import test_text_types
    from jaxft import CrossEncoder, SentenceEncoder
    from jaxft.models.classification import BertForSequenceClassification

    results = {}
    for kind in test_text_types.KINDS.keys() - {"new", "bert"}:  # transformers has no "new" and no Jina v2
        texts, pairs = (saved / f"{kind} {name}" for name in ("texts", "pairs"))
        test_text_types.write(texts, kind, longest=18)
        results[texts.name] = SentenceEncoder.from_pretrained(texts).encode(test_text_types.TEXTS)
        test_text_types.write(pairs, kind, BertForSequenceClassification, longest=18, num_labels=1)
        results[pairs.name] = CrossEncoder.from_pretrained(pairs).predict(test_text_types.PAIRS)
    about = {"TEXTS": json.dumps(test_text_types.TEXTS), "PAIRS": json.dumps(test_text_types.PAIRS)}
    np.savez(saved / "texts.npz", **results, **about)


def check_texts(saved: Path) -> None:
    """Compares what `save_texts` has saved."""
    import sentence_transformers

    results = np.load(saved / "texts.npz")
    for name in results.keys() - {"TEXTS", "PAIRS"}:
        folder = str(saved / name)
        if name.endswith("texts"):
            found = sentence_transformers.SentenceTransformer(folder).encode(json.loads(str(results["TEXTS"])))
        else:
            found = sentence_transformers.CrossEncoder(folder).predict(json.loads(str(results["PAIRS"])))
        error = np.abs(found - results[name]).max() / np.abs(found).max()
        if not error <= 1e-5:
            raise SystemExit(f"{name}: sentence-transformers computes another result, by {error}")
    print(f"sentence-transformers {sentence_transformers.__version__} computes the same from all texts in {saved}")


def check(saved: Path) -> None:
    """Compares the models that jaxft has saved in `saved/<case> <task>`, as transformers loads them."""
    import torch
    import transformers

    stored = np.load(DATA)
    for case, (start, _) in CASES.items():
        for task in TASKS:
            model = getattr(transformers, start + task).from_pretrained(saved / f"{case} {task}").eval().double()
            ids, mask = batch(model.config.pad_token_id)
            with torch.no_grad():
                found = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long())
            result = used(task, (found.last_hidden_state if task == "Model" else found.logits).numpy(), mask)
            error = np.abs(result - stored[f"{case} {task} result"]).max()
            if not error <= 1e-6 * np.abs(result).max():
                raise SystemExit(f"{case} {task}: transformers computes another result from jaxft's file, by {error}")
    print(f"transformers {transformers.__version__} computes the same from all files in {saved}")
    check_texts(saved)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            compute()
            write_defaults()
        case ["--save", folder]:
            save(Path(folder))
        case ["--check", folder]:
            check(Path(folder))
        case _:
            sys.exit(__doc__)
