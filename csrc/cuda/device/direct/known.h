// The known kernels: no flags, no segments, no waits.
#pragma once

#include "cuda/device/direct/reducer.h"
#include "cuda/device/known_args.h"

namespace ringcomm::cuda {

// Sets what this block reduces of message m. `rows`: those of the messages before, to which it adds those of m.
RINGCOMM_DEVICE void aim(const KnownArgs& args, int m, u64 element, u64& rows, Reduction& what) {
  const u64 nbytes = args.count[m] * element, part = args.scatters ? blockIdx.y : 0;
  char* const* const address = args.address + m * args.each();
  __syncthreads();  // no thread reads the previous message any more
  for (int p = threadIdx.x; p < args.num_sources; p += blockDim.x) {
    what.source[p] = address[p] + part * nbytes;
    what.factor[p] = args.scaled ? args.factor[p] : 1;
  }
  const int num_targets = args.scatters ? 1 : args.num_targets;
  for (int t = threadIdx.x; t < num_targets; t += blockDim.x) what.target[t] = address[args.num_sources + part + t];
  if (threadIdx.x == 0) {
    const u64 block = args.scatters ? blockIdx.x : blockIdx.y * gridDim.x + blockIdx.x;
    what.step = args.scatters ? gridDim.x : gridDim.x * gridDim.y;
    what.first = first_row(block, what.step, rows);
    what.num_sources = args.num_sources;
    what.num_targets = num_targets;
    what.divisor = args.divisor;
    what.scaled = args.scaled;
    what.count = args.count[m];
  }
  __syncthreads();
  rows += rows_of(nbytes);
}

template <typename T, typename Combine>
RINGCOMM_KERNEL(kMostThreads)
reduce_known(const __grid_constant__ KnownArgs args) {
  RINGCOMM_SHARED(Reduction, what);
  u64 rows = 0;
  for (int m = 0; m < args.num_messages; ++m) {
    aim(args, m, sizeof(T), rows, what);
    Reducer<T, Combine, kMaxLaunchRanks>(what).run();
  }
}

template <TypeGroup kGroup>
Kernel<KnownArgs> known_of_group(DType dtype, ReduceOp op) {
  return kernel_of_group<KnownArgs, kGroup>(dtype, op, [](auto element, auto combine) -> Kernel<KnownArgs> {
    return reduce_known<typename decltype(element)::Type, decltype(combine)>;
  });
}

}  // namespace ringcomm::cuda
