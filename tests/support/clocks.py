"""A time of day that tests can move, for real: for a process and whatever runs in it (Python, SQLite), as if somebody had set the clock.

In: a directory. Out: the environment of processes, and the right to move their clock. Invariant: the monotonic clock stays what it is,
as it does where a machine's clock is set.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long long offset(void) {
    static volatile long long *place;
    if (!place) {
        int file = open(getenv("MOVED_CLOCK"), O_RDONLY);
        place = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    }
    return *place;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *place) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (place) *place = precise.tv_sec;
    return precise.tv_sec;
}
"""


class MovedClock:
    """A clock for processes that are started with `environment`."""

    def __init__(self, directory: Path) -> None:
        """Make it; the test is skipped where there is no C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            pytest.skip("a C compiler is not here: install gcc")
        source, library, self._file = directory / "clock.c", directory / "clock.so", directory / "clock"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        self.move(0)
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(self._file)}

    def move(self, seconds: int) -> None:
        """Set it to so many seconds from the real time, at once for all processes."""
        if not self._file.exists():
            self._file.write_bytes(bytes(8))
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))
