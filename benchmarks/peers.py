"""The libraries that `bench_peers.py` compares, set up as a user would for speed: bfloat16 and their fastest attention.

A process imports one of them. So frameworks are imported inside of functions, by name, because they need not be there.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Encode = Callable[[Any, int], np.ndarray]  # (texts or a text, batch size) -> embeddings
Rank = Callable[[str, list[str], int], np.ndarray]  # (query, documents, batch size) -> scores in the documents' order


class Layers(NamedTuple):
    """One way of running the layers of an encoder.

    Attributes:
      call: queues a forward pass or a training step, and returns its results.
      wait: waits for results.
      numbers: the float32 array of results that is compared with other peers: hidden states, or their gradient.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], None]
    numbers: Callable[[Any], np.ndarray]


class Peer:
    """A library. `packages` must be installed; their versions are reported. It has some of the methods."""

    packages: tuple[str, ...] = ()

    def device(self) -> str:
        """Returns the kind of the GPU."""
        raise NotImplementedError

    def batch_sizes(self, model: str) -> Sequence[int]:
        """Returns the batch sizes of texts that are tried. The fastest counts."""
        return 32, 128, 512

    def encoder(self, folder: Path) -> Encode:
        """Loads a model for sentence embeddings."""
        raise NotImplementedError

    def ranker(self, folder: Path) -> Rank:
        """Loads a cross encoder."""
        raise NotImplementedError

    def layers(self, folder: Path, x: np.ndarray, weights: np.ndarray | None) -> dict[str, Layers]:
        """Loads a model and returns ways of running its layers on hidden states `x`. The fastest counts.

        With `weights` it is a training step: value and gradients, of all parameters and of `x`, of the sum of the last
        hidden states times `weights`.
        """
        raise NotImplementedError


# --- JAX -----------------------------------------------------------------------------------------------------------


class Jaxft(Peer):
    """jaxft with its defaults."""

    packages = ("jax",)

    def device(self) -> str:
        import jax

        return jax.devices()[0].device_kind

    def batch_sizes(self, model: str) -> Sequence[int]:
        # H100, bf16: BERT-base 44,499 texts/s at 32 (39,449 at 128), MiniLM-L6 84,528 at 128 (66,723 at 32), 2026-11-26
        return (32,) if model == "BERT-base" else (128,)

    def encoder(self, folder: Path) -> Encode:
        from jaxft import SentenceEncoder

        encoder = SentenceEncoder.from_pretrained(folder, dtype="bfloat16")
        return lambda texts, size: np.asarray(encoder.encode(texts, batch_size=size, show_progress_bar=False))

    def ranker(self, folder: Path) -> Rank:
        from jaxft import CrossEncoder

        encoder = CrossEncoder.from_pretrained(folder, dtype="bfloat16")
        return lambda query, documents, size: scores(encoder.rank(query, documents, batch_size=size))

    def layers(self, folder: Path, x: np.ndarray, weights: np.ndarray | None) -> dict[str, Layers]:
        import jax
        from flax import nnx

        import jaxft
        from jaxft.training import COMPILER_OPTIONS

        def run(layers: Any, x: jax.Array) -> jax.Array:
            for layer in layers:
                x = layer(x, None)
            return x

        model = jaxft.BertModel.from_pretrained(folder, dtype="bfloat16")
        if weights is None:
            arrays, rebuild = jaxft.bundle(model.layers)
            return jax_layers({"jaxft": lambda arrays, x: run(rebuild(arrays), x)}, arrays, x, None, [None])
        graph, state = nnx.split(model.layers)
        ways = {"jaxft": lambda state, x: run(nnx.merge(graph, state), x)}
        return jax_layers(ways, state, x, weights, [COMPILER_OPTIONS])


class Tokamax(Peer):
    """Layers in plain JAX with tokamax's attention."""

    packages = ("jax", "tokamax")

    def device(self) -> str:
        return Jaxft().device()

    def layers(self, folder: Path, x: np.ndarray, weights: np.ndarray | None) -> dict[str, Layers]:
        from flax import nnx

        import jaxft
        from jaxft.comparison import plain_encoder
        from jaxft.training import COMPILER_OPTIONS

        attention: Any = importlib.import_module("tokamax").dot_product_attention
        model = jaxft.BertModel.from_pretrained(folder, dtype="bfloat16")
        config = model.config
        parameters = [nnx.to_pure_dict(nnx.state(layer)) for layer in model.layers]

        def encoder(implementation: str) -> Callable[..., Any]:
            return lambda parameters, x: plain_encoder(
                parameters, x, heads=config.num_attention_heads, activation=config.activation,
                epsilon=config.layer_norm_eps,
                attention=lambda q, k, v: attention(q, k, v, implementation=implementation),
            )  # fmt: skip

        names = ("xla",) if self.device() == "cpu" else ("mosaic", "triton")
        options = [None] if weights is None else [None, COMPILER_OPTIONS]
        return jax_layers({name: encoder(name) for name in names}, parameters, x, weights, options)


def jax_layers(
    encoders: dict[str, Callable[..., Any]], parameters: Any, x: np.ndarray, weights: np.ndarray | None,
    options: Sequence[Any],
) -> dict[str, Layers]:  # fmt: skip
    """Compiles functions (parameters, x) -> hidden states, or training steps of them, with each of the options."""
    import jax
    import jax.numpy as jnp

    hidden = jnp.asarray(x, jnp.bfloat16)
    scale = None if weights is None else jnp.asarray(weights)

    def step(encode: Callable[..., Any]) -> Callable[..., Any]:
        def value(parameters: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(encode(parameters, x).astype(jnp.float32) * scale)

        return encode if scale is None else jax.value_and_grad(value, (0, 1))

    def numbers(out: Any) -> np.ndarray:
        return np.asarray(out if scale is None else out[1][1], np.float32)

    def layers(encode: Callable[..., Any], own: Any) -> Layers:
        program = jax.jit(step(encode)).lower(parameters, hidden).compile(own)
        return Layers(lambda: program(parameters, hidden), jax.block_until_ready, numbers)

    found, error = {}, None
    for name, encode in encoders.items():
        for own in options:
            try:
                found[f"{name} with COMPILER_OPTIONS" if own else name] = layers(encode, own)
            except (NotImplementedError, ExceptionGroup) as refusal:  # one implementation of several
                error = refusal
    if error is not None and not found:
        raise error
    return found


# --- PyTorch -------------------------------------------------------------------------------------------------------


class Torch(Peer):
    """Base of the libraries on PyTorch."""

    packages: tuple[str, ...] = ("torch", "transformers")

    @property
    def torch(self) -> Any:
        """The module."""
        return importlib.import_module("torch")

    @property
    def place(self) -> str:
        """The device's name in PyTorch."""
        return "cuda" if self.torch.cuda.is_available() else "cpu"

    def device(self) -> str:
        return self.torch.cuda.get_device_name() if self.place == "cuda" else "cpu"

    def options(self) -> dict[str, Any]:
        """Returns the options of transformers' models."""
        flash = importlib.import_module("transformers.utils").is_flash_attn_2_available() and self.place == "cuda"
        return {"dtype": self.torch.bfloat16, "attn_implementation": "flash_attention_2" if flash else "sdpa"}


class SentenceTransformers(Torch):
    """sentence-transformers."""

    packages = ("torch", "transformers", "sentence-transformers")

    def encoder(self, folder: Path) -> Encode:
        library: Any = importlib.import_module("sentence_transformers")
        model = library.SentenceTransformer(str(folder), device=self.place, model_kwargs=self.options())
        return lambda texts, size: model.encode(texts, batch_size=size, show_progress_bar=False, convert_to_numpy=True)

    def ranker(self, folder: Path) -> Rank:
        library: Any = importlib.import_module("sentence_transformers")
        model = library.CrossEncoder(str(folder), device=self.place, model_kwargs=self.options())
        return lambda query, documents, size: scores(
            model.rank(query, documents, batch_size=size, show_progress_bar=False)
        )  # fmt: skip


class Transformers(Torch):
    """transformers' encoder, without torch.compile."""

    def compiled(self, encoder: Any) -> Any:
        """Returns what is called."""
        return encoder

    def layers(self, folder: Path, x: np.ndarray, weights: np.ndarray | None) -> dict[str, Layers]:
        torch, place = self.torch, self.place
        model = importlib.import_module("transformers").AutoModel.from_pretrained(folder, **self.options())
        module = model.encoder.to(place).eval()
        encoder = self.compiled(module)
        hidden = torch.tensor(x, dtype=torch.bfloat16, device=place, requires_grad=weights is not None)
        scale = None if weights is None else torch.tensor(weights, device=place)

        def forward() -> Any:
            with torch.inference_mode():
                return encoder(hidden).last_hidden_state

        def step() -> Any:
            module.zero_grad(set_to_none=True)
            hidden.grad = None
            (encoder(hidden).last_hidden_state.float() * scale).sum().backward()
            return hidden.grad

        def wait(_: Any) -> None:
            if place == "cuda":
                torch.cuda.synchronize()

        def numbers(out: Any) -> np.ndarray:
            return out.float().cpu().numpy()

        return {"torch": Layers(forward if weights is None else step, wait, numbers)}


class TransformersModel(Torch):
    """transformers' models with their embeddings, in each kind of attention, without and with torch.compile."""

    def models(self, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Loads the model of a folder with each kind of attention that it has, without a pooler.

        Returns:
          The models by kind, and why other kinds are left out. "eager" is there only if there is no other.
        """
        auto = importlib.import_module("transformers").AutoModel
        found: dict[str, Any] = {}
        refused: dict[str, str] = {}
        for kind in ("flash_attention_2", "sdpa", "eager"):
            if kind == "eager" and found:
                break
            try:
                model = auto.from_pretrained(folder, dtype=self.torch.bfloat16, attn_implementation=kind)
            except (ImportError, ValueError, NotImplementedError) as error:
                refused[kind] = str(error)
                continue
            if hasattr(model, "pooler"):
                model.pooler = None
            found[kind] = model.to(self.place).eval()
        return found, refused

    def forward(self, model: Any, ids: np.ndarray, lengths: np.ndarray | None) -> Layers:
        """Returns the forward pass of a model, compiled or not."""
        torch, place = self.torch, self.place
        inputs = {"input_ids": torch.tensor(ids.astype(np.int64), device=place)}
        if lengths is not None:
            mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
            inputs["attention_mask"] = torch.tensor(mask, device=place)

        def call() -> Any:
            with torch.inference_mode():
                return model(**inputs).last_hidden_state

        def wait(_: Any) -> None:
            if place == "cuda":
                torch.cuda.synchronize()

        return Layers(call, wait, lambda out: out.float().cpu().numpy())


class TorchCompile(Transformers):
    """transformers' encoder compiled as a whole."""

    def compiled(self, encoder: Any) -> Any:
        return self.torch.compile(encoder, mode="max-autotune", dynamic=False)


def scores(ranking: Sequence[dict[str, Any]]) -> np.ndarray:
    """Returns the scores of a ranking in the order of the documents."""
    ordered = sorted(ranking, key=lambda entry: entry["corpus_id"])
    return np.array([float(entry["score"]) for entry in ordered], np.float32)
