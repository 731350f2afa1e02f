#include "cuda/call_checks.h"

#include "core/error.h"
#include "core/parts.h"
#include "cuda/prepare.h"
#include "cuda/runtime.h"

namespace ringcomm::cuda {

namespace {

void check_address(const char* call, const void* data, const char* side, int device, int rank) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes of a call's memory", rank);
  if (attributes.type == cudaMemoryTypeManaged || (attributes.type == cudaMemoryTypeHost && attributes.devicePointer))
    return;
  if (attributes.type == cudaMemoryTypeDevice && attributes.device == device) return;
  const std::string got = attributes.type == cudaMemoryTypeDevice ? concat("memory of device ", attributes.device)
                                                                  : std::string("host memory");
  fail(ErrorCode::kInvalid, call, ": rank ", rank, " expected its ", side, " in memory of device ", device, ", got ",
       got, "; move the tensor to the rank's device");
}

}  // namespace

void check_algorithm(const Call& call, int rank, int world_size) {
  if (call.algorithm != Algorithm::kOneshot || call.op != Op::kAllReduce || has_packets(call, world_size)) return;
  if (world_size > kMaxPacketRanks)
    fail(ErrorCode::kUnsupported, "all_reduce: rank ", rank, " asked for algorithm oneshot, which has at most ",
         kMaxPacketRanks, " ranks, on ", world_size, "; use algorithm auto or direct, whose bits are the same");
  fail(ErrorCode::kUnsupported, "all_reduce: rank ", rank, " asked for algorithm oneshot for ", name(call.dtype), ", ",
       name(call.reduce_op), ", for which the cuda engine has no such kernel; ",
       "use algorithm auto or direct, whose bits are the same");
}

void check_parts(const Call& call, int rank, int world_size) {
  const Parts input = input_parts(call), output = output_parts(call);
  const bool gathers = call.op == Op::kAllGather && !output.contiguous();
  const bool scatters = call.op == Op::kReduceScatter && !input.contiguous();
  if (!gathers && !scatters) return;
  const std::size_t own = (gathers ? output : input).count(rank);
  if (own != call.count)
    fail(ErrorCode::kInvalid, name(call.op), ": rank ", rank, " expected a part of its own of ", call.count,
         " elements in the list, got ", own, "; pass lists whose entry of this rank is as long as the single tensor");
  if (gathers && call.algorithm == Algorithm::kRing && !in_one_piece(output, world_size, element_bytes(call.dtype)))
    fail(ErrorCode::kUnsupported, name(call.op), ": rank ", rank,
         " asked for algorithm ring with a list of separate outputs; use one tensor, or algorithm auto");
}

// The handle 2 means a different stream in every thread, and one thread launches the calls of several ranks.
void check_stream(const char* call, std::uintptr_t stream, int rank) {
  if (stream == 2)
    fail(ErrorCode::kUnsupported, call, ": rank ", rank,
         " expected a stream of its own or the legacy one, got the per-thread default stream; create a stream");
}

void check_memory(const Call& call, int device, int rank) {
  const auto side = [&](const void* base, const std::vector<Part>& parts, const char* what) {
    if (parts.empty() && call.count) check_address(name(call.op), base, what, device, rank);
    for (const Part& part : parts)
      if (part.count) check_address(name(call.op), part.data, what, device, rank);
  };
  const bool at_root = !rooted(call.op) || call.root == rank;
  const bool moves = call.op != Op::kBarrier;
  const bool reads = moves && call.op != Op::kRecv && (at_root || call.op == Op::kReduce || call.op == Op::kGather);
  if (reads) side(call.input, call.input_parts, "input");
  const bool seen = reads && call.input == call.output && call.input_parts.empty() && call.output_parts.empty();
  if (moves && !seen && call.op != Op::kSend && (at_root || call.op == Op::kBroadcast || call.op == Op::kScatter))
    side(call.output, call.output_parts, "output");
}

void check_memory(const Packing::Piece& piece, int device, int rank) {
  if (piece.count == 0) return;
  check_address("pack", piece.source, "source", device, rank);
  check_address("pack", piece.target, "target", device, rank);
}

void check_memory(const Combining& combining, int device, int rank) {
  check_address("combine", combining.first, "first message", device, rank);
  check_address("combine", combining.second, "second message", device, rank);
  check_address("combine", combining.output, "output", device, rank);
}

}  // namespace ringcomm::cuda
