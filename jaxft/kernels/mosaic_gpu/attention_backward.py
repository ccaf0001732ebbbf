"""The gradient of attention from packed QKV in one kernel with five matmuls, for Hopper.

Two Triton kernels take seven matmuls: they compute s and dp (below) twice, because the gradients of queries are sums
over keys, and the gradients of keys and values are sums over queries.

Here a program computes the gradients of one head of a sequence at a time. It takes the keys in passes of 128 and visits
all queries in each pass, in steps of 64. The gradients of the 128 keys and values are in registers. The gradients of
all queries are in shared memory, in float32. No sum is shared by several programs, so the results are deterministic.

Pairs are stored as [keys, queries], transposed. The matmuls for dv and dk therefore have p and ds (64 x 64) in
registers; only the matmul for dq reads ds from shared memory::

    s = k q^T, p = exp2(s - lse), dv += p dout, dp = v dout^T, ds = p (dp - delta), dk += ds q, dq += ds^T k

A program has four warp groups. Two of them have 64 keys each. One collects dq from the ds that those two store in
shared memory. One copies (TMA). If a mask leaves out all keys from some key on, passes that have only such keys are
skipped.

Takes 10 * B * N * T * T * 64 floating-point operations. Queries and dout are read again for every 128 keys, from the L2
cache.

Mosaic inserts no barriers around accesses to shared memory (`unsafe_no_auto_barriers`). Barriers and commits order what
one warp group passes to another. Each element of the sum of dq is read and written by the same thread. The keys that a
mask clears are read and written by the same warp.

H100, bf16, 32x512, 12 heads: 148 us (two Triton kernels 217), 2026-11-26. See docs/performance-notes.md, "Gradient of
attention (Mosaic GPU)".
"""

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft.dropout import keep_threshold, mix
from jaxft.kernels.mosaic_gpu.support import KEYS, TILE

# Buffers for steps of queries. With three, shared memory has no room for the next keys.
# H100, with three stages: 10 % slower, 2026-11-25
STAGES = 2
COLLECTING = 2  # The warp group that collects dq. Groups 0 and 1 have keys, and the last group copies.
REGISTERS = {"keys": 192, "collect": 88, "copy": 40}  # Per thread. 512 with both groups that have keys.


def _kernel(qkv_ref, dout_ref, rows_ref, *refs, length: int, heads: int, scale: float, dropout_rate: float):
    *mask_refs, d_ref = refs
    works, dtype, masked = rows_ref.shape[0], qkv_ref.dtype, bool(mask_refs)
    steps, passes = length // TILE, length // KEYS
    to_logits, kept_scale = scale * math.log2(math.e), 1.0 / (1.0 - dropout_rate)

    def body(q_smem, dout_smem, rows_smem, k_smem, v_smem, ds_smem, dq_smem, rows_there, rows_free, k_there, k_free,
             v_there, v_free, ds_there, ds_free, k_clear=None):  # fmt: skip
        warps, program, programs = lax.axis_index("warps"), lax.axis_index("program"), lax.axis_size("program")

        def for_each_pass(visit):
            """Calls visit(c, j, last, work): pass c of this program is pass j, of 0 to `last`, of head `work`."""
            rounds = lax.div(works - 1 - program, programs) + 1  # The number of heads of this program.
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
            """Returns the first row and the first column of a head."""
            return lax.div(work, heads) * length, lax.rem(work, heads) * TILE

        def own_keys(start, j):
            return pl.ds(start + j * KEYS + warps * TILE, TILE)

        def columns(part: int, column):
            """Returns the columns of a head's queries (part 0), keys (1) or values (2)."""
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
                    at = lax.rem(i, STAGES)  # The number of steps of a pass is a multiple of STAGES.
                    tile, there = pl.ds(start + i * TILE, TILE), rows_there.at[at]
                    plgpu.barrier_wait(rows_free.at[at])
                    plgpu.copy_gmem_to_smem(qkv_ref.at[tile, columns(0, column)], q_smem.at[at], there)
                    plgpu.copy_gmem_to_smem(dout_ref.at[tile, columns(0, column)], dout_smem.at[at], there)
                    plgpu.copy_gmem_to_smem(rows_ref.at[work, i], rows_smem.at[at], there)

            # Each completed phase of a barrier needs a wait.
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

                        if masked:  # The first pass may be the last.
                            pl.when(j > 0)(add)
                            # In the layout of acc, so that each thread reads what it has written itself.
                            pl.when(j == last)(lambda: store(plgpu.layout_cast(dq_smem[i], plgpu.Layout.WGMMA)))
                        else:
                            pl.when((j > 0) & (j < last))(add)
                            pl.when(j == last)(lambda: store(dq_smem[i] + acc))

                plgpu.barrier_arrive(k_free.at[at])
                if masked:  # In this group, since the groups with keys have no registers left.
                    pl.when(j == last)(lambda: pl.loop(2 * (j + 1), steps)(functools.partial(clear, start, column)))

        def clear(start, column, i):
            """Stores zeros as the gradients of a tile of keys and values, in a pass that is skipped."""
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
                    # Loaded without shared memory: with 512 keys and dropout none is left.
                    here = mask_refs[0].at[mask_row(work), own_keys(0, j)]
                    mine = load_directly(here, plgpu.Layout.WGMMA.reduce(1))
                    keep = lax.broadcast_in_dim(mine > 0.0, (TILE, TILE), (0,))
                k = k_smem.at[lax.rem(c, 2), own]
                plgpu.barrier_wait(k_there.at[lax.rem(c, 2)])
                plgpu.barrier_wait(v_there)
                if masked:  # The values of masked keys, which may be NaN, must not reach dq.
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
            """Returns -p where dropout drops the pair, else p. The unused sign of p saves registers for a mask."""
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
                # Read while the matmuls run.
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
                # Only dq sums over keys, so masked keys are cleared here. They are cleared in dk and dv at the end.
                ds = select(keep, p * (dp - delta)).astype(dtype)
                plgpu.wgmma(dk_ref, ds, q)  # Before ds is stored, so that the store overlaps with it.
                plgpu.barrier_wait(ds_free.at[warps])

                @pl.when((i == 0) & (c > 0))
                def _():  # Waits for copies of the previous pass's results out of the same shared memory.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                ds_smem[warps] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_there.at[warps])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(rows_free.at[at])

        # Each group is one side of a branch: the compiler ignores `set_max_registers` elsewhere.
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
    """Describes an array [..., rows, 64] in shared memory, with lines of 128 bytes."""
    elements = 128 // jnp.dtype(dtype).itemsize
    lines = plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM((*shape, TILE), dtype, transforms=lines)


def load_directly(ref: Any, layout: Any) -> Array:
    """Loads without shared memory. Each access takes a part of a sector: JAX requires `optimized=False`."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    # JAX 0.10 requires an index besides the ref, JAX 0.11 warns if there is one, and JAX 0.12 takes none.
    none: Any = [()] if index is not None and index.default is index.empty else []
    return plgpu.load(ref, *none, layout=layout, optimized=False)


def store_directly(ref: Any, x: Array) -> None:
    """Stores to device memory without shared memory."""
    if hasattr(plgpu, "store"):  # Since JAX 0.12.
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def select(keep: Array | None, x: Array) -> Array:
    """Returns x where `keep` is True (None: everywhere), else 0, even where x is NaN."""
    return x if keep is None else jnp.where(keep, x, jnp.zeros_like(x))


def of_queries(x: Array) -> Array:
    """Broadcasts [queries] to [keys, queries], in the register layout of the results of wgmma."""
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
    """Computes the gradient of `qkv` [B, T, 3, N, 64] from `dout` [B, T, N, 64], by one of the `programs` on each SM.

    `rows` is the result of `attention_delta.row_statistics` (with dropout, of the seed). `mask` [B|1, 1, 1, T] is True
    for keys that take part.
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
        # The number of passes up to the last key that takes part. At least one, which writes the gradients of queries.
        passes = jnp.max(jnp.where(mask, places, 0), axis=1) // KEYS + 1
        operands += [mask.astype(jnp.float32), passes]
    with jax.enable_x64(False):  # Otherwise the kernel's indices would have two integer types.
        found = call(*operands)
    return found.reshape(qkv.shape)
