// Shifts the wall clock of a process that preloads this by the seconds in the file `HOST_CLOCK`, which may change while
// it runs. Monotonic clocks are left alone, and deadlines by the wall clock are shifted back for the kernel.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t* offset;
static __typeof__(clock_gettime)* real_gettime;
static __typeof__(pthread_cond_timedwait)* real_timedwait;
static __typeof__(syscall)* real_syscall;

__attribute__((constructor)) static void begin(void) {
    if (!real_gettime) {
        real_syscall = dlsym(RTLD_NEXT, "syscall");
        real_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");  // of x86-64
        if (!real_timedwait) real_timedwait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
        int file = open(getenv("HOST_CLOCK"), O_RDONLY);
        offset = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
        if (offset == MAP_FAILED) abort();
        close(file);
        real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    }
}

int clock_gettime(clockid_t clock, struct timespec* t) {
    begin();
    int failed = real_gettime(clock, t);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval* t, void* zone) {
    (void)zone;
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    *t = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return failed;
}

time_t time(time_t* t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

// Returns what the kernel calls a deadline. One of the monotonic clock is smaller than any year's.
static const struct timespec* kernels(const struct timespec* deadline, struct timespec* place) {
    begin();
    if (!deadline || deadline->tv_sec < 1000000000) return deadline;
    *place = (struct timespec){deadline->tv_sec - *offset, deadline->tv_nsec};
    return place;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const struct timespec* deadline) {
    struct timespec place;
    deadline = kernels(deadline, &place);
    return real_timedwait(condition, mutex, deadline);
}

long syscall(long number, ...) {
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    struct timespec place;
    begin();
    if (number == SYS_futex && a[1] & FUTEX_CLOCK_REALTIME) a[3] = (long)kernels((void*)a[3], &place);
    return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
