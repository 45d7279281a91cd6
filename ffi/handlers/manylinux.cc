// For wheels: lets a library that was built with glibc 2.34 or later and GCC 12 or later run on systems with glibc 2.28
// and the libstdc++ of GCC 8, which is what the tag manylinux_2_28 means.
//
// A function whose version is newer than these systems is defined here, hidden, as a jump to its older version, which
// newer systems still have. glibc 2.34 gave new versions to all functions of libpthread, libdl and librt when it moved
// them into libc; the functions themselves stayed the same. `auditwheel` refuses a wheel that needs another one.
#include <new>
#include <sstream>

#define GTP_JUMP(name, version)                                                                                    \
  asm(".symver gtp_old_" name ", " name "@" version "\n.text\n.globl " name "\n.hidden " name "\n.type " name      \
      ", @function\n" name ":\n  jmp gtp_old_" name "@PLT\n");
#define GTP_GLIBC(name) GTP_JUMP(#name, "GLIBC_2.2.5")

// those that CUDA's runtime and std::thread call
GTP_GLIBC(dlclose) GTP_GLIBC(dlerror) GTP_GLIBC(dlopen) GTP_GLIBC(dlsym) GTP_GLIBC(dlvsym)
GTP_JUMP("dlmopen", "GLIBC_2.3.4")
GTP_GLIBC(pthread_condattr_setpshared) GTP_GLIBC(pthread_create) GTP_GLIBC(pthread_detach) GTP_GLIBC(pthread_join)
GTP_GLIBC(pthread_kill) GTP_GLIBC(pthread_once) GTP_GLIBC(pthread_getspecific) GTP_GLIBC(pthread_setspecific)
GTP_GLIBC(pthread_key_create) GTP_GLIBC(pthread_key_delete)
GTP_GLIBC(pthread_mutex_trylock) GTP_GLIBC(pthread_mutexattr_init) GTP_GLIBC(pthread_mutexattr_destroy)
GTP_GLIBC(pthread_mutexattr_setpshared) GTP_GLIBC(pthread_mutexattr_settype)
GTP_GLIBC(pthread_rwlock_init) GTP_GLIBC(pthread_rwlock_destroy) GTP_GLIBC(pthread_rwlock_unlock)
GTP_GLIBC(pthread_rwlock_rdlock) GTP_GLIBC(pthread_rwlock_tryrdlock) GTP_GLIBC(pthread_rwlock_timedrdlock)
GTP_GLIBC(pthread_rwlock_wrlock) GTP_GLIBC(pthread_rwlock_trywrlock) GTP_GLIBC(pthread_rwlock_timedwrlock)
GTP_GLIBC(pthread_rwlockattr_init) GTP_GLIBC(pthread_rwlockattr_destroy) GTP_GLIBC(pthread_rwlockattr_setpshared)
GTP_GLIBC(pthread_spin_init) GTP_GLIBC(pthread_spin_destroy) GTP_GLIBC(pthread_spin_lock)
GTP_GLIBC(pthread_spin_trylock) GTP_GLIBC(pthread_spin_unlock)
GTP_GLIBC(sem_init) GTP_GLIBC(sem_destroy) GTP_GLIBC(sem_post) GTP_GLIBC(sem_wait) GTP_GLIBC(sem_trywait)
GTP_GLIBC(sem_timedwait)
GTP_GLIBC(shm_open) GTP_GLIBC(shm_unlink)
// std::condition_variable::wait
GTP_JUMP("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", "GLIBCXX_3.4.11")

// The headers of libstdc++ read it, to leave out atomic operations while the process has one thread.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

// what libstdc++ has instantiated only since GCC 9 and GCC 11
template std::stringstream::basic_stringstream();
template std::string std::stringbuf::str() const&;

namespace std {
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
