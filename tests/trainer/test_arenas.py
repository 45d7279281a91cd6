"""Threads of a run share two of glibc's heaps, unless the user wants another number."""

import os
import platform
import subprocess
import sys

import pytest

from gtp_jax.runner.trainer import _arenas

# Starts threads that hold memory of their own, and prints how many heaps there are.
PROGRAM = """
import ctypes, pathlib, re, runpy, sys, threading
if sys.argv[2] == "limited":
    runpy.run_path(sys.argv[3])["limit_arenas"]()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
barrier = threading.Barrier(12)
def hold():
    for _ in range(50):
        libc.malloc(1000)
        barrier.wait()
threads = [threading.Thread(target=hold) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
print(len(re.findall("<heap nr", pathlib.Path(sys.argv[1]).read_text())))
"""


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_threads_share_two_heaps_unless_the_environment_says_otherwise(tmp_path):
    def heaps(how, **environment):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "heaps.xml"), how, _arenas.__file__]
        ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
        return int(ran.stdout)

    assert heaps("limited") <= 2 < heaps("free")
    assert 2 < heaps("limited", MALLOC_ARENA_MAX="5") <= 5
