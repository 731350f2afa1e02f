// The emulated GPUs of several processes, the ends of a process, and what ThreadSanitizer must see of streams and
// kernels. The test starts itself again as the other process.
#include <chrono>
#include <thread>

#include "cpp/emulator/tools.h"

namespace ringcomm::test {
namespace {

struct PingPongArgs {
  Word *mine, *theirs;
  long* value;
  Word rounds;
  bool first;
};
__global__ void ping_pong(PingPongArgs args) {
  if (threadIdx.x == 0)
    for (Word i = 1; i <= args.rounds; ++i) {
      if (!args.first) await(args.mine, i);
      put(args.value, get(args.value) + 1);
      post(args.theirs, i);
      if (args.first) await(args.mine, i);
    }
  __syncthreads();
}
constexpr Word kRounds = 50;

int second_process(int pipe_in) {
  cudaIpcMemHandle_t handle;
  require(read(pipe_in, &handle, sizeof handle) == sizeof handle, "read the handle");
  Word *words = nullptr, *again = nullptr;
  constexpr unsigned kFlags = cudaIpcMemLazyEnablePeerAccess;
  check(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&words), handle, kFlags), "open the handle");
  check(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&again), handle, kFlags), "open the handle again");
  require(words == again, "one mapping of one allocation");
  check(cudaIpcCloseMemHandle(again), "close");
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, words + 1), "attributes");
  require(attributes.type == cudaMemoryTypeDevice, "imported memory is device memory");
  require(words[3] == 77, "the other process's data", static_cast<long>(words[3]));
  check(emulator::launch(ping_pong, "second", dim3(1), dim3(8),
                         PingPongArgs{words, words + 1, reinterpret_cast<long*>(words + 2), kRounds, false}, nullptr,
                         true),
        "launch");
  check(cudaDeviceSynchronize(), "synchronize");
  require(cudaFree(words) == cudaErrorInvalidValue, "imported memory is not this process's to free");
  check(cudaIpcCloseMemHandle(words), "close");
  return 0;
}
void processes_share_memory() {
  Word* const words = device_memory<Word>(4);
  const Word mark = 77;
  check(cudaMemcpy(words + 3, &mark, sizeof mark, cudaMemcpyHostToDevice), "copy");
  cudaIpcMemHandle_t handle;
  check(cudaIpcGetMemHandle(&handle, words + 1), "a handle of the whole allocation");
  void* same = nullptr;
  require(cudaIpcOpenMemHandle(&same, handle, cudaIpcMemLazyEnablePeerAccess) == cudaErrorDeviceUninitialized,
          "a handle is for other processes");
  cudaGetLastError();
  int ends[2];
  require(pipe(ends) == 0, "pipe");
  const pid_t child = start("second", std::to_string(ends[0]).c_str());
  require(write(ends[1], &handle, sizeof handle) == sizeof handle, "write the handle");
  check(emulator::launch(ping_pong, "first", dim3(1), dim3(8),
                         PingPongArgs{words + 1, words, reinterpret_cast<long*>(words + 2), kRounds, true}, nullptr,
                         true),
        "launch");
  require(exit_code(child) == 0, "the second process");
  check(cudaDeviceSynchronize(), "synchronize");
  require(words[2] == 2 * kRounds, "kernels of two processes took turns", static_cast<long>(words[2]));
  check(cudaFree(words), "free");
  for (int end : ends) close(end);
}

int without_driver() {
  int count = -1, version = -1;
  void* memory = nullptr;
  require(cudaGetDeviceCount(&count) == cudaErrorInsufficientDriver && count == 0, "no driver, no devices", count);
  require(cudaMalloc(&memory, 8) == cudaErrorInsufficientDriver, "no memory without a driver");
  require(cudaDriverGetVersion(&version) == cudaSuccess && version == 0, "no driver has version 0", version);
  return 0;
}
int kernel_fails() {
  int* const out = device_memory<int>(16);
  check(emulator::launch(half_arrives, "half_arrives", dim3(1), dim3(16), out, nullptr, false), "launch");
  require(cudaDeviceSynchronize() == cudaErrorLaunchFailure, "threads that wait at a barrier for ever");
  void* memory = nullptr;
  require(cudaMalloc(&memory, 8) == cudaErrorLaunchFailure, "a failed kernel ends the device's life");
  return 0;
}
int exits_while_a_kernel_spins() {
  Word* const words = device_memory<Word>(3);
  cudaStream_t stream = new_stream();
  check(emulator::launch(waits_in_vain, "waits", dim3(1), dim3(2), AbortArgs{words, words + 1, words + 2, kFar}, stream,
                         false),
        "launch");
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return 0;
}
void other_processes() {
  require(exit_code(start("without_driver", "", "RINGCOMM_EMULATED_NO_DRIVER")) == 0, "without a driver");
  require(exit_code(start("kernel_fails")) == 0, "a kernel fails");
  require(exit_code(start("exits")) == 0, "the process ends while a kernel spins");
}

// ---- what ThreadSanitizer must see ---------------------------------------------------------------------------------

struct MessageArgs {
  Word *flag, *data;
  int fault;
};
__global__ void message(MessageArgs args) {
  if (blockIdx.x == 0) {
    put(&args.data[threadIdx.x], Word{1});
    if (args.fault != 1) __syncthreads();
    if (threadIdx.x == 0) {
      emulator::yield();
      __atomic_store_n(args.flag, 1, args.fault == 2 ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
      emulator::wrote(args.flag);
    }
  } else {
    if (threadIdx.x == 0) await(args.flag, 1);
    if (args.fault != 3) {
      __syncthreads();
    } else {  // as on a device, a vote orders no memory
      __any_sync(~0u, true);
    }
    put(&args.data[threadIdx.x], get(&args.data[threadIdx.x]) + 1);
  }
}
int race(int fault) {
  Word* const words = device_memory<Word>(1 + emulator::kWarp);
  cudaStream_t one = new_stream(), two = new_stream();
  cudaEvent_t event = new_event();
  check(emulator::launch(message, "message", dim3(2), dim3(emulator::kWarp), MessageArgs{words, words + 1, fault}, one,
                         false),
        "launch");
  check(cudaEventRecord(event, one), "record");
  if (fault != 4) check(cudaStreamWaitEvent(two, event), "wait");
  check(cudaMemsetAsync(words + 1, 0, sizeof(Word), two), "clear");
  if (fault != 5) check(cudaStreamSynchronize(two), "synchronize");
  if (fault == 5) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  require(words[1] < 3, "one of the values it may have");
  check(cudaDeviceSynchronize(), "synchronize");
  return 0;
}
extern "C" __attribute__((weak)) void __tsan_acquire(void*);
void races_are_reported() {
  if (!__tsan_acquire) {
    std::printf("races_are_reported skipped: it needs a build with -fsanitize=thread\n");
    return;
  }
  for (int fault = 0; fault <= 5; ++fault) {
    std::fprintf(stderr, "%s", fault == 1 ? "the following reports are wanted\n" : "");
    const int code = exit_code(start("race", std::to_string(fault).c_str()));
    require(code == (fault == 0 ? 0 : 66), "a report for every planted race, and no other", fault * 1000 + code);
  }
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const std::string part = argc > 1 ? argv[1] : "";
  choose_devices();
  if (part == "second") return second_process(std::atoi(argv[2]));
  if (part == "without_driver") return without_driver();
  if (part == "kernel_fails") return kernel_fails();
  if (part == "exits") return exits_while_a_kernel_spins();
  if (part == "race") return race(std::atoi(argv[2]));
  processes_share_memory();
  other_processes();
  races_are_reported();
  std::printf("emulator_process_test passed\n");
}
