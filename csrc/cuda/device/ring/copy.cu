// all_gather and broadcast round the ring.
#include "cuda/device/ring/kernel.h"

namespace ringcomm::cuda {

namespace {

RINGCOMM_KERNEL(kMostThreads) ring_copy(const __grid_constant__ CallArgs args) { ring_call<ByteArithmetic>(args); }

}  // namespace

Kernel<CallArgs> ring_copy_kernel() { return ring_copy; }

}  // namespace ringcomm::cuda
