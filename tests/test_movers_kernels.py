"""The CUDA source compiles, without a GPU: NVRTC, the compiler, comes as a package (nvidia-cuda-nvrtc-cu12)."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest

from kvpager.movers.kernels import KERNELS, OPTIONS, SOURCE, THREADS, WIDTHS


@pytest.fixture(scope="module")
def nvrtc():
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        spec = None
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    found = [file for folder in folders for file in (folder / "lib").glob("libnvrtc.so.*")]
    if not found:
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed (Linux only; pip install '.[test]')")
    return ctypes.CDLL(str(found[0]))


def compiled(nvrtc, architecture, source=SOURCE):
    """(status, log, PTX) of a compilation."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"movers.cu", 0, None, None) == 0
    options = [each.encode() for each in (f"-arch={architecture}", *OPTIONS)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    texts = []
    for part in ("ProgramLog", "PTX"):
        if part == "PTX" and status != 0:
            break
        assert getattr(nvrtc, f"nvrtcGet{part}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(nvrtc, f"nvrtcGet{part}")(program, buffer) == 0
        texts.append(buffer.value.decode())
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, texts[0], texts[-1]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_the_kernels_compile(nvrtc, architecture):
    """Turing, the oldest that current cupy knows, and Hopper."""
    status, log, ptx = compiled(nvrtc, architecture)
    assert (status, log) == (0, "")
    assert f".target {architecture}" in ptx
    for kernel in KERNELS:
        for width in WIDTHS:
            assert f".visible .entry {kernel}_{width}(" in ptx
    # The widest copies by 16 bytes, the narrowest does not.
    bodies = ptx.split(".visible .entry ")[1:]
    assert {body.partition("(")[0] for body in bodies if ".v4.u32" in body} == {f"{kernel}_16" for kernel in KERNELS}


def test_the_compiler_would_complain(nvrtc):
    status, log, _ = compiled(nvrtc, "sm_90", SOURCE.replace("gridDim.x", "gridDim.w", 1))
    assert status != 0
    assert "error" in log


def test_thread_blocks_have_the_size_that_the_source_promises():
    assert f"__launch_bounds__({THREADS})" in SOURCE
