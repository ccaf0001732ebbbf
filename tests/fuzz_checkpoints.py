"""Damages files of tiny checkpoints at random, and checks that nothing but documented errors comes of it.

    python tests/fuzz_checkpoints.py [--count 10000] [--first 0]

Case N is a function of N, so `--count 1 --first N` repeats it. `make test-fuzz` runs 10,000 cases in about half an
hour; tests/test_hostile_files.py has a few of them. A case fails if loading or encoding raises anything but a
CheckpointError that names the folder or a TextError, if loading takes 2 s of CPU time, or if a number is not finite.
"""

import argparse
import copy
import faulthandler
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, models

import jaxft
import tiny
from jaxft.checkpoint.files import CheckpointError
from jaxft.text.batching import TextError

SECONDS = 2
NUMBERS = (
    0, 1, -1, 2, 7, 0.5, -1.5, 1e-30, 1e308, 10**30, 2**31, 2**32 - 1, 2**63, 2**64, 10**9, True, False,
)  # fmt: skip
VALUES = (
    *NUMBERS, None, "", "[UNK]", "a", "\ud800", "x" * 5000, "../..", "/", "\0", [], [[]], {}, {"a": 1}, ["a"] * 50,
)  # fmt: skip
RAW = (
    "NaN", "Infinity", "1e999", "-1e999", "9" * 400, "9" * 5000, '{"a":1,"a":2}', "[" * 100_000, "\ufeff1", "'a'", "",
)  # fmt: skip
MARK = "\0mark"


def make(folder: Path, kind: str) -> Path:
    """Writes a sentence encoder, one with shards and without a tokenizer.json, or a cross-encoder."""
    if kind.startswith("cross"):
        tiny.write_classifier(folder, "roberta")
        words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefghijklmnopqrstuvwxyz\u0120", "\u0120a"]
        if kind == "cross, BPE":
            (folder / "tokenizer.json").unlink()
            tiny.write_json(folder / "vocab.json", {word: number for number, word in enumerate(words)})
            (folder / "merges.txt").write_text("#version: 0.2\n\u0120 a\n", "utf-8")
        elif kind == "cross, Unigram":
            config = json.loads((folder / "config.json").read_text())
            tiny.write_json(folder / "config.json", config | {"model_type": "xlm-roberta"})
            Tokenizer(models.Unigram([(word, -1.0) for word in words], 3)).save(str(folder / "tokenizer.json"))
        return folder
    tiny.write_sentence_model(folder, normalize=True)
    modules, ones = json.loads((folder / "modules.json").read_text()), np.ones(tiny.WIDTH, np.float32)
    sizes = {"in_features": tiny.WIDTH, "out_features": tiny.WIDTH, "module_input_name": "sentence_embedding"}
    activation = {"bias": True, "activation_function": "torch.nn.modules.activation.Tanh", "use_residual": False}
    for name, config, tensors in (
        ("Dense", sizes | activation, {"linear.weight": np.diag(ones), "linear.bias": ones}),
        ("LayerNorm", {"dimension": tiny.WIDTH}, {"norm.weight": ones, "norm.bias": ones}),
        ("Dropout", {"dropout": 0.1}, {}),
    ):
        path = f"{len(modules)}_{name}"
        modules.append({"idx": len(modules), "name": name, "type": tiny.TYPES + name, "path": path})
        tiny.write_json(folder / path / "config.json", config)
        if tensors:
            safetensors.numpy.save_file(tensors, folder / path / "model.safetensors")
    tiny.write_json(folder / "modules.json", modules)
    tiny.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": False})
    token = {"content": "[UNK]", "lstrip": False, "normalized": False, "single_word": False, "special": True}
    tokenizer = {"truncation_side": "right", "model_max_length": 10**30, "tokenizer_class": "BertTokenizer"}
    more = {"do_lower_case": True, "cls_token": "[CLS]", "unk_token": token, "added_tokens_decoder": {"1": token}}
    tiny.write_json(folder / "tokenizer_config.json", tokenizer | (more if kind == "sentence" else {}))
    tiny.write_json(folder / "special_tokens_map.json", {"unk_token": token, "sep_token": "[SEP]"})
    tiny.write_json(folder / "added_tokens.json", {"[MASK]": 4})
    prompts = {"prompts": {"query": "a "}, "default_prompt_name": "query", "similarity_fn_name": "cosine"}
    tiny.write_json(folder / "config_sentence_transformers.json", prompts)
    if kind == "shards":
        weights = folder / "model.safetensors"
        tensors = safetensors.numpy.load_file(weights)
        shards = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
        where = {name: shards[i % 2] for i, name in enumerate(tensors)}
        for shard in shards:
            safetensors.numpy.save_file({n: t for n, t in tensors.items() if where[n] == shard}, folder / shard)
        tiny.write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
        weights.unlink()
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "vocab.txt").unlink()
    return folder


KINDS = dict.fromkeys(("sentence", "shards"), jaxft.SentenceEncoder) | dict.fromkeys(
    ("cross", "cross, BPE", "cross, Unigram"), jaxft.CrossEncoder
)


def damage(rng: random.Random, folder: Path) -> str:
    """Changes one or several files, and says how."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        file = rng.choice([f for f in files if f.exists()] or [folder / "config.json"])
        name = str(file.relative_to(folder))
        data = file.read_bytes() if file.exists() else b"{}"
        how = rng.choice(("bytes", "cut", "json", "json", "json", "json", "copy", "remove"))
        if how == "remove":
            file.unlink(missing_ok=True)
        elif how == "copy":
            how = f"copy of {(other := rng.choice(files)).name}"
            data = other.read_bytes() if other.exists() else data
        elif how == "cut":
            data = data[: rng.randrange(len(data) + 1)]
        elif how == "json" and file.suffix == ".json":
            data, how = _changed_json(rng, data)
        elif how == "json" and file.suffix == ".safetensors" and len(data) > 8:
            size = int.from_bytes(data[:8], "little")
            header, how = _changed_json(rng, data[8 : 8 + size])
            if rng.random() < 0.9:  # else the length remains as it was
                size = len(header)
            data = size.to_bytes(8, "little") + header + data[8 + int.from_bytes(data[:8], "little") :]
        else:
            changed, near = bytearray(data), rng.choice((len(data), 8, 100))
            for _ in range(rng.choice((1, 1, 3, 20))):
                if changed:
                    changed[rng.randrange(min(len(changed), near))] = rng.choice((rng.randrange(256), 0, 0x7F, 0xFF))
            data, how = bytes(changed), "bytes"
        if how != "remove":
            file.write_bytes(data)
        done.append(f"{name}: {how}")
    return "; ".join(done)


def _changed_json(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Changes values, names and lengths anywhere in JSON. Each level counts alike, so vocabularies weigh little."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data[::-1], "reversed"
    box, done = [value], []
    for _ in range(rng.choice((1, 1, 2, 5))):
        part: Any = box
        key: Any = 0
        while isinstance(part[key], dict | list) and part[key] and rng.random() < 0.85:
            part = part[key]
            key = rng.choice(list(part)) if isinstance(part, dict) else rng.randrange(len(part))
        how = rng.choice(("value", "value", "value", "number", "number", "remove", "rename", "swap", "repeat", "raw"))
        done.append(f"{how} {key!r:.30}")
        if how == "remove" and part is not box:
            del part[key]
        elif how == "rename" and isinstance(part, dict):
            part[rng.choice(("", "type", "a", "[UNK]", f"{key}x"))] = part.pop(key)
        elif how == "swap" and part is not box:
            other = rng.choice(list(part)) if isinstance(part, dict) else rng.randrange(len(part))
            part[key], part[other] = part[other], part[key]
        elif how == "repeat" and isinstance(part, list):
            part.extend(copy.deepcopy(part[key]) for _ in range(rng.choice((1, 100))))
        elif how == "raw":
            part[key] = MARK
        elif how == "number" and isinstance(part[key], int | float):
            number = part[key]
            as_float = float(number) if abs(number) < 2**63 else 0.5  # an earlier change may have made it huge
            part[key] = rng.choice((number + 1, -number, number * 2, as_float, *NUMBERS))
        else:
            part[key] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(box[0]).replace(json.dumps(MARK), rng.choice(RAW))
    return text.encode("utf-8", "surrogatepass"), "json " + ", ".join(done)


def run(case: int, folder: Path, *, compute: bool = True) -> str:
    """Runs a case in an empty folder. Returns what came of it; raises what must not come of it.

    Without `compute`, the texts are tokenised, and the model does not run.
    """
    rng = random.Random(case)
    kind = rng.choice([*KINDS])
    make(folder, kind)
    told = f"{kind}: {damage(rng, folder)}"
    start = time.process_time()
    try:
        encoder = KINDS[kind].from_pretrained(folder)
        seconds = time.process_time() - start
        texts: list[Any] = ["a bird sings", "Ünïcode \u4e2d \U0001f600 in the old tree, zzz" * 3]
        texts = [(text, "rain") for text in texts] if kind.startswith("cross") else texts
        with jax.disable_jit():  # compilation would take longer than anything else
            if compute:
                result = getattr(encoder, "predict" if kind.startswith("cross") else "encode")(texts)
            else:
                is_pair = isinstance(encoder, jaxft.CrossEncoder)
                texts_of = encoder._pairs if is_pair else encoder._by_length[encoder.max_seq_length]
                result = [max([0, *found.ids]) for found in texts_of.encodings("", texts)]
                assert max(result) < encoder.model.config.vocab_size, told
        assert len(result) == 2 and np.isfinite(result).all(), f"{told}: not finite"
    except CheckpointError as error:
        seconds = time.process_time() - start
        assert str(folder) in str(error), f"{told}: {error} names no file"
        assert len(str(error)) < 50_000, f"{told}: {len(str(error))} characters"
        told += f" -> {error}"
    except TextError as error:
        told += f" -> {error}"
    except BaseException as error:
        error.add_note(told)
        raise
    assert seconds < SECONDS, f"{told}: {seconds:.1f} s"
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="say what came of each case")
    args = parser.parse_args()
    failed = []
    for case in range(args.first, args.first + args.count):
        faulthandler.dump_traceback_later(60, exit=True)  # a library in Rust hangs
        folder = Path(tempfile.mkdtemp(prefix=f"case{case}-"))
        try:
            told = run(case, folder)
            if args.verbose:
                print(case, " ".join(told.split())[:300])
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(case)
            print(f"case {case}:", "".join(traceback.format_exception(error)), flush=True)
        finally:
            shutil.rmtree(folder)
        if (case + 1) % 500 == 0:
            print(f"{case + 1 - args.first} cases, {len(failed)} failed", flush=True)
    print(f"{args.count} cases, failed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
