// The ring collectives on a GPU: every hop rounds, and each rank needs the fewest connections. They run the schedule of
// core/ring_loop.h on the positions of args.ring_order. Schedule chunk c is the chunk of the rank at position c, so
// that a reduce_scatter leaves chunk r with rank r.
#include "cuda/device/ring_call.h"

namespace ringcomm::cuda {

namespace {

RINGCOMM_KERNEL(kMostThreads) ring_copy(const __grid_constant__ CallArgs args) { ring_call<JustBytes>(args); }

}  // namespace

Kernel<CallArgs> ring_copy_kernel() { return ring_copy; }

}  // namespace ringcomm::cuda
