"""Division of the parameters of an encoder among the devices of a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxft.ops import float8

# The axis of a parameter of a layer that `model_axis` divides, by name. The kernel of the queries, keys and values is
# whole on each device, because its columns [3, N, H] are not in the order of the heads. Each device multiplies by the
# columns of its heads.
_DIVIDED = {"ffn_in_kernel": 1, "ffn_in_bias": 0, "ffn_in_scale": 0, "ffn_out_kernel": 0, "out_kernel": 0}
_GATED = ("ffn_in_kernel", "ffn_in_bias", "ffn_out_kernel")  # the halves of a gate are far from each other


def partition_specs(
    module: nnx.Module, *, data_axis: str = "data", model_axis: str | None = None, fsdp: bool = False
) -> Any:
    """Returns a `PartitionSpec` for each parameter of an encoder, to divide training or inference among devices.

    Put the parameters on the devices of a mesh with these specs, and the batch with `PartitionSpec(data_axis)`. Under
    `jax.jit`, each device then runs the kernels on its shards::

        mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
        specs = jaxft.models.partition_specs(model, model_axis="model")
        graph, params = nnx.split(model)
        params = jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

    Args:
      module: an encoder of any type, with or without a head: `BertModel`, `BertForMaskedLM`, `EmbeddingModel`, or any
        NNX module that contains one.
      data_axis: name of the mesh axis that divides the batch.
      model_axis: name of the mesh axis that divides the heads of attention and the columns of the feed-forward network
        (tensor parallelism). Its size must divide `num_attention_heads` and `intermediate_size`. None divides neither.
        Each half of a layer then has one all-reduce of hidden states in each direction. The parameters of the queries,
        keys and values stay whole, and their gradients are gathered. A gated feed-forward network is not divided.
      fsdp: whether `data_axis` divides the matrices and tables of parameters too, and thereby the state of an optimiser
        (ZeRO-3). Vectors stay whole. Constrain the parameters to the specs without `fsdp` before the model uses them:
        JAX then gathers each matrix when it is needed, and each device keeps its part of the sum of the gradients. XLA
        turns such a sum into a reduce-scatter for GPUs (its pass ReduceScatterCreator), and not for CPUs.

    Returns:
      A tree with the structure of `nnx.state(module)`, whose leaves are specs.

    Raises:
      TypeError: `module` is not an NNX module, `fsdp` is not a boolean, or an axis is not a string.
      ValueError: both axes have the same name, or matrices are to be divided that `join_kernels` has joined.
    """
    where = "partition_specs"
    if not isinstance(module, nnx.Module):
        raise TypeError(f"{where}: module must be an nnx.Module, got {type(module).__name__}")
    for name, axis in (("data_axis", data_axis), ("model_axis", model_axis)):
        if not isinstance(axis, str) and not (name == "model_axis" and axis is None):
            raise TypeError(f"{where}: {name} must be the name of a mesh axis, got {axis!r:.100}")
    if not isinstance(fsdp, bool):
        raise TypeError(f"{where}: fsdp must be True or False, got {type(fsdp).__name__}")
    if data_axis == model_axis:
        raise ValueError(f"{where}: data_axis and model_axis must be different axes, got {data_axis!r} for both")

    parameters = nnx.state(module)
    shapes = {path: jnp.shape(x) for path, x in jax.tree.leaves_with_path(parameters)}
    if (model_axis is not None or fsdp) and any(_name(path) == "kernels" for path in shapes):
        raise ValueError(f"{where}: kernels that jaxft.models.join_kernels has joined cannot be divided among devices")
    columns = {_name(path): shape[-1] for path, shape in shapes.items()}
    rows = {_name(path): shape[0] for path, shape in shapes.items() if shape}
    has_gate = columns.get("ffn_in_kernel") != rows.get("ffn_out_kernel")

    def spec_of(path: Any, x: Any) -> PartitionSpec:
        names: list[str | None] = [None] * jnp.ndim(x)
        axis = _DIVIDED.get(_name(path))
        if axis is not None and float8.is_float8(x):
            axis = 1 - axis  # kernels in float8 are stored as [F, K]
        if model_axis is not None and axis is not None and not (has_gate and _name(path) in _GATED):
            names[axis] = model_axis
        if fsdp and len(names) > 1:
            free = [axis for axis, taken in enumerate(names) if taken is None]
            # The size with most factors of 2: a vocabulary or a number of classes can rarely be divided.
            names[max(free, key=lambda axis: x.shape[axis] & -x.shape[axis])] = data_axis
        return PartitionSpec(*names)

    return jax.tree.map_with_path(spec_of, parameters)


def _name(path: Any) -> str:
    """Returns the name of a parameter of a layer, and an empty name for other parameters."""
    keys = [getattr(key, "key", None) for key in path]
    return str(keys[keys.index("layers") + 2]) if "layers" in keys else ""
