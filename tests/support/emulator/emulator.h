// CUDA kernels as host C++. Every CUDA thread is a fiber; one OS thread runs them all under a seeded scheduler, so that
// schedules are reproducible, a stuck kernel is reported (with the waits of its threads), and sanitizers see every CUDA
// thread. This header gives kernels the names of CUDA, and gives tests a Simulation. The emulated GPU behind the CUDA
// runtime API (cuda_runtime.h in this folder) runs on the same fibers. x86-64 only.
//
// A kernel must tell the scheduler what it does to memory that others see (csrc/cuda/device/intrinsics.h does):
//   yield()    before every shared access: another thread may run here
//   look()     the same, before every poll of a flag; after a poll in vain
//   spin_on()  gives up the turn until wrote() names the same address
// There are no standalone fences, because ThreadSanitizer does not understand them. The warp exchanges do not order
// memory either, as on a device: that takes __syncwarp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#if !defined(RINGCOMM_EMULATED_WARP)
#define RINGCOMM_EMULATED_WARP 8  // few lanes keep the fibers few; 32 as on a GPU
#endif

namespace ringcomm::emulator {

constexpr int kWarp = RINGCOMM_EMULATED_WARP;
static_assert(kWarp >= 1 && kWarp <= 32 && (kWarp & (kWarp - 1)) == 0, "lanes of a warp: a power of two up to 32");

// ---- launches -------------------------------------------------------------------------------------------------------

// A kernel with its arguments, which are copied.
struct Body {
  void (*call)(const void* closure);
  std::shared_ptr<const void> closure;
};
template <typename... Params, typename... Args>
Body make_body(void (*kernel)(Params...), const Args&... args) {
  struct Closure {
    void (*kernel)(Params...);
    std::tuple<std::decay_t<Params>...> args;
  };
  return {[](const void* closure) {
            const auto& c = *static_cast<const Closure*>(closure);
            std::apply(c.kernel, c.args);
          },
          std::make_shared<const Closure>(Closure{kernel, {args...}})};
}

struct Options {
  std::uint64_t seed = 1;      // of the order in which threads run; 0: first come, first served
  unsigned preempt_every = 4;  // chance 1/n of a switch at every access; 0: switch only when waiting
  unsigned max_resident = 0;   // >0: room for so many blocks; later ones wait for earlier ones to end
  // True: nobody else writes the flags, so that it is a deadlock if all threads wait, and run() reports it. False: host
  // threads or other processes write flags too, or the kernels' own time limits are being tested; waiting threads then
  // poll again now and then.
  bool exact = true;
};

// Launches any number of kernels, then runs them together, all in the calling thread.
class Simulation {
 public:
  explicit Simulation(const Options& options = {});
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  template <typename... Params, typename... Args>
  void launch(const std::string& name, void (*kernel)(Params...), dim3 grid, dim3 block, const Args&... args) {
    launch_body(name, make_body(kernel, args...), grid, block);
  }
  bool run();  // true: every thread returned. False: `error` says who was stuck where

  std::string error;
  std::uint64_t switches = 0;

 private:
  void launch_body(const std::string& name, Body body, dim3 grid, dim3 block);
  struct State;
  std::unique_ptr<State> state_;
};

// ---- what a kernel may call -----------------------------------------------------------------------------------------

dim3 thread_index();
dim3 block_index();
dim3 block_dim();
dim3 grid_dim();
int lane();

extern int preemptive;  // schedulers in this process that switch at accesses too
void yield_now();
inline void yield() {
  if (__atomic_load_n(&preemptive, __ATOMIC_RELAXED) != 0) yield_now();
}
void look();
// True: the flag was written. False: it is time to check the abort flags and the clock; the thread may have slept for
// long, so a count of polls says nothing. `wanted` is for the report of a deadlock.
bool spin_on(const void* flag, std::uint64_t wanted);
void wrote(const void* flag);
std::uint32_t rnd();
std::uint64_t global_timer_ns();

void bar(int id, int threads);                 // bar.sync
void bar_arrive(int id, int threads);          // bar.arrive
int bar_and(int id, int threads, bool value);  // bar.red.and
void sync_threads();
int sync_threads_and(bool value);
int sync_threads_or(bool value);
void sync_warp();
[[noreturn]] void trap();

// All lanes of a warp pass two words; `exchange` runs once over all of them; each lane gets its own two back.
using Exchange = void (*)(std::uint64_t (*words)[2], int lanes, void* context);
void warp_op(std::uint64_t& a, std::uint64_t& b, void* context, Exchange exchange);

// A variable of the block. `site` is unique to the variable; its contents are noise at first.
void* shared_memory(const void* site, std::size_t nbytes);
template <typename T>
T& shared(const void* site) {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 128, "shared memory runs no constructors");
  return *static_cast<T*>(shared_memory(site, sizeof(T)));
}

inline unsigned ballot(bool value) {
  std::uint64_t mine = value, unused = 0;
  warp_op(mine, unused, nullptr, [](std::uint64_t(*words)[2], int lanes, void*) {
    std::uint64_t all = 0;
    for (int i = 0; i < lanes; ++i) all |= words[i][0] << i;
    for (int i = 0; i < lanes; ++i) words[i][0] = all;
  });
  return static_cast<unsigned>(mine);
}
inline int any_lane(bool value) { return ballot(value) != 0; }
inline int all_lanes(bool value) { return ballot(!value) == 0; }
template <typename T>
T shuffle(T value, int source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a shuffle moves at most 8 bytes");
  std::uint64_t word = 0, from = static_cast<std::uint64_t>(source) % kWarp;
  std::memcpy(&word, &value, sizeof value);
  warp_op(word, from, nullptr, [](std::uint64_t(*words)[2], int lanes, void*) {
    std::uint64_t in[kWarp] = {};
    for (int i = 0; i < lanes; ++i) in[i] = words[i][0];
    for (int i = 0; i < lanes; ++i) words[i][0] = in[words[i][1]];
  });
  std::memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace ringcomm::emulator

#define threadIdx (::ringcomm::emulator::thread_index())
#define blockIdx (::ringcomm::emulator::block_index())
#define blockDim (::ringcomm::emulator::block_dim())
#define gridDim (::ringcomm::emulator::grid_dim())
#define RINGCOMM_SHARED(T, name) \
  static char name##_site;       \
  T& name = ::ringcomm::emulator::shared<T>(&name##_site)
#define __syncthreads() ::ringcomm::emulator::sync_threads()
#define __syncthreads_and(value) ::ringcomm::emulator::sync_threads_and((value) != 0)
#define __syncthreads_or(value) ::ringcomm::emulator::sync_threads_or((value) != 0)
#define __syncwarp(...) ::ringcomm::emulator::sync_warp()
#define __shfl_sync(mask, value, source) ::ringcomm::emulator::shuffle(value, source)
#define __shfl_xor_sync(mask, value, bits) ::ringcomm::emulator::shuffle(value, ::ringcomm::emulator::lane() ^ (bits))
#define __ballot_sync(mask, value) ::ringcomm::emulator::ballot((value) != 0)
#define __any_sync(mask, value) ::ringcomm::emulator::any_lane((value) != 0)
#define __all_sync(mask, value) ::ringcomm::emulator::all_lanes((value) != 0)
#define __trap() ::ringcomm::emulator::trap()

// Relaxed, as on a device; on the two types that CUDA has them for.
template <typename T, typename = std::enable_if_t<std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>>>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> desired) {
  ringcomm::emulator::yield();
  __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  ringcomm::emulator::wrote(address);
  return expected;
}
template <typename T, typename = std::enable_if_t<std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>>>
T atomicAdd(T* address, std::common_type_t<T> value) {
  ringcomm::emulator::yield();
  const T before = __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  ringcomm::emulator::wrote(address);
  return before;
}
