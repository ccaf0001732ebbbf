"""Empty module for Triton's dialect. jaxlib has the operations of the dialect, but no module of this name.

MLIR looks for the module of a dialect when it makes an operation, until it finds one. Without this module, a program of
an encoder takes about a thousand searches of the file system, which are up to half of the lowering.
"""
