#include "cuda/launch/call_checks.h"

#include <iterator>
#include <map>

#include "core/call/parts.h"
#include "core/error.h"
#include "cuda/launch/builder.h"
#include "cuda/memory/buffers.h"
#include "cuda/runtime.h"

namespace ringcomm::cuda {

namespace {

// Kernels read whole elements: at another address the GPU would end the process's context. Types that are only moved
// are read as bytes.
void check_alignment(const char* call, const void* data, DType dtype, const char* side, int rank) {
  const std::size_t element = is_only_moved(dtype) ? 1 : element_bytes(dtype);
  if (reinterpret_cast<std::uint64_t>(data) % element != 0)
    fail(ErrorCode::kInvalid, call, ": rank ", rank, " expected its ", side, " at an address that is a multiple of ",
         element, " bytes, as ", name(dtype), " needs, got ", data, "; copy it into a new array");
}

void check_address(const char* call, const void* data, DType dtype, const char* side, int device, int rank) {
  check_alignment(call, data, dtype, side, rank);
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

// Checks many addresses of one call. The driver is asked once for each allocation; after an address in memory of
// another kind, for each address. Between calls nothing is kept, because another allocation may lie at the address of a
// freed one.
class AddressChecks {
 public:
  AddressChecks(const char* call, DType dtype, const char* side, int device, int rank)
      : call_(call), side_(side), dtype_(dtype), device_(device), rank_(rank) {}

  void check(const void* data) {
    const auto address = reinterpret_cast<std::uint64_t>(data);
    const auto after = ends_.upper_bound(address);
    if (after != ends_.begin() && address < std::prev(after)->second)
      return check_alignment(call_, data, dtype_, side_, rank_);
    check_address(call_, data, dtype_, side_, device_, rank_);
    if (!by_allocation_) return;
    const Allocation allocation = allocation_of(address);
    by_allocation_ = allocation.nbytes != 0;
    if (by_allocation_) ends_[allocation.base] = allocation.end();
  }

 private:
  const char *const call_, *const side_;
  const DType dtype_;
  const int device_, rank_;
  bool by_allocation_ = true;
  std::map<std::uint64_t, std::uint64_t> ends_;  // of the allocations that were checked, by their beginnings
};

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
    if (parts.empty() && call.count) check_address(name(call.op), base, call.dtype, what, device, rank);
    for (const Part& part : parts)
      if (part.count) check_address(name(call.op), part.data, call.dtype, what, device, rank);
  };
  const bool at_root = !rooted(call.op) || call.root == rank;
  const bool moves = call.op != Op::kBarrier;
  const bool reads = moves && call.op != Op::kRecv && (at_root || call.op == Op::kReduce || call.op == Op::kGather);
  if (reads) side(call.input, call.input_parts, "input");
  const bool seen = reads && call.input == call.output && call.input_parts.empty() && call.output_parts.empty();
  if (moves && !seen && call.op != Op::kSend && (at_root || call.op == Op::kBroadcast || call.op == Op::kScatter))
    side(call.output, call.output_parts, "output");
}

void check_memory(const PackCall& packing, int device, int rank) {
  AddressChecks sources("pack", packing.from, "source", device, rank);
  AddressChecks targets("pack", packing.to, "target", device, rank);
  for (const PackCall::Piece& piece : packing.pieces) {
    if (piece.count == 0) continue;
    sources.check(piece.source);
    targets.check(piece.target);
  }
}

void check_memory(const CombineCall& combining, int device, int rank) {
  check_address("combine", combining.first, combining.dtype, "first message", device, rank);
  check_address("combine", combining.second, combining.dtype, "second message", device, rank);
  check_address("combine", combining.output, combining.dtype, "output", device, rank);
}

}  // namespace ringcomm::cuda
