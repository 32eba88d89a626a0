"""A wall clock that jumps for the processes of one test: a shared object for LD_PRELOAD, from the C compiler. Never sets a clock.

CLOCK_REALTIME alone is shifted, by the seconds that stand in a file; CLOCK_MONOTONIC goes on, as when somebody sets a clock.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

from tests.support.waiting import HUNG_S

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile int64_t *shift;
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TEST_CLOCK_SHIFT");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) shift = at;
}
int clock_gettime(clockid_t id, struct timespec *out) {
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(id, out);
    if (!rc && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) out->tv_sec += *shift;
    return rc;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    int rc = clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return rc;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


class ShiftedClock:
    """`environ` is what the processes need. Raises OSError or subprocess.CalledProcessError where there is no C compiler."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise OSError("there is no C compiler (cc)")
        self._file = folder / "clock"
        self._file.write_bytes(struct.pack("=q", 0))
        library = folder / "clock.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(command, input=_SOURCE.encode(), check=True, timeout=HUNG_S)
        self.environ = {"LD_PRELOAD": str(library), "TEST_CLOCK_SHIFT": str(self._file)}

    def set(self, seconds: int) -> None:
        with self._file.open("r+b", buffering=0) as file:
            file.write(struct.pack("=q", seconds))
