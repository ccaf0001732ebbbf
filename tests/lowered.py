"""Helpers for programs that are lowered for an H200."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp

from cases import lower

TRITON = "custom_call @__gpu$xla.gpu.triton"
COPIES = ("transpose", "slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "gather", "scatter", "pad")


def of(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def operations(text):
    """Counts how often each operation of a StableHLO text runs. An operation of a function counts once per call."""
    # Functions start a line. Mosaic GPU kernels, which are strings, have functions as well.
    heads = re.compile(
        r"^ *func\.func (?:public |private )?@([\w.]+)\((.*?)(?=^ *func\.func|\Z)", re.DOTALL | re.MULTILINE
    )
    bodies = dict(heads.findall(text))
    totals: dict[str, Counter] = {}

    def count(name):
        if name not in totals:
            found = re.findall(r"= (?:stablehlo\.)?\"?(?:stablehlo\.)?(custom_call @[\w$.]+|\w+)", bodies[name])
            totals[name] = Counter(found)
            for called in re.findall(r"call @([\w.]+)\(", bodies[name]):
                if called in bodies:
                    totals[name].update(count(called))
        return totals[name]

    return count("main")


def sizes(text):
    """Returns the number of elements of each array in a StableHLO text."""
    return [math.prod(map(int, shape[:-1].split("x"))) for shape in re.findall(r"tensor<((?:\d+x)+)[a-z]", text)]


def assert_one_kernel(op, *arguments, **options):
    """Asserts that the op runs as one Triton kernel on an H200."""
    text = lower(lambda *a: op(*a, **options), *arguments)
    assert operations(text)[TRITON] == 1
