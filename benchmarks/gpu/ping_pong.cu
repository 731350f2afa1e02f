// How long a flag takes from one block to another and back: two blocks of one thread, each answers the other.
//
//   nvcc -O3 -std=c++17 -Icsrc -arch=sm_90 -o ping_pong benchmarks/gpu/ping_pong.cu && ./ping_pong
//
// Prints the nanoseconds of a round trip: the median and the spread of some runs.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/sync.h"

using ringcomm::Flag;

constexpr int kRoundTrips = 2000, kRuns = 15;
constexpr long kMostLooks = 100'000'000;  // a bug must not take the machine

__device__ bool await(const Flag* flag, Flag value) {
  for (long looks = 0; ringcomm::load_relaxed(flag) < value; ++looks)
    if (looks == kMostLooks) return false;
  ringcomm::load_acquire(flag);
  return true;
}

// flags[0] is written by block 0, flags[16] by block 1: lines of their own.
__global__ void ping_pong(Flag* flags) {
  Flag *const mine = flags + 16 * blockIdx.x, *const theirs = flags + 16 * (1 - blockIdx.x);
  for (Flag i = 1; i <= kRoundTrips; ++i) {
    if (blockIdx.x == 0) ringcomm::store_release(mine, i);
    if (!await(theirs, i)) return;
    if (blockIdx.x == 1) ringcomm::store_release(mine, i);
  }
}

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "ping_pong: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

int main() {
  Flag* flags = nullptr;
  check(cudaMalloc(&flags, 4096));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> ns;
  for (int run = -2; run < kRuns; ++run) {  // two to warm up
    check(cudaMemset(flags, 0, 4096));
    void* args[] = {&flags};
    check(cudaEventRecord(begin));
    check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(ping_pong), dim3(2), dim3(1), args, 0, nullptr));
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    Flag last[17] = {};
    check(cudaMemcpy(last, flags, sizeof last, cudaMemcpyDeviceToHost));
    if (last[0] != kRoundTrips || last[16] != kRoundTrips) {
      std::fprintf(stderr, "ping_pong: a flag did not come within %ld looks\n", kMostLooks);
      return 1;
    }
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (run >= 0) ns.push_back(ms * 1e6f / kRoundTrips);
  }
  std::sort(ns.begin(), ns.end());
  std::printf("%.0f %.0f %.0f\n", ns[kRuns / 2], ns.front(), ns.back());
}
