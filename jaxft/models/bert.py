"""BERT, RoBERTa and DistilBERT encoders as Flax NNX modules on the fused operations."""

import dataclasses
import os
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxft import dispatch
from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint import tensors as checkpoint_tensors
from jaxft.models import dropout, inputs
from jaxft.models.config import BertConfig
from jaxft.models.pooling import first_tokens
from jaxft.ops import checks
from jaxft.ops.attention import qkv_attention, varlen_qkv_attention
from jaxft.ops.dense import dense
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm
from jaxft.ops.embeddings import embeddings_layer_norm
from jaxft.ops.feed_forward import feed_forward_residual_layer_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BertOutput:
    """What `BertModel` returns; a pytree.

    Attributes:
      last_hidden_state: `[B, T, D]`, of packed tokens `[M, D]`, of the last layer.
      pooler_output: `[B, D]`, tanh of a dense layer on the first token; None for a model without pooler.
      hidden_states: `num_hidden_layers + 1` arrays like it, the embeddings and each layer's; None if not asked for.
    """

    last_hidden_state: Array
    pooler_output: Array | None
    hidden_states: tuple[Array, ...] | None


@dataclasses.dataclass(frozen=True)
class _Options:
    """What all modules of a model share."""

    config: BertConfig
    dtype: np.dtype
    param_dtype: np.dtype
    implementation: str | None

    def normal(self, rngs: nnx.Rngs | None, *shape: int) -> nnx.Param[Any]:
        return self._parameter(rngs, jax.nn.initializers.normal(self.config.initializer_range), shape)

    def zeros(self, rngs: nnx.Rngs | None, size: int) -> nnx.Param[Any]:
        return self._parameter(rngs, jax.nn.initializers.zeros, (size,))

    def ones(self, rngs: nnx.Rngs | None, size: int) -> nnx.Param[Any]:
        return self._parameter(rngs, jax.nn.initializers.ones, (size,))

    def _parameter(self, rngs: nnx.Rngs | None, init: nnx.Initializer, shape: tuple[int, ...]) -> nnx.Param[Any]:
        if rngs is None:
            return nnx.Param(jax.ShapeDtypeStruct(shape, self.param_dtype))
        return nnx.Param(init(rngs.params(), shape, self.param_dtype))


class BertEmbeddings(nnx.Module):
    """The sum of the word, position and token type embeddings, normalised."""

    def __init__(self, options: _Options, rngs: nnx.Rngs | None) -> None:
        self.options, config, width = options, options.config, options.config.hidden_size
        self.word = options.normal(rngs, config.vocab_size, width)
        self.position = options.normal(rngs, config.max_position_embeddings, width)
        if config.type_vocab_size:
            self.token_type = options.normal(rngs, config.type_vocab_size, width)
        self.norm_gamma, self.norm_beta = options.ones(rngs, width), options.zeros(rngs, width)

    def __call__(
        self,
        input_ids: Array,
        token_type_ids: Array | None,
        position_ids: Array | None,
        *,
        cu_seqlens: Array | None = None,
        max_seqlen: int = 0,
        dropout_rng: Array | None = None,
    ) -> Array:
        """`[B, T, D]` of ids `[B, T]`, or packed; with dropout where there is a key."""
        config = self.options.config

        if position_ids is None and cu_seqlens is not None:
            position_ids = _packed_positions(config, input_ids, cu_seqlens, max_seqlen)
        elif position_ids is None and config.position_offset:
            kept = (input_ids != config.pad_token_id).astype(jnp.int32)
            position_ids = jnp.cumsum(kept, axis=1) * kept + config.pad_token_id
        # An id that is not in its table gives NaN: inside of jit nothing can be raised, and the nearest row, JAX's
        # default, would go unnoticed.
        return embeddings_layer_norm(
            input_ids,
            self.word[...],
            self.position[...],
            self.token_type[...] if config.type_vocab_size else None,
            self.norm_gamma[...],
            self.norm_beta[...],
            position_ids=position_ids,
            token_type_ids=token_type_ids,
            epsilon=config.layer_norm_eps,
            dtype=self.options.dtype,
            implementation=self.options.implementation,
            **dropout.options(config.hidden_dropout_prob, dropout_rng),
        )


def packed_rows(rows: int, cu_seqlens: Array, max_seqlen: int) -> tuple[Array, Array, Array]:
    """Of each of so many rows `[M]`: where its sequence starts, its place in it, and whether it takes part."""
    row = jnp.arange(rows, dtype=jnp.int32)
    # One reduction: XLA does not keep the comparisons [M, B + 1] in memory.
    start = jnp.max(jnp.where(cu_seqlens <= row[:, None], cu_seqlens, 0), axis=1)
    position = row - start
    return start, position, (row < cu_seqlens[-1]) & (position < max_seqlen)


def _packed_positions(config: BertConfig, input_ids: Array, cu_seqlens: Array, max_seqlen: int) -> Array:
    """Those of tokens `[M]` back to back, as the sequences have them on their own; 0 in rows that take no part.

    Where a sequence is not in the rows, or is too long, all are -1, which no table has: the result is NaN.
    """
    start, position, takes_part = packed_rows(input_ids.size, cu_seqlens, max_seqlen)
    if config.position_offset:
        kept = (input_ids != config.pad_token_id).astype(jnp.int32)
        count = jnp.cumsum(kept)
        position = (count - (count - kept)[start]) * kept + config.pad_token_id
    lengths = jnp.diff(cu_seqlens)
    right = jnp.all((lengths >= 0) & (lengths <= max_seqlen)) & (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= start.size)
    return jnp.where(right, jnp.where(takes_part, position, 0), -1)


class BertLayer(nnx.Module):
    """Self-attention and feed-forward network, each followed by a residual connection and LayerNorm.

    `qkv_kernel` is `[D, 3*D]`, its columns ordered as `[3, N, H]`, so that attention reads the product in place.
    """

    def __init__(self, options: _Options, rngs: nnx.Rngs | None) -> None:
        self.options = options
        width, inner = options.config.hidden_size, options.config.intermediate_size
        self.qkv_kernel, self.qkv_bias = options.normal(rngs, width, 3 * width), options.zeros(rngs, 3 * width)
        self.out_kernel, self.out_bias = options.normal(rngs, width, width), options.zeros(rngs, width)
        self.attention_norm_gamma, self.attention_norm_beta = options.ones(rngs, width), options.zeros(rngs, width)
        self.ffn_in_kernel, self.ffn_in_bias = options.normal(rngs, width, inner), options.zeros(rngs, inner)
        self.ffn_out_kernel, self.ffn_out_bias = options.normal(rngs, inner, width), options.zeros(rngs, width)
        self.ffn_norm_gamma, self.ffn_norm_beta = options.ones(rngs, width), options.zeros(rngs, width)

    def __call__(
        self,
        x: Array,
        mask: Array | None,
        *,
        cu_seqlens: Array | None = None,
        max_seqlen: int = 0,
        dropout_rng: Array | None = None,
    ) -> Array:
        """`x` `[B, T, D]` and `mask` `[B, 1, 1, T]` of the keys -> `[B, T, D]`.

        Or `x` `[M, D]` of sequences back to back, with `cu_seqlens` and `max_seqlen` as in `varlen_qkv_attention`.

        `dropout_rng` are three random keys, as of `jax.random.split(key, 3)`, for dropout of the attention's
        probabilities, of its output (not in DistilBERT) and of the feed-forward network's; None for no dropout.
        """
        config, dtype, implementation = self.options.config, self.options.dtype, self.options.implementation
        heads = config.num_attention_heads
        of_probabilities, of_attention, of_ffn = (None, None, None) if dropout_rng is None else dropout_rng
        if config.model_type == "distilbert":  # it has none there
            of_attention = None
        hidden_rate = config.hidden_dropout_prob

        qkv = dense(x, self.qkv_kernel[...].astype(dtype), self.qkv_bias[...], implementation=implementation)
        qkv = qkv.reshape(*x.shape[:-1], 3, heads, x.shape[-1] // heads)
        options: dict[str, Any] = {"implementation": implementation}
        options |= dropout.options(config.attention_probs_dropout_prob, of_probabilities)
        if cu_seqlens is None:
            attended = qkv_attention(qkv, mask=mask, **options)
        else:
            attended = varlen_qkv_attention(qkv, cu_seqlens, max_seqlen=max_seqlen, **options)
        options = {"epsilon": config.layer_norm_eps, "implementation": implementation}
        kernel, bias = self.out_kernel[...].astype(dtype), self.out_bias[...]
        gamma, beta = self.attention_norm_gamma[...], self.attention_norm_beta[...]
        options |= dropout.options(hidden_rate, of_attention)
        x = dense_residual_layer_norm(attended.reshape(x.shape), kernel, bias, x, gamma, beta, **options)
        options |= dropout.options(hidden_rate, of_ffn)
        return feed_forward_residual_layer_norm(
            x, self.ffn_in_kernel[...].astype(dtype), self.ffn_in_bias[...], self.ffn_out_kernel[...].astype(dtype),
            self.ffn_out_bias[...], self.ffn_norm_gamma[...], self.ffn_norm_beta[...], activation=config.activation,
            **options,
        )  # fmt: skip


def run_layer(layer: BertLayer, x: Array, mask: Array | None, *, remat: bool, **options: Any) -> Array:
    """`layer(x, mask, **options)`; with `remat` its backward pass computes it again from `x`."""
    if not remat:
        return layer(x, mask, **options)
    # Not nnx.remat, which writes parameters back: an error in a scan whose body has them from outside.
    graph, params = nnx.split(layer)
    static = {"max_seqlen": options.pop("max_seqlen", 0)}

    def run(params: Any, x: Array, mask: Array | None, options: dict[str, Any]) -> Array:
        return nnx.merge(graph, params)(x, mask, **options, **static)

    return jax.checkpoint(run)(params, x, mask, options)


class BertPooler(nnx.Module):
    """tanh of a dense layer on the first token."""

    def __init__(self, options: _Options, rngs: nnx.Rngs | None) -> None:
        self.options, width = options, options.config.hidden_size
        self.kernel, self.bias = options.normal(rngs, width, width), options.zeros(rngs, width)

    def __call__(self, x: Array, cu_seqlens: Array | None = None) -> Array:
        """`x` `[B, T, D]`, or `[M, D]` of sequences back to back -> `[B, D]`."""
        kernel = self.kernel[...].astype(self.options.dtype)
        implementation = self.options.implementation
        first = first_tokens(x, cu_seqlens)
        return dense(first, kernel, self.bias[...], activation="tanh", implementation=implementation)


class BertModel(nnx.Module):
    """A BERT, RoBERTa or DistilBERT encoder; on an NVIDIA GPU in 16 bits a layer runs as at most seven kernels.

    With any number of tokens, up to Hopper; on later cards with more than about 1,000 tokens there is one more, for the
    activation. XLA may divide the depth of the last product and add up the parts in one more kernel, of 1,000 to 2,000
    tokens, on Hopper only if their number is no multiple of 8. Where `param_dtype` is not `dtype` there are casts of
    the four matrices besides. In float32 the activation has a kernel of its own but on Hopper; with up to about 1,000
    tokens XLA splits its products and adds the parts; with more, on Hopper, each product by Mosaic GPU has a kernel
    before it that transposes its weights.

    Call it within `nnx.jit`, or get a pure function of parameters and inputs for `jax.jit`, `jax.grad` and the like. It
    costs the host much less a call, since `nnx.jit` walks the module every time::

        arrays, rebuild = jaxft.bundle(model)

        @jax.jit
        def forward(arrays, input_ids, attention_mask):
            return rebuild(arrays)(input_ids, attention_mask)

    A new model, and one from a checkpoint, has no dropout. `model.train()` turns it on at the rates of `config`, in the
    places where BERT has it: the embeddings, the attention's probabilities and the two outputs of each layer.
    `model.eval()` turns it off again. Random keys come with each call (`rngs`), so that parameters are all the state of
    a module. What is dropped is a pure function of the call's key, the layer, the place in it and the element's
    index: the same under every implementation, with and without `remat`, and not stored for the backward pass.

    Args:
      config: sizes and options.
      dtype: float32, float16 or bfloat16: the dtype of the computation and of the result. Statistics and sums within
        an operation are float32.
      param_dtype: the dtype in which parameters are kept; matrices are cast to `dtype` in the call.
      implementation: passed to every operation; None picks the fastest for the device, "xla" is plain JAX.
      add_pooling_layer: whether there is a pooler; DistilBERT never has one.
      remat: the backward pass computes each layer again from its input, the only array that the forward pass then keeps
        of it. Gradients and dropout are the same; training takes much less memory and about a third more time (on GPUs;
        XLA's CPU compiler undoes it).
      rngs: random numbers for the initial parameters: `config.initializer_range` times a normal distribution,
        biases 0, LayerNorm's gamma 1. None gives parameters without values, only shapes, to be set.

    Attributes:
      deterministic: whether calls have no dropout; `train()` and `eval()` set it.
    """

    def __init__(
        self,
        config: BertConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        add_pooling_layer: bool = True,
        remat: bool = False,
        rngs: nnx.Rngs | None,
    ) -> None:
        if not isinstance(config, BertConfig):
            raise TypeError(f"BertModel: config must be a BertConfig, got {type(config).__name__}")
        checks.check_flag("BertModel", "remat", remat)
        checks.check_flag("BertModel", "add_pooling_layer", add_pooling_layer)
        inputs.check_initial("BertModel", rngs)
        dispatch.check_name("BertModel", implementation)
        self.config, self.remat, self.deterministic = config, remat, True
        dtype, param_dtype = (
            inputs.float_dtype("BertModel", *named) for named in (("dtype", dtype), ("param_dtype", param_dtype))
        )
        options = _Options(config, dtype, param_dtype, implementation)
        self.embeddings = BertEmbeddings(options, rngs)
        self.layers = nnx.List([BertLayer(options, rngs) for _ in range(config.num_hidden_layers)])
        has_pooler = add_pooling_layer and config.model_type != "distilbert"
        self.pooler = BertPooler(options, rngs) if has_pooler else None

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool = False,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> BertOutput:
        """Runs the encoder on a padded batch, or with `cu_seqlens` on sequences that lie back to back, without padding.

        Both give a sequence the same hidden states. `jaxft.remove_padding` packs the ids of a padded batch, and
        `jaxft.restore_padding` brings hidden states back into one::

            ids, indices, cu_seqlens = jaxft.remove_padding(input_ids, attention_mask != 0, capacity=M)
            output = model(ids, cu_seqlens=cu_seqlens, max_seqlen=T)
            jaxft.restore_padding(output.last_hidden_state, indices, batch=B, length=T)

        Args:
          input_ids: `[B, T]` integers. An id outside of the vocabulary makes its sequence NaN.
          attention_mask: `[B, T]` integers or booleans, 0 for tokens that are not attended to (padding, but holes are
            fine too); None attends to all. The hidden states of masked tokens mean nothing.
          token_type_ids: `[B, T]` integers; None is all 0.
          position_ids: `[B, T]` integers; None counts from 0, in RoBERTa models from `pad_token_id + 1` and over the
            tokens that are not padding.
          cu_seqlens: integers `[B + 1]`, ascending from 0: sequence b is tokens cu_seqlens[b] to cu_seqlens[b + 1]. The
            ids above are `[M]` then, there is no `attention_mask`, and positions count from the start of each sequence;
            give `position_ids` where they are others, as of a batch whose mask has holes. Of rows that belong to no
            sequence, those from cu_seqlens[B] on, the hidden states mean nothing; their ids must be in the vocabulary
            (0, say). The pooler's output for a sequence of no token means nothing either.
          max_seqlen: with `cu_seqlens`, a Python integer that no sequence is longer than. Where `cu_seqlens` is traced,
            so that nothing can be raised, and one is longer, or they go beyond M, all hidden states are NaN (unless
            there are `position_ids`; then what is too long is cut off).
          output_hidden_states: whether to return the hidden states of all layers.
          deterministic: True for a call without dropout, False for one with; None is as `model.eval()` or
            `model.train()` has set it.
          rngs: for dropout, a JAX random key, or an `nnx.Rngs` with a stream `dropout` (or `default`), which gives one:
            of a function that JAX traces, as for a gradient, it must be an argument, or the key be drawn outside. A
            packed call drops other elements than a padded one with the same key.

        Raises:
          TypeError: an input is no array of integers, `deterministic` no Python boolean, or `rngs` of a wrong type.
          ValueError: an input has a wrong shape or, in a list or NumPy array, an integer beyond int32; T or
            `max_seqlen` is more than the model has positions, and there are no `position_ids`; there are
            `token_type_ids` but the model has no token types; `attention_mask` is given with `cu_seqlens`, or only one
            of `cu_seqlens` and `max_seqlen`; or that is no Python integer >= 0; there is dropout but no `rngs`, or
            one without such a stream or from outside of what is traced.
        """
        input_ids = inputs.as_ids("BertModel", "input_ids", input_ids)
        shape = input_ids.shape
        packed: dict[str, Any] = {}
        if cu_seqlens is None and max_seqlen is None:
            if input_ids.ndim != 2 or shape[1] == 0:
                raise ValueError(
                    f"BertModel: input_ids must have a shape [batch, tokens], tokens > 0, got {list(shape)}"
                )
            most, given = shape[1], f"input_ids has {shape[1]} tokens a sequence"
        else:
            cu_seqlens, most = inputs.check_packed("BertModel", input_ids, attention_mask, cu_seqlens, max_seqlen)
            packed, given = {"cu_seqlens": cu_seqlens, "max_seqlen": most}, f"max_seqlen is {most}"
        token_type_ids = (
            None if token_type_ids is None else inputs.as_ids("BertModel", "token_type_ids", token_type_ids, shape)
        )
        position_ids = None if position_ids is None else inputs.as_ids("BertModel", "position_ids", position_ids, shape)
        if token_type_ids is not None and not self.config.type_vocab_size:
            raise ValueError(f"BertModel: a {self.config.model_type} model without token types takes no token_type_ids")
        if position_ids is None and most > self.config.max_sequence_length:
            raise ValueError(
                f"BertModel: {given}, but the model has positions for at most {self.config.max_sequence_length}"
            )
        mask = None
        if attention_mask is not None:
            keep = inputs.as_ids("BertModel", "attention_mask", attention_mask, shape, or_bool=True).astype(jnp.bool)
            mask = keep[:, None, None, :]

        key = self._dropout_key(deterministic, rngs)
        first_key, keys = (None, None) if key is None else dropout.encoder_keys(key, len(self.layers))

        x = self.embeddings(input_ids, token_type_ids, position_ids, **packed, dropout_rng=first_key)
        hidden_states = [x]
        # A scan over stacked parameters takes 598 us where this takes 321 (1x128; float16 8x128: 715 and 637; queued on
        # an H200, 2026-11-24).
        # One kernel a layer, whose programs take its tiles in turn and wait for those of the step before, took 322 us
        # on the device where seven kernels a layer took 306 (1x128; 282 and 244 at 1x16; H100, 2026-11-24, before these
        # read weights first): XLA starts a kernel before the previous one has ended, so that one more costs no more
        # than such a wait.
        for i, layer in enumerate(self.layers):
            layer_keys = None if keys is None else keys[i]
            x = run_layer(layer, x, mask, dropout_rng=layer_keys, remat=self.remat, **packed)
            hidden_states.append(x)
        return BertOutput(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x, packed.get("cu_seqlens")),
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike | None = None,
        implementation: str | None = None,
        remat: bool = False,
    ) -> Self:
        """The encoder of a Hugging Face checkpoint of the types that `BertConfig` lists.

        Tensors of other heads are not read. A checkpoint without pooler gives a model without one.

        Args:
          folder_or_id: a folder with `config.json` and safetensors files, or the id of a model on Hugging Face.
          revision: branch, tag or commit, for an id.
          cache_dir: where downloads are kept; None is Hugging Face's default.
          local_files_only: use only what has been downloaded before.
          dtype, implementation, remat: as for `BertModel`.
          param_dtype: the same, None for `dtype`.

        Raises:
          CheckpointError: the checkpoint cannot be found, read or used; all its problems at once.
          TypeError: `folder_or_id` is not a string or path.
        """
        param_dtype = dtype if param_dtype is None else param_dtype
        folder = checkpoint_files.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        config = checkpoint_files.read_config(folder, BertConfig.from_dict)
        options: dict[str, Any] = {"implementation": implementation, "remat": remat}
        model = cls(config, dtype=dtype, param_dtype=param_dtype, **options, rngs=None)
        if "pooler.kernel" not in load_parameters(model._parameters(), folder, config.model_type, param_dtype):
            model.pooler = None
        return model

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, which transformers reads too; existing ones are replaced."""
        checkpoint_tensors.save(
            folder, self.config.to_dict(), {name: p.get_value() for name, p in self._parameters().items()}
        )

    def _dropout_key(
        self, deterministic: bool | None, rngs: nnx.Rngs | Array | None, **more_rates: float
    ) -> Array | None:
        """The key of a call; None for one without dropout, for which `rngs` is not used."""
        if deterministic is not None:
            checks.check_flag("BertModel", "deterministic", deterministic)
        if self.deterministic if deterministic is None else deterministic:
            return None
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        rates = {name: getattr(self.config, name) for name in names}
        return dropout.call_key("BertModel", rngs, **rates, **more_rates)

    def _parameters(self) -> dict[str, nnx.Param[Any]]:
        return named_parameters(self)


def named_parameters(model: nnx.Module) -> dict[str, nnx.Param[Any]]:
    """By names such as "layers.0.out_bias", without the "bert." of a model with a head, and "head.out_bias"."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)).removeprefix("bert."): parameter for path, parameter in state}


def load_parameters(
    parameters: dict[str, nnx.Param[Any]],
    folder: Path,
    model_type: str,
    dtype: DTypeLike,
    *,
    has_new_head: bool = False,
) -> set[str]:
    """Sets those of the parameters that a checkpoint has, and returns their names."""
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    values = checkpoint_tensors.load(folder, model_type, shapes, dtype, has_new_head=has_new_head)
    for name, value in values.items():
        parameters[name].set_value(value)
    return {*values}
