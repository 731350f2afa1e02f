// What a GPU and its driver do that decides how the CUDA engine should launch and wait, one line each:
//
//   nvcc -O3 -std=c++17 -Icsrc -arch=sm_90 -o probe benchmarks/gpu/probe.cu && ./probe
//
//   flag_round_trip_ns     a flag from one block to another and back
//   plain_stream_us        an empty kernel with the engine's size of arguments and blocks, many in a stream
//   plain_graph_us         ... many in a graph
//   cooperative_stream_us  the same by cooperative launches
//   cooperative_graph_us
//   overlap                1: two cooperative kernels of two streams run at the same time; 0: by turns
//   stream_behind_us       creating a stream while a kernel spins, which it does for 300 ms: as long, if it blocks
//   clock_step_ns          of %globaltimer
//   copy_gbps              of a copy of 1 GiB, read and written
//   one_sm_copy_gbps       of a copy by one block
//
// Every wait of a kernel has a limit. A measurement that fails says so on its line; the rest goes on.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/sync.h"

using ringcomm::Flag;
using std::uint64_t;

namespace {

constexpr int kThreads = 512, kBlocks = 64, kLaunches = 400, kRoundTrips = 2000, kRuns = 15;
constexpr uint64_t kMostNs = 300'000'000;  // of any wait
constexpr std::size_t kCopyBytes = std::size_t{1} << 30, kOneSmBytes = std::size_t{64} << 20;

struct Arguments {
  char bytes[3300];  // about what a launch of the engine carries
};

__device__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Looks at the clock now and then: reading it takes as long as some looks at the flag.
__device__ bool await(const Flag* flag, Flag value) {
  uint64_t end = 0;
  for (unsigned looks = 1; ringcomm::load_relaxed(flag) < value; ++looks) {
    if (looks % 1024 != 0) continue;
    const uint64_t time = now();
    if (end == 0) end = time + kMostNs;
    if (time > end) return false;
  }
  ringcomm::load_acquire(flag);
  return true;
}

// flags[0] is written by block 0, flags[16] by block 1: lines of their own.
__global__ void answer(Flag* flags) {
  Flag *const mine = flags + 16 * blockIdx.x, *const theirs = flags + 16 * (1 - blockIdx.x);
  for (Flag i = 1; i <= kRoundTrips; ++i) {
    if (blockIdx.x == 0) ringcomm::store_release(mine, i);
    if (!await(theirs, i)) return;
    if (blockIdx.x == 1) ringcomm::store_release(mine, i);
  }
}

__global__ void nothing(const __grid_constant__ Arguments) {}

// Every block says that it is here and waits for the same block of the other launch.
__global__ void __launch_bounds__(kThreads, 1) launch_barrier(Flag* flags, int me, int* missed) {
  if (threadIdx.x != 0) return;
  ringcomm::store_release(flags + 16 * (me * gridDim.x + blockIdx.x), 1);
  if (!await(flags + 16 * ((1 - me) * gridDim.x + blockIdx.x), 1)) atomicAdd(missed, 1);
}

__global__ void spin(const Flag* flag) { await(flag, 1); }

__global__ void tick(uint64_t* step) {
  uint64_t least = ~uint64_t{0}, last = now();
  for (int i = 0; i < 100; ++i) {
    uint64_t next = now();
    while (next == last) next = now();
    least = min(least, next - last);
    last = next;
  }
  *step = least;
}

__global__ void __launch_bounds__(kThreads, 1) copy(uint4* target, const uint4* source, std::size_t count) {
  constexpr int kAtOnce = 8;
  for (std::size_t i = threadIdx.x; i + (kAtOnce - 1) * kThreads < count; i += kAtOnce * kThreads) {
    uint4 held[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) held[k] = source[i + k * kThreads];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) target[i + k * kThreads] = held[k];
  }
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}
#define CHECK(call) check(call, #call)

struct Stream {
  Stream() { CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  operator cudaStream_t() const { return stream; }
  cudaStream_t stream = nullptr;
};

// Zeros. Lives until the process ends, as everything here does.
template <typename T>
T* memory(std::size_t count) {
  void* data = nullptr;
  CHECK(cudaMalloc(&data, count * sizeof(T)));
  CHECK(cudaMemset(data, 0, count * sizeof(T)));
  CHECK(cudaDeviceSynchronize());
  return static_cast<T*>(data);
}

template <typename T>
T read(const T* at) {
  T value{};
  CHECK(cudaMemcpy(&value, at, sizeof value, cudaMemcpyDeviceToHost));
  return value;
}

// Microseconds between two events around `work`: the median of some runs.
double time_us(cudaStream_t stream, const std::function<void()>& work) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int run = -2; run < kRuns; ++run) {  // two to warm up
    CHECK(cudaEventRecord(begin, stream));
    work();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (run >= 0) times.push_back(ms * 1e3f);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void launch(bool cooperative, const void* kernel, int blocks, int threads, void** args, cudaStream_t stream) {
  if (cooperative)
    CHECK(cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(threads), args, 0, stream));
  else
    CHECK(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), args, 0, stream));
}

double flag_round_trip_ns() {
  const Stream stream;
  Flag* flags = memory<Flag>(32);
  void* args[] = {&flags};
  const double us = time_us(stream, [&] {
    CHECK(cudaMemsetAsync(flags, 0, 32 * sizeof(Flag), stream));
    launch(true, reinterpret_cast<const void*>(answer), 2, 1, args, stream);
  });
  if (read(flags) != kRoundTrips || read(flags + 16) != kRoundTrips)
    throw std::runtime_error("a flag did not come within 300 ms");
  return us * 1e3 / kRoundTrips;
}

double launch_us(bool cooperative, bool graph) {
  const Stream stream;
  Arguments arguments{};
  void* args[] = {&arguments};
  const auto all = [&] {
    for (int i = 0; i < kLaunches; ++i)
      launch(cooperative, reinterpret_cast<const void*>(nothing), kBlocks, kThreads, args, stream);
  };
  if (!graph) return time_us(stream, all) / kLaunches;
  cudaGraph_t captured;
  cudaGraphExec_t code;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  all();
  CHECK(cudaStreamEndCapture(stream, &captured));
  CHECK(cudaGraphInstantiate(&code, captured, 0));
  return time_us(stream, [&] { CHECK(cudaGraphLaunch(code, stream)); }) / kLaunches;
}

double overlap() {
  const Stream streams[2];
  const int blocks = 16;
  Flag* flags = memory<Flag>(2 * 16 * blocks);
  int* missed = memory<int>(1);
  for (int me = 0; me < 2; ++me) {
    void* args[] = {&flags, &me, &missed};
    launch(true, reinterpret_cast<const void*>(launch_barrier), blocks, kThreads, args, streams[me]);
  }
  CHECK(cudaDeviceSynchronize());
  return read(missed) == 0 ? 1 : 0;
}

double stream_behind_us() {
  const Stream stream;
  Flag* flag = memory<Flag>(1);
  void* args[] = {&flag};
  launch(false, reinterpret_cast<const void*>(spin), 1, 1, args, stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto begin = std::chrono::steady_clock::now();
  const Stream another;
  const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - begin;
  CHECK(cudaDeviceSynchronize());
  return us.count();
}

double clock_step_ns() {
  uint64_t* step = memory<uint64_t>(1);
  tick<<<1, 1>>>(step);
  CHECK(cudaGetLastError());
  return static_cast<double>(read(step));
}

double copy_gbps() {
  const Stream stream;
  char *const source = memory<char>(kCopyBytes), *const target = memory<char>(kCopyBytes);
  const auto work = [&] { CHECK(cudaMemcpyAsync(target, source, kCopyBytes, cudaMemcpyDeviceToDevice, stream)); };
  return 2.0 * kCopyBytes / time_us(stream, work) / 1e3;
}

double one_sm_copy_gbps() {
  const Stream stream;
  uint4 *source = memory<uint4>(kOneSmBytes / 16), *target = memory<uint4>(kOneSmBytes / 16);
  const double us = time_us(stream, [&] { copy<<<1, kThreads, 0, stream>>>(target, source, kOneSmBytes / 16); });
  CHECK(cudaGetLastError());
  return 2.0 * kOneSmBytes / us / 1e3;
}

}  // namespace

int main() {
  const std::pair<const char*, std::function<double()>> measurements[] = {
      {"clock_step_ns", clock_step_ns},
      {"flag_round_trip_ns", flag_round_trip_ns},
      {"plain_stream_us", [] { return launch_us(false, false); }},
      {"plain_graph_us", [] { return launch_us(false, true); }},
      {"cooperative_stream_us", [] { return launch_us(true, false); }},
      {"cooperative_graph_us", [] { return launch_us(true, true); }},
      {"overlap", overlap},
      {"stream_behind_us", stream_behind_us},
      {"copy_gbps", copy_gbps},
      {"one_sm_copy_gbps", one_sm_copy_gbps},
  };
  int failed = 0;
  for (const auto& [name, measure] : measurements) {
    try {
      std::printf("%s %.4g\n", name, measure());
    } catch (const std::exception& error) {
      std::printf("%s failed: %s\n", name, error.what());
      cudaGetLastError();  // it is not the next one's
      ++failed;
    }
    std::fflush(stdout);
  }
  return failed ? 1 : 0;
}
