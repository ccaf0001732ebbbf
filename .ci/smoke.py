"""Uses an installed jaxft: one operation with its gradient by a kernel and by XLA, and two sentences of a checkpoint.

python .ci/smoke.py <folder of all-MiniLM-L6-v2> <tests/data/minilm_golden.npz>
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxft

model, golden = sys.argv[1:]
assert Path(jaxft.__file__).is_relative_to(sys.prefix), f"{jaxft.__file__} is not the installed package"
assert (Path(jaxft.__file__).parent / "py.typed").is_file()
assert list((Path(jaxft.__file__).parent / "tuned").glob("*.json"))

x = jnp.linspace(-3.0, 3.0, 40).reshape(5, 8)


def value_and_gradient(implementation):
    def loss(x):
        return jnp.sum(jaxft.softmax(x, implementation=implementation) ** 2)

    return jax.jit(jax.value_and_grad(loss))(x)


for by_kernel, by_xla in zip(value_and_gradient("triton"), value_and_gradient("xla"), strict=True):
    np.testing.assert_allclose(by_kernel, by_xla, atol=1e-6)

with np.load(golden) as file:
    sentences, expected = file["sentences"][:2], file["embeddings"][:2]
error = np.abs(jaxft.SentenceEncoder.from_pretrained(model).encode(sentences) - expected).max()
assert error <= 2e-6, error
print(
    f"jaxft {jaxft.__version__}, JAX {jax.__version__}, Python {sys.version.split()[0]}: embeddings err by {error:.1e}"
)
