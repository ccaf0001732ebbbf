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
    """Counts how often each operation of a StableHLO text runs. An operation of a function counts once per call.

    Conversions of a 16-bit array to float32 and back are left out, because XLA removes both.
    """
    # Functions start a line. Mosaic GPU kernels, which are strings, have functions as well.
    heads = re.compile(
        r"^ *func\.func (?:public |private )?@([\w.]+)\((.*?)(?=^ *func\.func|\Z)", re.DOTALL | re.MULTILINE
    )
    bodies = dict(heads.findall(text))
    totals: dict[str, Counter] = {}

    def round_trips(body):
        """Counts conversions to float32 whose results are only converted back, and the conversions back."""
        pattern = r"(%\d+) = stablehlo\.convert (%[\w#]+) : \((tensor<[^>]+>)\) -> (tensor<[^>]+>)"
        converted = {result: found for result, *found in re.findall(pattern, body)}
        found = 0
        for x, _, dtype in converted.values():
            if re.search(r"x?(bf16|f16)>", dtype) and x in converted and converted[x][1] == dtype:
                found += 1 + (len(re.findall(rf"{x}\b", body)) == 2)
        return found

    def count(name):
        if name not in totals:
            found = re.findall(r"= (?:stablehlo\.)?\"?(?:stablehlo\.)?(custom_call @[\w$.]+|\w+)", bodies[name])
            totals[name] = Counter(found)
            totals[name]["convert"] -= round_trips(bodies[name])
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
