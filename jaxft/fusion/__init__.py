"""Graph replacement: finds in any JAX function what the ops of jaxft compute. The public name is `jaxft.fuse`.

`graph` flattens a jaxpr and is the only module that knows how JAX stores programs. `algebra` reads views, sums and
products out of it. `rows`, `activations`, `attention` and `dense` each recognise a family of ops. `plan` puts the sites
together, `evaluate` runs a graph with its sites, `report` describes them, and `transform` holds `fuse`.
"""
