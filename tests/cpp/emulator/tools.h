// What the tests of the emulator use: accesses and flags of kernels, a few kernels, streams, processes.
#pragma once

#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace ringcomm::test {

using Word = std::uint64_t;

inline void require(bool ok, const char* what, long detail = 0) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s (%ld)\n", what, detail);
  std::fflush(stderr);
  _exit(1);
}
inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) std::fprintf(stderr, "%s\n", cudaGetErrorName(error));
  require(error == cudaSuccess, what, error);
}
inline void require_says(const std::string& text, const char* part) {
  if (text.find(part) == std::string::npos) std::fprintf(stderr, "got: %s\n", text.c_str());
  require(text.find(part) != std::string::npos, part);
}

// ---- in kernels ----------------------------------------------------------------------------------------------------

inline void post(Word* flag, Word value) {
  emulator::yield();
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  emulator::wrote(flag);
}
inline Word look(const Word* flag) {
  emulator::look();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
inline void await(const Word* flag, Word target) {
  while (look(flag) < target) emulator::spin_on(flag, target);
}
template <typename T>
T get(const T* from) {
  emulator::yield();
  return *from;
}
template <typename T>
void put(T* to, T value) {
  emulator::yield();
  *to = value;
}

// ---- kernels -------------------------------------------------------------------------------------------------------

__global__ inline void half_arrives(int* out) {
  if (threadIdx.x % 2 == 0) __syncthreads();
  put(&out[threadIdx.x], 1);
}

struct PairArgs {
  Word *mine, *theirs;
};
__global__ inline void handshake(PairArgs args) {
  if (threadIdx.x == 0) {
    post(args.theirs, 1);
    await(args.mine, 1);
  }
  __syncthreads();
}

struct AbortArgs {
  Word *never, *abort, *ticks;
  std::uint64_t deadline_ns;
};
__global__ inline void waits_in_vain(AbortArgs args) {
  if (threadIdx.x != 0) return;
  while (look(args.never) < 1) {
    const bool tick = !emulator::spin_on(args.never, 1);
    if (!tick) continue;
    put(args.ticks, get(args.ticks) + 1);
    if (__atomic_load_n(args.abort, __ATOMIC_ACQUIRE) != 0 || emulator::global_timer_ns() > args.deadline_ns) return;
  }
}
inline constexpr std::uint64_t kFar = ~std::uint64_t{0};  // a deadline

// ---- on the host ---------------------------------------------------------------------------------------------------

inline cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream");
  return stream;
}
inline cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "create an event");
  return event;
}
template <typename T>
T* device_memory(std::size_t count) {
  T* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "allocate");
  check(cudaMemset(memory, 0, count * sizeof(T)), "clear");
  return memory;
}

// Starts this program again, to play the part `name`; an environment variable may be set for it.
inline pid_t start(const char* name, const char* argument = "", const char* variable = nullptr) {
  const pid_t child = fork();
  require(child >= 0, "fork");
  if (child > 0) return child;
  if (variable) setenv(variable, "1", 1);
  execl("/proc/self/exe", "/proc/self/exe", name, argument, nullptr);
  _exit(127);
}
inline int exit_code(pid_t child) {
  int status = 0;
  require(waitpid(child, &status, 0) == child, "wait for a process");
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}
// Small devices, whatever the environment says.
inline void choose_devices() {
  setenv("RINGCOMM_EMULATED_SMS", "2", 1);
  setenv("RINGCOMM_EMULATED_SM_THREADS", "512", 1);
  setenv("RINGCOMM_EMULATED_DEVICES", "2", 1);
}

}  // namespace ringcomm::test
