#include "cuda/launch/local_ops.h"

#include "core/dispatch.h"
#include "cuda/launch/call_checks.h"
#include "cuda/launch/grid.h"

namespace ringcomm::cuda {

namespace {

constexpr std::uint64_t kUsefulBytes = 64;  // bytes of each thread that are worth a block

// The grid of a kernel: blocks for a number of units, of which a thread handles `each`.
struct Grid {
  int threads;
  int room;

  template <typename Args>
  Grid(Kernel<Args> kernel, const Context& context) {
    const Setting setting = context.setting();
    threads = setting.threads ? setting.threads : kUsualBlockThreads;
    room = room_for(reinterpret_cast<const void*>(kernel), threads, context.device(), context.rank());
  }
  dim3 blocks(std::uint64_t units, std::uint64_t each) const {
    const std::uint64_t useful = ceil_div(units, static_cast<std::uint64_t>(threads) * each);
    return dim3(static_cast<unsigned>(smaller(useful, room)));
  }
};

}  // namespace

void pack(const PackCall& packing, const Context& context) {
  const bool as_bytes = is_only_moved(packing.from);
  const std::uint64_t each = as_bytes ? element_bytes(packing.from) : 1;  // elements of the kernel for one of the call
  const Kernel<PackArgs> kernel =
      as_bytes ? pack_kernel(DType::kUInt8, DType::kUInt8) : pack_kernel(packing.from, packing.to);
  if (!kernel) not_in_this_build(packing.to, ReduceOp::kSum);
  const int rank = context.rank();
  check_memory(packing, context.device(), rank);
  const Grid grid(kernel, context);
  PackArgs args;
  args.factor = packing.factor;
  args.scaled = packing.factor != 1.0;
  args.num_pieces = 0;
  std::uint64_t total = 0;
  const auto flush = [&] {
    if (total == 0) return;
    launch(kernel, "pack", grid.blocks(total, 8), grid.threads, args, reinterpret_cast<cudaStream_t>(packing.stream),
           false, rank);
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
  KnownArgs args{};
  args.num_sources = 2;
  args.num_targets = 1;
  args.divisor = combining.op == ReduceOp::kAvg ? combining.divisor : 1;
  const void* const sources[] = {combining.first, combining.second};
  args.add(sources, &combining.output, combining.count * static_cast<std::uint64_t>(arithmetic.scale));
  const Grid grid(kernel, context);
  const std::uint64_t each = larger(1, kUsefulBytes / element_bytes(arithmetic.dtype));
  launch(kernel, "combine", grid.blocks(args.count[0], each), grid.threads, args,
         reinterpret_cast<cudaStream_t>(combining.stream), false, rank);
}

}  // namespace ringcomm::cuda
