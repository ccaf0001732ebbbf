"""Models whose layers keep their matrices in one array each, so that a call has fewer arguments."""

from typing import TypeVar

from flax import nnx

Model = TypeVar("Model", bound=nnx.Module)


def join_kernels(model: Model) -> Model:
    """Returns a copy of a model in which the four kernels of each layer lie in one array, for calls with few tokens.

    Passing an array to a compiled function costs the host about 1 us (1.5 us on slow machines). With `jaxft.bundle`,
    BERT-base has 17 arrays instead of 53. Kernels of jaxft for few tokens read the matrices in place. With many tokens,
    so do XLA's matmuls and the kernels of Hopper, since JAX 0.11; elsewhere XLA copies a matrix in each call::

        model = jaxft.models.join_kernels(BertModel.from_pretrained(folder, dtype=jnp.bfloat16))
        arrays, rebuild = jaxft.bundle(model)  # 17 arrays on an NVIDIA GPU

    The results are the same. The other arrays are shared with `model`, which does not change. Once nothing refers to
    `model` any more, its kernels are freed. The copy is for inference: a gradient has the shape of the joined arrays,
    and costs more time.

    Args:
      model: a `BertModel`, or a module that contains one, such as `BertForSequenceClassification`. Its dtype and the
        dtype of its parameters are both bfloat16 or both float16. Its kernels are on one device.

    Returns:
      A model of the same class. A layer in float8 stays as it is.

    Raises:
      TypeError: `model` contains no `BertModel`.
      ValueError: the dtypes are others, or the kernels of a layer are divided among devices or joined already.
    """
    copy = nnx.merge(*nnx.split(model)) if isinstance(model, nnx.Module) else None
    layers = [] if copy is None else [m for _, m in nnx.iter_modules(copy) if hasattr(m, "join_kernels")]
    if not layers or copy is None:
        raise TypeError(f"join_kernels: model must be or contain a BertModel, got {type(model).__name__}")
    for layer in layers:
        layer.join_kernels()
    return copy
