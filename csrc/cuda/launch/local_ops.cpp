#include "cuda/launch/local_ops.h"

#include "core/dispatch.h"
#include "cuda/launch/call_checks.h"
#include "cuda/launch/grid.h"

namespace ringcomm::cuda {

namespace {

constexpr std::uint64_t kUsefulBytes = 64;  // bytes of each thread that are worth a block

// As many blocks as are useful for a number of units, of which a block handles `each`, and fit.
dim3 blocks_for(std::uint64_t units, std::uint64_t each, int room) {
  return dim3(static_cast<unsigned>(smaller(ceil_div(units, each), room)));
}

}  // namespace

void pack(const PackCall& packing, const Context& context) {
  const bool as_bytes = is_only_moved(packing.from);
  const std::uint64_t each = as_bytes ? element_bytes(packing.from) : 1;  // elements of the kernel for one of the call
  const Kernel<PackArgs> kernel =
      as_bytes ? pack_kernel(DType::kUInt8, DType::kUInt8) : pack_kernel(packing.from, packing.to);
  if (!kernel) not_in_this_build(packing.to, ReduceOp::kSum);
  const int rank = context.rank();
  check_memory(packing, context.device(), rank);
  const int threads = context.setting().block_threads(), room = room_for(kernel, threads, context.device(), rank);
  PackArgs args;
  args.factor = packing.factor;
  args.scaled = packing.factor != 1.0;
  args.num_pieces = 0;
  std::uint64_t total = 0;
  const auto flush = [&] {
    if (total == 0) return;
    launch(kernel, "pack", blocks_for(total, 8 * threads, room), threads, args,
           reinterpret_cast<cudaStream_t>(packing.stream), false, rank);
    args.num_pieces = 0;
    total = 0;
  };
  for (const PackCall::Piece& piece : packing.pieces) {
    if (piece.count == 0) continue;
    const int p = args.num_pieces++;
    args.source[p] = static_cast<const char*>(piece.source);
    args.target[p] = static_cast<char*>(piece.target);
    args.end[p] = total += piece.count * each;
    if (args.num_pieces == kMaxPieces) flush();
  }
  flush();
}

void combine(const CombineCall& combining, const Context& context) {
  const Arithmetic arithmetic = arithmetic_of(combining.dtype, combining.op);
  const Kernel<KnownArgs> kernel = known_kernel(arithmetic.dtype, arithmetic.op);
  if (!kernel) not_in_this_build(combining.dtype, combining.op);
  if (combining.count == 0) return;
  const int rank = context.rank();
  check_memory(combining, context.device(), rank);
  const int threads = context.setting().block_threads(), room = room_for(kernel, threads, context.device(), rank);
  KnownArgs args{};
  args.num_sources = 2;
  args.num_targets = 1;
  args.divisor = combining.op == ReduceOp::kAvg ? combining.divisor : 1;
  const void* const sources[] = {combining.first, combining.second};
  args.add(sources, &combining.output, combining.count * static_cast<std::uint64_t>(arithmetic.scale));
  const std::uint64_t each = larger(1, kUsefulBytes / element_bytes(arithmetic.dtype));
  launch(kernel, "combine", blocks_for(args.count[0], each * threads, room), threads, args,
         reinterpret_cast<cudaStream_t>(combining.stream), false, rank);
}

}  // namespace ringcomm::cuda
