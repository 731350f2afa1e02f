// The ring collectives on a GPU: every hop rounds, and each rank needs the fewest connections. They run the schedule of
// core/ring_loop.h on the positions of args.ring_order. Schedule chunk c is the chunk of the rank at position c, so
// that a reduce_scatter leaves chunk r with rank r.
//
// Compiled in groups of element types, which share the work between compilers.
#pragma once

#include "cuda/device/ring/block.h"

namespace ringcomm::cuda {

template <typename Elements>
RINGCOMM_DEVICE void ring_call(const CallArgs& args) {
  const Block block(args.layout, args.ranks[blockIdx.y], args.timeout_ns);
  RINGCOMM_SHARED(RingPlan, plan);
  RingBlock<Elements>(block, args, plan).run();
}

template <typename T>
RINGCOMM_KERNEL(kMostThreads)
ring(const __grid_constant__ CallArgs args) {
  ring_call<RingArithmetic<T>>(args);
}

template <TypeGroup kGroup>
Kernel<CallArgs> ring_of_group(DType dtype, ReduceOp op) {
  return kernel_of_group<CallArgs, kGroup>(
      dtype, op, [](auto element, auto) -> Kernel<CallArgs> { return ring<typename decltype(element)::Type>; });
}

}  // namespace ringcomm::cuda
