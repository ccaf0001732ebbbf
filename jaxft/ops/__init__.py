"""The public ops, one file per family. Each file has the ops, their plans and their gradients.

What follows holds for every op, unless the documentation of the op says otherwise.

Arguments that several ops have:

- `implementation`: `None` picks the fastest implementation for the device and shape. `"triton"` runs kernels of jaxft,
  `"xla"` plain jnp. docs/kernels.md has the selection table.
- `in_place`: whether the kernel writes the result into the memory of `x`. This saves a buffer if nothing else needs
  `x`, because `x` is donated or was made in the same jit. If something else needs `x`, XLA copies `x` first. It has no
  effect where a gradient is taken, which needs `x`, nor with `"xla"`, which reuses buffers as it sees fit.
- `dropout_rate`, `dropout_rng`: the probability of dropping an element, in [0, 1), and a JAX random key, which is
  required if the rate is not 0. Which elements are kept is a pure function of the key and the index of the element.
- `precision`: the precision of matmuls, as in `jnp.matmul`. None follows `jax.default_matmul_precision`.

Errors. The message names the op, the argument, what was expected and what came:

- `TypeError`: an array has a dtype of the wrong kind, two arrays that must have the same dtype do not, or an argument
  that must be an array, a number or a bool is something else.
- `ValueError`: a shape does not fit, a number is out of its range, or the activation, precision or implementation is
  unknown.
- `NotImplementedError`: the named implementation does not exist, or it does not support the call.

Results have the shape and dtype of the first array. Results and gradients are deterministic.
"""
