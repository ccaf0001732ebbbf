"""compute-sanitizer finds no access of a kernel beyond its arrays, and no race. It needs an NVIDIA GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memcheck_attention
from cases import INTERPRET, slow
from jaxft import dispatch

SANITIZER = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"]))
ROOT = Path(__file__).resolve().parents[1]
CASES, PARTS = 50, 25  # PARTS processes run CASES cases; starting one takes as long as some cases

sanitized = pytest.mark.skipif(
    dispatch.platform() != "cuda" or SANITIZER is None, reason="needs an NVIDIA GPU and compute-sanitizer"
)


def sanitize(script, *arguments, tool="memcheck"):
    """Returns the exit status and the output of a script of this folder under compute-sanitizer."""
    environment = os.environ | {
        # One allocation of the driver per array. "platform" and "address" hand out parts of larger ones (JAX 0.11.2).
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
    }
    done = subprocess.run(
        [
            SANITIZER,
            *("--tool", tool, "--error-exitcode", "99", "--target-processes", "application-only"),
            *(("--padding", "65536") if tool == "memcheck" else ()),  # without it, the next array may follow directly
            *("--report-api-errors", "no"),  # JAX asks the driver for what it may not have
            *("--max-connections", "100", "--launch-timeout", "120"),  # other test processes run it too
            *("--print-limit", "3", "--show-backtrace", "no"),
            *(sys.executable, str(ROOT / "tests" / script), *map(str, arguments)),
        ],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.skipif(not INTERPRET, reason="the other tests run the script")
def test_every_kernel_is_a_program_of_its_own(capsys):
    memcheck_attention.main(2, 1)
    assert "1 cases ran in 2 kernels of 2 kinds" in capsys.readouterr().out


@sanitized
@pytest.mark.parametrize("part", [0, *slow(*range(1, PARTS))])
def test_attention_stays_within_its_arrays(part):
    count = CASES // PARTS
    status, output = sanitize("memcheck_attention.py", part * count, count)
    assert status == 0 and "ERROR SUMMARY: 0 errors" in output, output
    assert f"{count} cases ran in " in output, output


@sanitized
@pytest.mark.parametrize(("fault", "found"), [("load", "read"), ("store", "write"), ("row", "read")])
def test_planted_fault_is_found(fault, found):
    """The faults are kernels without a mask, and kernels with one row too many in their masks."""
    status, output = sanitize("memcheck_attention.py", 0, 1, fault)
    assert status != 0 and f"Invalid __global__ {found}" in output, output


@sanitized
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_float8_kernels(tool):
    status, output = sanitize("memcheck_float8.py", tool=tool)
    assert status == 0 and "18 programs ran" in output, output
    assert ("ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards") in output, output
