// The kernels as the host sees them: one function pointer per (family, element type, operator). Null if a build with
// RINGCOMM_ONLY has left the pair out; callers then raise not_in_this_build of `core/dispatch.h`.
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/known_args.h"
#include "cuda/device/pack_args.h"

namespace ringcomm::cuda {

template <typename Args>
using Kernel = void (*)(Args);

// The pair that a kernel computes with for a (dtype, op) of the caller. Few pairs are compiled: bitwise operators are
// the same for every width, sums of signed and unsigned integers have the same bits, and bool has three operators.
struct Arithmetic {
  DType dtype;
  ReduceOp op;  // the combining step: kSum for avg and premul_sum, which the kernel sees in args.reduce_op
  int scale;    // kernel elements in one element of the caller
};
Arithmetic arithmetic_of(DType dtype, ReduceOp op);

// all_reduce, reduce_scatter, reduce. `dtype` and `op` as arithmetic_of gives them.
Kernel<CallArgs> ring_kernel(DType dtype, ReduceOp op);
Kernel<CallArgs> direct_kernel(DType dtype, ReduceOp op);
// all_reduce of at most Layout::packet_bytes per channel, without premul_sum. Null: the pair has none, see oneshot.cu.
Kernel<CallArgs> oneshot_kernel(DType dtype, ReduceOp op);
// all_gather and broadcast round the ring; CallArgs counts are bytes.
Kernel<CallArgs> ring_copy_kernel();
// all_gather, broadcast, gather, scatter, all_to_all. copy_kernel: all ranks are in one launch. The others: they are
// not, or the op is barrier, or an all_to_all in place.
Kernel<CopyArgs> copy_kernel();
Kernel<ExchangeArgs> exchange_kernel();
Kernel<ManyExchangeArgs> many_exchange_kernel();
// send and recv between processes.
Kernel<TransferArgs> transfer_kernel();
// Bucket packing; see pack_args.h. Casts between any two of float32, float64, float16 and bfloat16, and between float32
// and an 8-bit float; other types only with from == to, not scaled. Null: no such cast. A block must have a multiple of
// a warp of threads.
Kernel<PackArgs> pack_kernel(DType from, DType to);
// Reductions whose addresses one launch knows: of all ranks, or of two messages of one rank; see known_args.h. `dtype`
// and `op` as arithmetic_of gives them.
Kernel<KnownArgs> known_kernel(DType dtype, ReduceOp op);

}  // namespace ringcomm::cuda
