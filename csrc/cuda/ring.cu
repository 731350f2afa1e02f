// The ring collectives on a GPU: rounding at every hop, least connections. The schedule is core/ring_loop.h's, run on
// the positions of args.ring_order; schedule chunk c is the chunk of the rank at position c, so that a reduce_scatter
// leaves chunk r with rank r.
#include "cuda/ring_call.h"

namespace ringcomm::cuda {

namespace {

RINGCOMM_KERNEL(kMostThreads) ring_copy(const __grid_constant__ CallArgs args) { ring_call<JustBytes>(args); }

}  // namespace

Kernel<CallArgs> ring_copy_kernel() { return ring_copy; }

}  // namespace ringcomm::cuda
