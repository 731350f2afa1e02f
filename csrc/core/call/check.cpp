#include "core/call/check.h"

#include "core/call/parts.h"
#include "core/error.h"

namespace ringcomm {

namespace {

void check_list(const Call& call, int rank, int world_size, const std::vector<Part>& list, const char* side) {
  if (list.empty()) return;
  if (static_cast<int>(list.size()) != world_size)
    fail(ErrorCode::kInvalid, name(call.op), ": rank ", rank, " expected ", world_size, ' ', side, " parts, got ",
         list.size(), "; pass one per rank");
  for (const Part& part : list)
    if (!part.data && part.count)
      fail(ErrorCode::kInvalid, name(call.op), ": rank ", rank, " expected memory for every ", side,
           " part, got a null address");
}

bool has_8_bits(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

bool can_cast(DType from, DType to) {
  if (from == to || (can_cast(from) && can_cast(to))) return true;
  return (has_8_bits(from) && to == DType::kFloat32) || (from == DType::kFloat32 && has_8_bits(to));
}

}  // namespace

void report_unusable(const char* call, int rank, bool closed, bool forked) {
  if (forked)
    fail(ErrorCode::kInvalid, call, ": rank ", rank,
         " was called in a process forked after the communicator was made; make a communicator in the child, and start "
         "the child with spawn if it uses a GPU");
  if (closed)
    fail(ErrorCode::kInvalid, call, ": rank ", rank,
         " expected an open communicator, got a closed one; create a new one");
  fail(ErrorCode::kInvalid, call, ": rank ", rank,
       " expected a connected engine; exchange handles and call connect first");
}

void report_in_flight(Op op, int rank, std::int64_t timeout_ms) {
  fail(ErrorCode::kTimeout, name(op), ": rank ", rank, " waited ", static_cast<double>(timeout_ms) / 1000.0,
       " s for an asynchronous call, which is still in flight; wait longer, or abort the communicator");
}

std::uint64_t agreed_count(const Call& call, int world_size) {
  if (call.op == Op::kAllToAll && uneven_all_to_all(call)) return kUneven;
  if (call.op == Op::kReduceScatter && !call.input_parts.empty()) return input_parts(call).agreed(world_size);
  if (call.op == Op::kAllGather && !call.output_parts.empty()) return output_parts(call).agreed(world_size);
  const bool parts = call.op == Op::kReduceScatter || call.op == Op::kAllGather;
  return parts ? call.count * world_size : call.count;
}

void check_call(const Call& call, int rank, int world_size) {
  const bool peer_op = point_to_point(call.op);
  if ((rooted(call.op) || peer_op) &&
      (call.root < (peer_op && call.op != Op::kSend ? kAnySource : 0) || call.root >= world_size))
    fail(ErrorCode::kInvalid, name(call.op), ": rank ", rank, " expected a ", peer_op ? "peer" : "root", " below ",
         world_size, ", got ", call.root);
  if (reduces(call.op) && !supports(call.dtype, call.reduce_op))
    fail(ErrorCode::kInvalid, name(call.op), ": rank ", rank, " expected an op that ", name(call.dtype), " has, got ",
         name(call.reduce_op));
  if (call.algorithm == Algorithm::kRing &&
      (call.op == Op::kGather || call.op == Op::kScatter || call.op == Op::kAllToAll))
    fail(ErrorCode::kUnsupported, name(call.op), ": rank ", rank,
         " asked for algorithm ring, which all_reduce, reduce_scatter, all_gather, broadcast and reduce have; use "
         "algorithm auto");
  if (call.algorithm == Algorithm::kOneshot && call.op != Op::kAllReduce)
    fail(ErrorCode::kUnsupported, name(call.op), ": rank ", rank,
         " asked for algorithm oneshot, which only all_reduce has; use algorithm auto");
  if (call.algorithm == Algorithm::kCopyEngine && call.op != Op::kAllGather && call.op != Op::kAllToAll)
    fail(ErrorCode::kUnsupported, name(call.op), ": rank ", rank,
         " asked for algorithm copy_engine, which only all_gather and all_to_all have; use algorithm auto");
  if (call.algorithm == Algorithm::kRing && call.reduce_op == ReduceOp::kPremulSum && !call.input_parts.empty())
    fail(ErrorCode::kUnsupported, name(call.op), ": rank ", rank,
         " asked for premul_sum over a list with algorithm ring; use algorithm auto");
  check_list(call, rank, world_size, call.input_parts, "input");
  check_list(call, rank, world_size, call.output_parts, "output");
  if (call.op == Op::kGather || call.op == Op::kScatter)
    for (const Part& part : call.op == Op::kGather ? call.output_parts : call.input_parts)
      if (part.count != call.count)
        fail(ErrorCode::kInvalid, name(call.op), ": rank ", rank, " expected parts of ", call.count,
             " elements each, got one of ", part.count,
             "; use all_to_all for uneven parts, where ranks tell each other their counts");
  const bool at_root = !rooted(call.op) || rank == call.root;
  const bool reads = call.op != Op::kRecv && call.op != Op::kBarrier &&
                     (at_root || (call.op != Op::kBroadcast && call.op != Op::kScatter));
  const bool writes = call.op != Op::kSend && call.op != Op::kBarrier &&
                      (at_root || (call.op != Op::kReduce && call.op != Op::kGather));
  if (call.count &&
      ((reads && !call.input && call.input_parts.empty()) || (writes && !call.output && call.output_parts.empty())))
    fail(ErrorCode::kInvalid, name(call.op), ": rank ", rank, " expected memory for ", call.count,
         " elements, got a null address");
}

void check_no_copy_engine(const Call& call, int rank) {
  if (call.algorithm == Algorithm::kCopyEngine)
    fail(ErrorCode::kUnsupported, name(call.op), ": rank ", rank,
         " asked for algorithm copy_engine, which GPUs of one host have; use algorithm auto");
}

void check_packing(const PackCall& packing, int rank) {
  if (!can_cast(packing.from, packing.to))
    fail(ErrorCode::kUnsupported, "pack: rank ", rank,
         " expected two of float32, float64, float16 and bfloat16 where types differ, or float32 and an 8-bit float, "
         "got ",
         name(packing.from), " to ", name(packing.to), "; convert the tensors first");
  if (packing.factor != 1.0 && !can_cast(packing.from) && packing.to != DType::kFloat32)
    fail(ErrorCode::kUnsupported, "pack: rank ", rank,
         " expected float32, float64, float16 or bfloat16 with a factor, got ", name(packing.from),
         "; leave the factor out");
  for (const PackCall::Piece& piece : packing.pieces)
    if (piece.count && (!piece.source || !piece.target))
      fail(ErrorCode::kInvalid, "pack: rank ", rank, " expected memory for ", piece.count,
           " elements, got a null address; pass tensors with data");
}

void check_combining(const CombineCall& combining, int rank) {
  if (!supports(combining.dtype, combining.op) || combining.op == ReduceOp::kPremulSum)
    fail(ErrorCode::kInvalid, "combine: rank ", rank, " expected an op that ", name(combining.dtype), " has, got ",
         name(combining.op), "; premul_sum has its factors at the ends");
  if (combining.count && (!combining.first || !combining.second || !combining.output))
    fail(ErrorCode::kInvalid, "combine: rank ", rank, " expected memory for ", combining.count,
         " elements, got a null address; pass tensors with data");
}

}  // namespace ringcomm
