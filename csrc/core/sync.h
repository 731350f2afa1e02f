// All memory ordering. A flag is a 64-bit counter that one side writes and others read. Data written before
// `store_release` is visible to every reader that has read the new value with `load_acquire`. The device uses PTX at
// system scope, the host C++ atomics, under the same names.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace ringcomm {

using Flag = std::uint64_t;  // in memory that several ranks access; naturally aligned

RINGCOMM_HD std::uint64_t load_acquire(const Flag* flag) {
#if defined(__CUDA_ARCH__)
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#endif
}
RINGCOMM_HD std::uint64_t load_relaxed(const Flag* flag) {
#if defined(__CUDA_ARCH__)
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, __ATOMIC_RELAXED);
#endif
}
// Does not order streaming stores; drain_streaming_stores() does.
RINGCOMM_HD void store_release(Flag* flag, std::uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#else
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
#endif
}

#if !defined(__CUDA_ARCH__)
// A store that later loads cannot overtake: for "post, then check whether a peer sleeps". An exchange would also work,
// but the processor requests an exchange's cache line only after all earlier stores, and a plain store's line sooner.
// ThreadSanitizer does not know fences.
inline void store_then_look(Flag* flag, std::uint64_t value) {
#if defined(__SANITIZE_THREAD__)
  __atomic_exchange_n(flag, value, __ATOMIC_SEQ_CST);
#else
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
inline std::uint64_t load_after_store(const Flag* flag) { return __atomic_load_n(flag, __ATOMIC_SEQ_CST); }
inline std::uint64_t fetch_add(Flag* flag, std::uint64_t value) {
  return __atomic_fetch_add(flag, value, __ATOMIC_SEQ_CST);
}
inline bool claim(Flag* flag, std::uint64_t expected, std::uint64_t desired) {
  return __atomic_compare_exchange_n(flag, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
inline void store_relaxed(Flag* flag, std::uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELAXED); }
// Makes non-temporal stores visible before the flag that announces them.
inline void drain_streaming_stores() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#else
  __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}
#endif

}  // namespace ringcomm
