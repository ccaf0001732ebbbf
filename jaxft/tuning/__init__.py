"""Launch configurations: the defaults for each kernel, the tables of tuned ones, and the search for faster ones.

An op asks the tuning module of its family for a configuration. The module computes a default and calls
`table.lookup`, which returns a tuned configuration if there is one for the sizes and the device.

- `table.py`: the types of configurations, the keys of the tables, and `lookup`.
- `cache.py`: the user's cache, JSON files with what `autotune` found on this machine.
- `rows.py`: defaults and candidates for row ops: LayerNorm, softmax, bias + activation, losses.
- `layouts.py`: defaults and candidates for layout changes: permute, split heads, join heads.
- `attention.py`: defaults and candidates for attention, and when cuDNN or Mosaic GPU is faster.
- `dense.py`: defaults and candidates for dense layers, and which implementation is the fastest.
- `search.py`: `autotune`, which compares the candidates in a user's function and stores the fastest.
- `profiler.py`: timers of kernels and calls.

docs/performance-notes.md has the measurements behind the defaults.
"""

from jaxft.tuning.search import Tuned, autotune

__all__ = ["Tuned", "autotune"]
