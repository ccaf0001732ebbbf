"""Models whose layers keep their kernels in one array each, so that a call has fewer arguments."""

from typing import TypeVar

from flax import nnx

Model = TypeVar("Model", bound=nnx.Module)


def join_kernels(model: Model) -> Model:
    """Returns a copy of a model in which one parameter per layer holds the layer's four kernels.

    Passing an array to a compiled function costs the host about 1 us (1.5 us on slow machines). With `jaxft.bundle`,
    BERT-base has 17 arrays instead of 53, so that a call with few tokens returns sooner::

        model = jaxft.models.join_kernels(BertModel.from_pretrained(folder, dtype=jnp.bfloat16))
        arrays, rebuild = jaxft.bundle(model)  # 17 arrays on an NVIDIA GPU

    The results are the same. The other arrays are shared with `model`. Training the copy does not change `model`. The
    kernels of `model` are freed once nothing refers to `model` any more. The copy is for inference on GPUs in 16 bits.
    There, Triton kernels, XLA's matmuls and Mosaic GPU kernels read the kernels in place, the last two since JAX 0.11.
    Elsewhere XLA copies them in each call. The copy can be trained, but a gradient has the shape of the joined array,
    and takes longer. Rules that take arrays of two axes for matrices, such as masks of weight decay, do not see the
    joined kernels.

    `save_pretrained` writes the same files as for `model`.

    Args:
      model: a `BertModel`, or a module that contains one, such as `BertForSequenceClassification`.

    Returns:
      A model of the same class. Each layer has the parameter `kernels` `[N]` instead of `qkv_kernel`, `out_kernel`,
      `ffn_in_kernel` and `ffn_out_kernel`.

    Raises:
      TypeError: `model` contains no `BertModel`.
      ValueError: the kernels of a layer have no values yet, are traced, are joined already, are in float8, have several
        dtypes, or are on several devices.
    """
    copy = nnx.clone(model) if isinstance(model, nnx.Module) else None
    layers = [] if copy is None else [m for _, m in nnx.iter_modules(copy) if hasattr(m, "join_kernels")]
    if not layers or copy is None:
        raise TypeError(f"join_kernels: model must be or contain a BertModel, got {type(model).__name__}")
    for layer in layers:
        layer.join_kernels()
    return copy
