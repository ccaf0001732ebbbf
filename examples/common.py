"""Shared code of the examples: text that is on every machine, and a training loop that can be interrupted and resumed.

Each step depends only on the run's settings, the number of the step and the state before the step. So a run that was
interrupted and resumed is bitwise equal to a run that was not.
"""

import argparse
import csv
import hashlib
import json
import logging
import math
import os
import shutil
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib import pyplot
from tqdm import tqdm

import jaxft
from docstrings import docstrings
from jaxft import atomic, dispatch, training
from jaxft.checkpoint.files import CheckpointError
from jaxft.models import partition_specs
from jaxft.text import tokenizer as tokenizer_files
from jaxft.tuning import cache as tuning_cache

matplotlib.use("Agg")  # this backend needs no screen

INTERRUPTED = 130  # exit code after Ctrl-C, SIGTERM or SIGHUP
UNWRITTEN = 2  # exit code after a file could not be written
SCALES = 24  # halvings from the largest loss scale to 1; after more skipped steps in a row, the scale is not the cause
TOGETHER = 5  # steps after which several processes ask each other whether a signal came
IN_FLIGHT = 2  # steps queued on the device before the oldest loss is read
CHECKPOINTS = 2  # number of checkpoints that are kept

# Options of JAX that change numerical results.
JAX_OPTIONS = (
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_enable_x64", "jax_random_seed_offset",
    "jax_threefry_partitionable",
)  # fmt: skip
# Environment variables that change numerical results. NPROC and PJRT_NPROC set the number of XLA's CPU threads.
VARIABLES = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "NPROC", "NVIDIA_TF32_OVERRIDE", "PJRT_NPROC", "XLA_FLAGS")

T = TypeVar("T")

_all_finite = jax.jit(training.all_finite)


# --- Text --------------------------------------------------------------------------------------------------------


def paragraphs() -> dict[str, str]:
    """Returns the docstring paragraphs of Python's standard library, in a fixed order.

    Paragraphs that occur in several modules are left out.

    Returns:
      A dict from paragraph to the name of its top-level module or package.
    """
    modules: dict[str, set[str]] = {}
    for docstring in docstrings():
        for paragraph in docstring.paragraphs:
            modules.setdefault(paragraph, set()).add(docstring.owner)
    return {text: owners.pop() for text, owners in modules.items() if text and len(owners) == 1}


def held_out(text: str) -> bool:
    """Returns whether a text is held out for evaluation. About a tenth of all texts are."""
    return hashlib.sha256(text.encode()).digest()[0] < 26


def fingerprint(*arrays: np.ndarray) -> str:
    """Computes a short hash of arrays, such as the data or the initial weights of a run."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


# --- Settings ----------------------------------------------------------------------------------------------------


def arguments(description: str | None, name: str, presets: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Makes a parser for the arguments that the training examples share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", type=Path, required=True, help="the checkpoint all-MiniLM-L6-v2")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, default=Path("runs") / name,
        help="checkpoints, losses, plot and the trained model; a run that is there goes on (%(default)s)",
    )  # fmt: skip
    join_processes()
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument("--preset", choices=presets, default="base" if on_gpu else "small", help="%(default)s here")
    parser.add_argument("--steps", type=positive, help="as the preset has it")
    parser.add_argument(
        "--accumulate", type=positive, default=1, metavar="N", help="micro-batches a step (%(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16" if on_gpu else "float32",
        help="of the computation, %(default)s here; parameters are float32, float16 has loss scaling",
    )  # fmt: skip
    parser.add_argument(
        "--remat", action="store_true",
        help="less memory: compute layers again in the backward pass (on GPUs; XLA's CPU compiler undoes it)",
    )  # fmt: skip
    parser.add_argument("--save-every", type=positive, default=100, metavar="STEPS", help="(%(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="(%(default)s)")
    return parser


def join_processes() -> None:
    """Joins the other processes of the run if the environment names them. It must come before any other use of JAX."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, *numbers = (os.environ.get(name) for name in names)
    if address is None or jax.distributed.is_initialized():
        return
    if not all(number and number.isdecimal() for number in numbers):
        raise SystemExit(f"several processes need {', '.join(names)}, got {[address, *numbers]}")
    count, own = (int(number or 0) for number in numbers)
    jax.distributed.initialize(address, count, own)


def add_division(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the options for several devices. `what` says what the devices share."""
    parser.add_argument("--data-parallel", action="store_true", help=f"all devices share {what}")
    parser.add_argument(
        "--fsdp", action="store_true", help="--data-parallel, and each device keeps a part of the parameters only"
    )


class Devices:
    """The devices of a run: one, or all of them with --data-parallel or --fsdp.

    Attributes:
      count: number of devices.
      mesh: all devices as the mesh axis data, or None for one device.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.fsdp = getattr(args, "fsdp", False)
        divides = self.fsdp or getattr(args, "data_parallel", False)
        if jax.process_count() > 1 and not divides:
            raise SystemExit("several processes need --data-parallel or --fsdp")
        self.count = jax.device_count() if divides else 1
        self.mesh = jax.make_mesh((self.count,), ("data",), (AxisType.Auto,)) if divides else None

    def check(self, option: str, size: int) -> None:
        """Ends the program unless the devices can share `size` equal parts."""
        if size % self.count:
            raise SystemExit(f"{option} must be a multiple of the {self.count} devices, got {size}")

    def replicated(self) -> Any:
        return jax.devices()[0] if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, model: Any, optimizer: optax.GradientTransformation, state: "State") -> Any:
        """Returns the shardings of a state."""
        mesh = self.mesh
        if not self.fsdp or mesh is None:
            return jax.tree.map(lambda _: self.replicated(), state)
        specs = partition_specs(model, fsdp=True)
        params = jax.tree.map(
            lambda spec, x: NamedSharding(mesh, spec) if self._divides(spec, x) else self.replicated(),
            specs, state.params,
        )  # fmt: skip
        opt_state = optax.tree_utils.tree_map_params(
            optimizer, lambda _, sharding: sharding, state.opt_state, params,
            transform_non_params=lambda _: self.replicated(),
        )  # fmt: skip
        return State(params, opt_state, jax.tree.map(lambda _: self.replicated(), state.loss_scale))

    def _divides(self, spec: PartitionSpec, x: jax.Array) -> bool:
        return all(axis is None or size % self.count == 0 for axis, size in zip(spec, x.shape, strict=True))

    def whole(self, params: Any) -> Any:
        """Returns parameters that each device has all of, inside a step: JAX gathers each one when it is needed."""
        return jax.lax.with_sharding_constraint(params, self.replicated()) if self.fsdp else params

    def put(self, tree: Any, shardings: Any) -> Any:
        """Puts arrays, which every process has, on the devices."""
        if jax.process_count() == 1:
            return jax.device_put(tree, shardings)

        def place(x: Any, sharding: Any) -> jax.Array:
            if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(place(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

        return jax.tree.map(place, tree, shardings)

    def batch(self, batch: Any) -> Any:
        """Puts a batch on the devices, which share its second axis."""
        if self.mesh is None:
            return batch
        sharding = NamedSharding(self.mesh, PartitionSpec(None, "data"))
        return self.put(batch, jax.tree.map(lambda _: sharding, batch))


def positive(text: str) -> int:
    return _number(text, int, lambda number: 0 < number < 2**31, "a positive integer below 2**31")


def positive_float(text: str) -> float:
    return _number(text, float, lambda number: 0 < number < math.inf, "a positive number")


def seed(text: str) -> int:
    # jax.random.key uses only the lower 32 bits of a seed.
    return _number(text, int, lambda number: 0 <= number < 2**32, "a natural number below 2**32")


def _number(text: str, kind: Callable[[str], T], accepted: Callable[[T], bool], expected: str) -> T:
    with suppress(ValueError):
        if accepted(number := kind(text)):
            return number
    raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r:.100}")


def settings(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Returns everything that the numbers of a run depend on, as JSON values."""
    fixed = {name: value for name, value in vars(args).items() if name in ("steps", "accumulate", "remat", "seed")}
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    options = {name: getattr(jax.config, name) for name in JAX_OPTIONS}
    options |= {"dtype": args.dtype} | {name: os.environ.get(name, "") for name in VARIABLES}
    # XLA's CPU programs split sums among threads, so the number of cores changes the order of additions.
    cores = _usable_cores() if jax.default_backend() == "cpu" else None
    # Results of jaxft.tuning.autotune on this machine: kernels with other tile sizes add in another order.
    autotuned = json.dumps(tuning_cache.load(dispatch.device_kind()), sort_keys=True, allow_nan=False)
    machine = {"device": dispatch.device_kind(), "cores": cores, "jaxft": jaxft.__version__}
    machine |= {"autotuned": fingerprint(np.frombuffer(autotuned.encode(), np.uint8))}
    return json.loads(json.dumps(fixed | options | machine | versions | more, allow_nan=False))


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# --- A training step ---------------------------------------------------------------------------------------------


class State(NamedTuple):
    """Everything that a step changes."""

    params: Any
    opt_state: Any
    loss_scale: training.LossScale | None


LossFn = Callable[[Any, Any, jax.Array], tuple[jax.Array, jax.Array]]  # (params, batch, key) -> (total, labelled)
Step = Callable[[State, Any, jax.Array], tuple[State, jax.Array]]  # (state, batch, key) -> (state, loss)


def adamw(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Makes AdamW with clipped gradients, and without weight decay of biases and LayerNorms.

    The learning rate warms up for a tenth of the steps, then decays to 0 along a cosine.
    """
    warmup = min(max(1, steps // 10), steps - 1)  # no warm-up of a single step, whose learning rate would be 0
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps)
    matrices = lambda params: jax.tree.map(lambda param: param.ndim > 1, params)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.98, eps=1e-6, weight_decay=0.01, mask=matrices),
    )


def initial_state(params: Any, optimizer: optax.GradientTransformation, dtype: str) -> State:
    return State(params, optimizer.init(params), training.LossScale.create() if dtype == "float16" else None)


def make_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    gradients_of: Callable[..., Any] = training.accumulate_gradients,
    *,
    mesh: Any = None,
) -> Step:
    """Makes a training step. Its batches have the micro-batches along the first axis of each array.

    With a mesh, the second axis of each array is divided among the devices of the mesh axis data, which get one
    micro-batch each. Each device adds up its own gradients. One all-reduce of all gradients then ends the step, so that
    the two gradients of a shared parameter are summed once. `gradients_of` has the arguments of
    `training.accumulate_gradients`, and gets `loss_fn`.
    """

    def gradients(params: Any, loss_scale: Any, *batches: Any) -> Any:
        if mesh is not None:
            batches = jax.tree.map(lambda x: x[:, 0], batches)
        return gradients_of(lambda params, one: loss_fn(params, *one), params, batches, loss_scale=loss_scale)

    if mesh is not None:
        whole, divided = PartitionSpec(), PartitionSpec(None, "data")
        gradients = jax.shard_map(gradients, mesh=mesh, in_specs=(whole, whole, divided, divided), out_specs=whole)

    def step(state: State, batch: Any, key: jax.Array) -> tuple[State, jax.Array]:
        keys = jax.random.split(key, jax.tree.leaves(batch)[0].shape[: 1 if mesh is None else 2])
        loss, found = gradients(state.params, state.loss_scale, batch, keys)

        def update(gradients: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            params, opt_state = state
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        state_of_both, scale = training.update_if_finite(update, found, state[:2], state.loss_scale)
        return State(*state_of_both, scale), loss.mean

    return step


# --- The loop ----------------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """A measurement on held-out text."""

    name: str
    measure: Callable[[Any], Any]  # parameters -> a number
    form: str  # format specification for printing the number


class SaveError(Exception):
    """Error for a file that cannot be written, for example because the disk is full."""


def _reason(error: Exception) -> str:
    reason = (isinstance(error, OSError) and not error.filename and error.strerror) or str(error)
    return " ".join(reason.split())


class Run:
    """A training run and its folder, which holds checkpoints, losses and evaluations.

    The constructor resumes from the latest checkpoint in the folder, if there is one.

    Attributes:
      state: the state after `step` steps.
      step: number of steps done.
      step_seconds: median time of the steps that this process has done, or None if it has done too few.
    """

    def __init__(
        self, out: Path, settings: dict[str, Any], state: State, devices: Devices | None = None, shardings: Any = None
    ) -> None:
        self.devices = devices or Devices(argparse.Namespace())
        # Commit the state to its devices. A restored state is committed too, so both use the same compiled step.
        state = self.devices.put(state, shardings or jax.tree.map(lambda _: self.devices.replicated(), state))
        self.out, self.settings, self.state, self.step = out.resolve(), settings, state, 0
        self.step_seconds: float | None = None
        self._checkpoints = self.out / "checkpoints"
        try:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"--out must name a folder, or where one can be made: {error}") from error
        self._losses: list[float] = []
        self._evaluated: dict[int, float] = {}  # number of steps done -> evaluation
        if jax.default_backend() == "gpu":
            # XLA chooses among algorithms by timing them, and another choice may differ in the last bits. The
            # compilation cache lets a resumed run use the programs that it began with.
            if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
                jax.config.update("jax_compilation_cache_dir", str(self.out / "programs"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        options = ocp.CheckpointManagerOptions(max_to_keep=CHECKPOINTS)
        self._remove_unfinished()  # checkpoints of a process that was killed
        self._manager = ocp.CheckpointManager(self._checkpoints, options=options)
        if (latest := self._manager.latest_step()) is not None:
            self._restore(latest)

    def _read(self, step: int, **items: Any) -> Any:
        """Reads the named items of a checkpoint."""
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # from orbax, TensorStore, json, ...
            time.sleep(0.1)  # let TensorStore's other threads print their errors first
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            others = [other for other in self._manager.all_steps() if other != step]
            then = f"goes on from step {max(others)}" if others else "starts anew"
            raise SystemExit(
                f"{self._checkpoints / str(step)}, the checkpoint of step {step}, cannot be read: {reason:.400}. If it "
                f"is damaged, remove that folder; the same command then {then}"
            ) from error

    def _restore(self, step: int) -> None:
        earlier = self._read(step, settings=ocp.args.JsonRestore())["settings"]
        if unknown := sorted(self.settings.keys() ^ earlier.keys()):
            raise SystemExit(
                f"{self.out} has the checkpoints of another example, or of another version of this one: only one of "
                f"the two has the settings {', '.join(unknown)}. To start anew, remove that folder or name another one "
                "with --out"
            )
        different = [
            f"{name} is {self.settings[name]!r} and was {earlier[name]!r}"
            for name in sorted(self.settings)
            if self.settings[name] != earlier[name]
        ]
        if different:
            raise SystemExit(
                f"{self.out} has the checkpoints of another run: {'; '.join(different)}. To go on with it, run it with "
                "its own settings; to start anew, remove that folder or name another one with --out"
            )
        self.state, self.step = self._read(step, state=ocp.args.StandardRestore(self.state))["state"], step
        path = self.out / "losses.csv"
        try:
            with path.open(newline="") as file:
                self._losses = [float(row["loss"]) for row in csv.DictReader(file)][:step]
            path = self.out / "held_out.csv"
            if path.exists():
                with path.open(newline="") as file:
                    found = {int(row["step"]): float(row["value"]) for row in csv.DictReader(file)}
                self._evaluated = {after: value for after, value in found.items() if after <= step}
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise SystemExit(
                f"{path}, which belongs to the checkpoint of step {step}, cannot be read: {error}"
            ) from error
        if len(self._losses) < step:
            raise SystemExit(f"{path} must have the losses of {step} steps, as its checkpoint, got {len(self._losses)}")
        print(f"resumed after step {step}")

    def _check(self) -> None:
        """Ends the program if loss, gradients or parameters are not finite, before a good checkpoint is replaced."""
        scale = self.state.loss_scale
        if scale is None and not np.isfinite(self._losses[-1:]).all():
            reason = f"the loss is {self._losses[-1]}"
        elif scale is not None and scale.skipped > SCALES:
            reason = f"the gradients of {int(scale.skipped)} steps in a row were not finite, at any loss scale"
        elif not _all_finite(self.state.params):  # the loss is from before the last update
            reason = "the parameters are not finite"
        else:
            return
        advice = "a lower learning rate in the preset may help"
        if self.settings["dtype"] != "float32":
            advice = f"another --dtype or {advice}"
        raise SystemExit(
            f"stopped at step {self.step}, which is not saved: {reason}. What was saved before is in {self.out}; "
            f"{advice}"
        )

    def _save(self) -> None:
        self._check()
        # Write the losses before the checkpoint. A resumed run drops losses that are newer than its checkpoint.
        self._write("losses.csv", ("step", "loss"), enumerate(self._losses))
        state, about = ocp.args.StandardSave(self.state), ocp.args.JsonSave(self.settings)
        args: Any = ocp.args.Composite(state=state, settings=about)
        with self.saving():
            self._manager.save(self.step, args=args)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Makes any error of the block a SaveError. Orbax reports the errors of a checkpoint at the next one."""
        try:
            yield
        except Exception as error:  # from orbax, TensorStore, the operating system, ...
            saved = [int(folder.name) for folder in self._checkpoints.iterdir() if folder.name.isdecimal()]
            then = f"step {max(saved)} is saved; the same command goes on from there" if saved else "nothing is saved"
            raise SaveError(f"stopped after step {self.step}: {_reason(error)}; {then}") from error

    def params(self) -> Any:
        """Returns the parameters, which this process then has all of."""
        if jax.process_count() == 1:
            return self.state.params
        whole = jax.jit(lambda params: params, out_shardings=self.devices.replicated())(self.state.params)
        return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), whole)

    def save_model(self, model: Any, tokenizer: Any, settings: tokenizer_files.Settings) -> None:
        """Writes the trained model and its tokenizer, which was loaded with `settings`."""
        if jax.process_index():
            return
        with self.saving():
            model.save_pretrained(self.out / "model")
            tokenizer_files.save(tokenizer, self.out / "model", settings)

    def _close(self) -> None:
        with self.saving():
            try:
                self._manager.close()  # waits until checkpoints are written
            finally:
                self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        if jax.process_index():
            return
        for folder in self._checkpoints.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, name: str, head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> None:
        if jax.process_index():  # the first process writes for all
            return
        with self.saving(), atomic.replacing(self.out / name) as (new,), atomic.writing(self.out / name):
            with new.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(head)
                writer.writerows(rows)

    def _evaluate(self, evaluation: Evaluation) -> None:
        if self.step not in self._evaluated:
            self._evaluated[self.step] = float(evaluation.measure(self.state.params))
            self._write("held_out.csv", ("step", "value"), self._evaluated.items())
        tqdm.write(f"step {self.step}: {evaluation.name} {self._evaluated[self.step]:{evaluation.form}}")

    def train(self, step: Step, batch_at: Callable[[int], Any], *, save_every: int, evaluation: Evaluation) -> bool:
        """Runs the remaining steps, and saves checkpoints.

        Args:
          step: the training step, see `make_step`.
          batch_at: a function from the number of a step to its batch. It must not depend on anything else.
          save_every: number of steps between checkpoints.
          evaluation: the evaluation, done at the start, after each checkpoint, and after the last step.

        Returns:
          True if the run is finished. False if Ctrl-C or SIGTERM came before the last step.
        """
        # Use a key split off the seed's key, because the initial parameters derive from the seed's key itself.
        steps, base_key = self.settings["steps"], jax.random.split(jax.random.key(self.settings["seed"]))[1]
        pending: deque[jax.Array] = deque()
        finished: list[float] = []  # when the loss of each step was read

        def read(limit: int) -> None:
            while len(pending) > limit:
                self._losses.append(float(pending.popleft()))
                finished.append(time.perf_counter())
                bar.set_postfix(loss=f"{statistics.fmean(self._losses[-20:]):.3f}", refresh=False)
                bar.update()

        with interrupts() as came, ExitStack() as stack:
            stack.callback(self._close)
            self._evaluate(evaluation)
            if self.step < steps:
                batch, key = self._inputs(batch_at(self.step), base_key)
                several = self.devices.mesh is not None
                shardings = jax.tree.map(lambda x: x.sharding, self.state), self.devices.replicated()
                options: dict[str, Any] = {"out_shardings": shardings} if several else {}
                lowered = jax.jit(step, donate_argnums=0, **options).lower(self.state, batch, key)
                compiled = lowered.compile(training.COMPILER_OPTIONS)
                memory: Any = compiled.memory_analysis()
                print(f"temporary memory of a step: {memory.temp_size_in_bytes / 2**20:,.0f} MiB")
            with tqdm(total=steps, initial=self.step, unit="step") as bar:
                while self.step < steps and not self._stops(came):
                    batch, key = self._inputs(batch_at(self.step), jax.random.fold_in(base_key, self.step))
                    self.state, loss = compiled(self.state, batch, key)
                    self.step += 1
                    pending.append(loss)
                    read(IN_FLIGHT)
                    if self.step % save_every == 0:
                        read(0)
                        self._save()
                        self._evaluate(evaluation)
                read(0)
                if self.step != self._manager.latest_step():
                    self._save()
            if self.step == steps and steps not in self._evaluated:
                self._evaluate(evaluation)
        if len(finished) > IN_FLIGHT + 1:
            self.step_seconds = statistics.median(b - a for a, b in zip(finished, finished[1:], strict=False))
        self._plot(evaluation.name)
        if self.step < steps:
            print(f"interrupted after step {self.step} of {steps}, which is saved; the same command goes on from there")
        return self.step == steps

    def _stops(self, came: list[int]) -> bool:
        """Returns whether a signal came to any process. All processes stop after the same step."""
        if jax.process_count() == 1:
            return bool(came)
        # The answer waits for the steps in flight, so it is not asked for after each step.
        return self.step % TOGETHER == 0 and bool(multihost_utils.process_allgather(np.array(bool(came))).any())

    def _inputs(self, batch: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        several = self.devices.mesh is not None
        return self.devices.batch(batch), self.devices.put(key, self.devices.replicated()) if several else key

    def _plot(self, evaluated: str) -> None:
        if jax.process_index():
            return
        figure, axes = pyplot.subplots(figsize=(7, 4))
        axes.plot(self._losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
        if len(self._losses) >= 20:
            means = np.convolve(self._losses, np.full(20, 1 / 20), mode="valid")
            axes.plot(np.arange(19, len(self._losses)), means, color="tab:blue", label="mean of 20 steps")
        axes.set(xlabel="step", ylabel="training loss")
        lines, labels = axes.get_legend_handles_labels()
        other = axes.twinx()
        lines += other.plot(*zip(*sorted(self._evaluated.items()), strict=True), "o--", color="tab:orange")
        other.set(ylabel=evaluated)
        axes.legend(lines, [*labels, evaluated], frameon=False)
        path = self.out / "loss.png"
        with self.saving(), atomic.replacing(path) as (new,), atomic.writing(path):
            figure.savefig(new, dpi=120, bbox_inches="tight")
        pyplot.close(figure)


def _message(number: int) -> str:
    return "interrupted: what no checkpoint has is lost; the same command goes on from the last one, if any"


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Catches the first Ctrl-C, SIGTERM or SIGHUP in the block. A second signal stops the program at once.

    Signals within a second of the first signal count as the same signal, because the program may get it more than once:
    `make` passes it on, and a supervisor may send it to all processes.

    Yields:
      A list that is empty until the first signal.
    """
    came: list[int] = []
    restore = atomic.end_at_signals(_message, note=lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        restore()


def _report_unraisable(error: Any) -> None:
    """Leaves out what TensorStore's threads raise when they report to orbax, which has closed its loop at an error."""
    if str(error.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(error)


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the program with the exit code of `main`. Outside of `Run.train`, a signal ends it at once."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, as in `python finetune.py >&-`
            setattr(sys, name, open(os.devnull, "w"))
    # orbax and asyncio report errors that orbax raises as well.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = _report_unraisable
    restore = atomic.end_at_signals(_message)
    try:
        sys.exit(main())
    except CheckpointError as error:
        sys.exit(f"--model: {error}")
    except (SaveError, OSError) as error:
        print(_reason(error), file=sys.stderr)
        sys.exit(UNWRITTEN)
    finally:
        restore()
