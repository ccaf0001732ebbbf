"""Launch configurations: the defaults for each kernel, the tables of tuned ones, and the search for faster ones.

An op asks the tuning module of its family for a configuration. The module computes a default and calls
`table.lookup`, which returns a tuned configuration if there is one for the sizes and the device.

docs/performance-notes.md has the measurements behind the defaults.
"""

from jaxft.tuning.search import Tuned, autotune

__all__ = ["Tuned", "autotune"]
