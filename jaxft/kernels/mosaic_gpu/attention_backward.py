"""The gradient of attention from packed QKV in one kernel of five products, for Hopper.

The kernels of Triton take seven: they compute the logits twice, for the gradients of keys and of queries, which are
sums over the other side. Here a program has one head of a sequence. It takes its keys in passes of 128, and in each
visits all queries in steps of 64; the gradients of those 128 keys are in registers, that of all queries in shared
memory, float32. So nothing is added up by several programs, and the same numbers come in every run. With pairs as
[keys, queries], transposed, every product but one has its operand of 64 x 64 numbers in registers:

    s = k q^T, p = exp2(s - lse), dv += p dout, dp = v dout^T, ds = p (dp - delta), dk += ds q, dq += ds^T k

A program has four warp groups: two have 64 of the keys each, one collects dq from the ds that those leave in shared
memory, and one copies (TMA). 10 * B * N * T * T * 64 floating-point operations. Bytes: the packed array, dout and the
result once; queries and dout are read again for every 128 keys, from the L2 cache.

Mosaic adds no barriers of its own around what is read and written in shared memory. Barriers and commits order what
passes from one group to another; the sum of dq is read and written by one thread each, the keys of a mask by one warp.

Of 32 sequences of 512 tokens with 12 heads it takes 148 us, with Mosaic's barriers 153, the two kernels of Triton 217
(bfloat16, H100, 2026-11-26 and 25). A mask of keys leaves out the passes after the last key that takes part.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft.dropout import keep_threshold, mix

Array = jax.Array

TILE = 64  # keys of a warp group, queries of a step, and the head size
KEYS = 2 * TILE  # of a pass
STAGES = 2  # With three there is no room for the next keys, and the wait for those costs 10 % (H100, 2026-11-25).
COLLECTING = 2  # the warp group that collects; 0 and 1 have keys, the last one copies
REGISTERS = {"keys": 192, "collect": 88, "copy": 40}  # for each thread; 512 with both groups of keys
LENGTHS = (256, 512)  # Of less, Triton's kernel of five products is as fast; of more, dq has no room.


def unsupported(qkv: Array, mask: Array | None = None) -> str | None:
    """Why the kernel cannot run this, if it cannot."""
    batch, length, _, _, size = qkv.shape
    if qkv.dtype not in (jnp.float16, jnp.bfloat16):
        return f"qkv is {qkv.dtype}, the kernel takes float16 and bfloat16"
    if size != TILE:
        return f"the head size is {size}, the kernel takes {TILE}"
    if length % KEYS or not LENGTHS[0] <= length <= LENGTHS[1]:
        return f"there are {length} positions, the kernel takes multiples of {KEYS} from {LENGTHS[0]} to {LENGTHS[1]}"
    if mask is not None and mask.shape not in ((batch, 1, 1, length), (1, 1, 1, length)):
        return f"the mask has shape {mask.shape}, the kernel takes one of keys, {(batch, 1, 1, length)}"
    if qkv.size >= 2**31:
        return f"qkv has {qkv.size} elements, the kernel takes fewer than 2^31"
    return None


def _kernel(qkv_ref, dout_ref, rows_ref, *refs, length: int, heads: int, scale: float, dropout_rate: float):
    *mask_refs, d_ref = refs
    works, dtype, masked = rows_ref.shape[0], qkv_ref.dtype, bool(mask_refs)
    steps, passes = length // TILE, length // KEYS
    to_logits, kept_scale = scale * math.log2(math.e), 1.0 / (1.0 - dropout_rate)

    def body(q_smem, dout_smem, rows_smem, k_smem, v_smem, ds_smem, dq_smem, rows_there, rows_free, k_there, k_free,
             v_there, v_free, ds_there, ds_free, k_clear=None):  # fmt: skip
        warps, program, programs = lax.axis_index("warps"), lax.axis_index("program"), lax.axis_size("program")

        def for_each_pass(visit):
            """visit(c, j, last, work) of all passes of this program.

            c counts them through all of its heads, j in one, whose passes end with `last`; the head is the work-th.
            """
            rounds = lax.div(works - 1 - program, programs) + 1  # heads of this program
            if not masked:

                @pl.loop(0, rounds * passes)
                def _(c):
                    visit(c, lax.rem(c, passes), passes - 1, program + lax.div(c, passes) * programs)

                return

            @pl.loop(0, rounds, init_carry=jnp.int32(0))
            def _(i, c):
                work = program + i * programs
                count = mask_refs[1][mask_row(work)]
                pl.loop(0, count)(lambda j: visit(c + j, j, count - 1, work))
                return c + count

        def mask_row(work):
            return lax.div(work, heads) if mask_refs[0].shape[0] > 1 else 0

        def place(work):
            """The first row and the first column of a head."""
            return lax.div(work, heads) * length, lax.rem(work, heads) * TILE

        def own_keys(start, j):
            return pl.ds(start + j * KEYS + warps * TILE, TILE)

        def columns(part: int, column):
            """Those of a head's queries (0), keys (1) or values (2)."""
            return pl.ds(part * heads * TILE + column, TILE)

        def copy():
            plgpu.set_max_registers(REGISTERS["copy"], action="decrease")

            @for_each_pass
            def _(c, j, last, work):
                (start, column), at = place(work), lax.rem(c, 2)
                keys = pl.ds(start + j * KEYS, KEYS)
                plgpu.barrier_wait(k_free.at[at])
                plgpu.copy_gmem_to_smem(qkv_ref.at[keys, columns(1, column)], k_smem.at[at], k_there.at[at])
                plgpu.barrier_wait(v_free)
                plgpu.copy_gmem_to_smem(qkv_ref.at[keys, columns(2, column)], v_smem, v_there)

                @pl.loop(0, steps)
                def _(i):
                    at = lax.rem(i, STAGES)  # of which each pass has a multiple of steps
                    tile, there = pl.ds(start + i * TILE, TILE), rows_there.at[at]
                    plgpu.barrier_wait(rows_free.at[at])
                    plgpu.copy_gmem_to_smem(qkv_ref.at[tile, columns(0, column)], q_smem.at[at], there)
                    plgpu.copy_gmem_to_smem(dout_ref.at[tile, columns(0, column)], dout_smem.at[at], there)
                    plgpu.copy_gmem_to_smem(rows_ref.at[work, i], rows_smem.at[at], there)

            # A barrier must be waited for as often as it was arrived at.
            for at in range(STAGES):
                plgpu.barrier_wait(rows_free.at[at])
            for at in range(2):
                plgpu.barrier_wait(k_free.at[at])
            plgpu.barrier_wait(v_free)

        def collect():
            plgpu.set_max_registers(REGISTERS["collect"], action="decrease")
            for w in range(2):
                plgpu.barrier_arrive(ds_free.at[w])
            for at in range(2):
                plgpu.barrier_arrive(k_free.at[at])

            @for_each_pass
            def _(c, j, last, work):
                (start, column), at = place(work), lax.rem(c, 2)
                plgpu.barrier_wait(k_clear if masked else k_there.at[at])

                @pl.loop(0, steps)
                def _(i):
                    @functools.partial(pl.run_scoped, acc_ref=plgpu.ACC((TILE, TILE), jnp.float32))
                    def _(acc_ref):
                        for w in range(2):
                            plgpu.barrier_wait(ds_there.at[w])
                            k = k_smem.at[at, pl.ds(w * TILE, TILE)]
                            plgpu.wgmma(acc_ref, ds_smem.at[w].transpose((1, 0)), k)
                        plgpu.wgmma_wait(1)
                        plgpu.barrier_arrive(ds_free.at[0])
                        acc = acc_ref[...]
                        plgpu.barrier_arrive(ds_free.at[1])

                        def add():
                            dq_smem[i] = dq_smem[i] + acc

                        def store(total):
                            here = d_ref.at[pl.ds(start + i * TILE, TILE), columns(0, column)]
                            store_directly(here, (total * scale).astype(dtype))

                        @pl.when(j == 0)
                        def _():
                            dq_smem[i] = acc

                        if masked:  # the first pass may be the last
                            pl.when(j > 0)(add)
                            # As acc lies in registers: then threads read what they have written themselves.
                            pl.when(j == last)(lambda: store(plgpu.layout_cast(dq_smem[i], plgpu.Layout.WGMMA)))
                        else:
                            pl.when((j > 0) & (j < last))(add)
                            pl.when(j == last)(lambda: store(dq_smem[i] + acc))

                plgpu.barrier_arrive(k_free.at[at])
                if masked:  # here, since the groups of keys have no registers left
                    pl.when(j == last)(lambda: pl.loop(2 * (j + 1), steps)(functools.partial(clear, start, column)))

        def clear(start, column, i):
            """The gradients of a tile of keys in a pass that is left out."""
            for part in (1, 2):
                zeros = plgpu.layout_cast(jnp.zeros((TILE, TILE), dtype), plgpu.Layout.WGMMA)
                store_directly(d_ref.at[pl.ds(start + i * TILE, TILE), columns(part, column)], zeros)

        def work_on_keys():
            plgpu.set_max_registers(REGISTERS["keys"], action="increase")
            own = pl.ds(warps * TILE, TILE)
            plgpu.barrier_arrive(v_free)
            for at in range(STAGES):
                plgpu.barrier_arrive(rows_free.at[at])
            for at in range(2):
                plgpu.barrier_arrive(k_free.at[at])

            @for_each_pass
            def _(c, j, last, work):
                start, column = place(work)
                keep = None
                if masked:
                    # Not by way of shared memory: with 512 keys and dropout none is left.
                    here = mask_refs[0].at[mask_row(work), own_keys(0, j)]
                    mine = load_directly(here, plgpu.Layout.WGMMA.reduce(1))
                    keep = lax.broadcast_in_dim(mine > 0.0, (TILE, TILE), (0,))
                k = k_smem.at[lax.rem(c, 2), own]
                plgpu.barrier_wait(k_there.at[lax.rem(c, 2)])
                plgpu.barrier_wait(v_there)
                if masked:  # what masked keys hold, NaN included, must not reach dq
                    k[...] = select(keep, k[...])
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(k_clear)

                @functools.partial(
                    pl.run_scoped,
                    dk_ref=plgpu.ACC((TILE, TILE), jnp.float32),
                    dv_ref=plgpu.ACC((TILE, TILE), jnp.float32),
                )
                def _(dk_ref, dv_ref):
                    pl.loop(0, steps)(functools.partial(step, c, j, k, own, keep, dk_ref, dv_ref))
                    plgpu.barrier_wait(ds_free.at[warps])
                    for part, acc in ((2, dv_ref[...] * kept_scale), (1, dk_ref[...] * scale)):
                        if part == 1:
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        ds_smem[warps] = select(keep, acc).astype(dtype)
                        plgpu.commit_smem()
                        here = d_ref.at[own_keys(start, j), columns(part, column)]
                        plgpu.copy_smem_to_gmem(ds_smem.at[warps], here)
                    plgpu.barrier_arrive(ds_free.at[warps])

            plgpu.barrier_wait(ds_free.at[warps])
            plgpu.wait_smem_to_gmem(0)

        def drop(p, at, j):
            """-p where dropout drops the pair, else p: of a probability the sign is free, and registers are not."""
            first, second = (lax.bitcast_convert_type(of_queries(rows_smem[at, n]), jnp.uint32) for n in (2, 3))
            keys = plgpu.broadcasted_iota(jnp.uint32, (TILE, TILE), 0, layout=plgpu.Layout.WGMMA)
            keys = keys + (j * KEYS + warps * TILE).astype(jnp.uint32)
            bits = mix(keys + first, second)
            return jnp.where(bits >= jnp.uint32(keep_threshold(dropout_rate)), p, -p)

        def step(c, j, k, own, keep, dk_ref, dv_ref, i):
            at = lax.rem(i, STAGES)
            q, dout = q_smem.at[at], dout_smem.at[at]
            plgpu.barrier_wait(rows_there.at[at])

            @functools.partial(
                pl.run_scoped,
                s_ref=plgpu.ACC((TILE, TILE), jnp.float32),
                dp_ref=plgpu.ACC((TILE, TILE), jnp.float32),
            )
            def _(s_ref, dp_ref):
                plgpu.wgmma(s_ref, k, q.transpose((1, 0)))
                plgpu.wgmma(dp_ref, v_smem.at[own], dout.transpose((1, 0)))
                # Read while the products are under way.
                lse, delta = (of_queries(rows_smem[at, n]) for n in range(2))
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                p = jnp.exp2(s * to_logits - lse)
                kept = p
                if dropout_rate > 0.0:
                    p = drop(p, at, j)
                    kept = jnp.maximum(p, 0.0)
                plgpu.wgmma(dv_ref, kept.astype(dtype), dout)
                dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)

                @pl.when(i == steps - 1)
                def _():
                    plgpu.barrier_arrive(v_free)
                    plgpu.barrier_arrive(k_free.at[lax.rem(c, 2)])

                if dropout_rate > 0.0:
                    dp, p = jnp.where(p > 0.0, dp * kept_scale, 0.0), jnp.abs(p)
                # Rows of keys do not mix but in dq; those that are masked are left out of dk and dv at the end.
                ds = select(keep, p * (dp - delta)).astype(dtype)
                plgpu.wgmma(dk_ref, ds, q)  # before ds is stored, which takes no time then
                plgpu.barrier_wait(ds_free.at[warps])

                @pl.when((i == 0) & (c > 0))
                def _():  # what the last pass has stored by way of the same memory
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                ds_smem[warps] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_there.at[warps])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(rows_free.at[at])

        # Each a side of a branch: the compiler ignores `set_max_registers` elsewhere.
        lax.cond(warps < COLLECTING, work_on_keys, lambda: lax.cond(warps == COLLECTING, collect, copy))

    of_mask = {"k_clear": plgpu.Barrier(num_arrivals=2)} if masked else {}
    pl.run_scoped(
        body,
        q_smem=_tiles(STAGES, TILE, dtype=dtype),
        dout_smem=_tiles(STAGES, TILE, dtype=dtype),
        rows_smem=plgpu.SMEM((STAGES, *rows_ref.shape[2:]), jnp.float32),
        k_smem=_tiles(2, KEYS, dtype=dtype),
        v_smem=_tiles(KEYS, dtype=dtype),
        ds_smem=_tiles(2, TILE, dtype=dtype),
        dq_smem=_tiles(steps, TILE, dtype=jnp.float32),
        rows_there=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        rows_free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        k_there=plgpu.Barrier(num_barriers=2),
        k_free=plgpu.Barrier(num_arrivals=3, num_barriers=2),
        v_there=plgpu.Barrier(),
        v_free=plgpu.Barrier(num_arrivals=2),
        ds_there=plgpu.Barrier(num_barriers=2),
        ds_free=plgpu.Barrier(num_barriers=2),
        **of_mask,
        collective_axes="warps",
    )


def _tiles(*shape: int, dtype: Any) -> Any:
    """[..., rows, 64] in shared memory, in lines of 128 bytes."""
    elements = 128 // jnp.dtype(dtype).itemsize
    lines = plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM((*shape, TILE), dtype, transforms=lines)


def load_directly(ref: Any, layout: Any) -> Array:
    """From the device memory; some bytes of a sector at a time, which JAX wants to hear."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    # JAX 0.10 asks for an index besides the ref, 0.11 warns where there is one, and 0.12 takes none.
    none: Any = [()] if index is not None and index.default is index.empty else []
    return plgpu.load(ref, *none, layout=layout, optimized=False)


def store_directly(ref: Any, x: Array) -> None:
    if hasattr(plgpu, "store"):  # since JAX 0.12
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def select(keep: Array | None, x: Array) -> Array:
    """x where `keep`, else 0, whatever x is there."""
    return x if keep is None else jnp.where(keep, x, jnp.zeros_like(x))


def of_queries(x: Array) -> Array:
    """[queries] -> [keys, queries], as the products lie in registers."""
    x = plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(x, (TILE, TILE), (1,))


def backward(
    dout: Array,
    qkv: Array,
    rows: Array,
    mask: Array | None = None,
    *,
    scale: float,
    dropout_rate: float = 0.0,
    programs: int,
) -> Array:
    """dout [B,T,N,64], packed [B,T,3,N,64] and what `attention_delta.row_statistics` gives -> the gradient of qkv.

    mask: bool [B|1, 1, 1, T]; `unsupported` has been asked about qkv and it. With dropout, `rows` were made with its
    seed. `programs` is how many multiprocessors there are: each has room for one.
    """
    batch, length, _, heads, _ = qkv.shape
    positions = batch * length
    call = plgpu.kernel(
        functools.partial(_kernel, length=length, heads=heads, scale=scale, dropout_rate=dropout_rate),
        out_type=jax.ShapeDtypeStruct((positions, 3 * heads * TILE), qkv.dtype),
        grid=(min(programs, batch * heads),),
        grid_names=("program",),
        num_threads=4,
        thread_name="warps",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
    )
    operands = [qkv.reshape(positions, -1), dout.reshape(positions, -1), rows.reshape(batch * heads, *rows.shape[2:])]
    if mask is not None:
        mask = mask.reshape(-1, length)
        places = lax.broadcasted_iota(jnp.int32, mask.shape, 1)
        # How many passes have all keys that take part: at least one, which writes the gradients of queries.
        passes = jnp.max(jnp.where(mask, places, 0), axis=1) // KEYS + 1
        operands += [mask.astype(jnp.float32), passes]
    with jax.enable_x64(False):  # or its indices are of two kinds
        found = call(*operands)
    return found.reshape(qkv.shape)
