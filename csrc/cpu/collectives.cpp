#include "cpu/collectives.h"

#include "core/error.h"
#include "core/reduce.h"
#include "cpu/buffers.h"
#include "cpu/direct.h"
#include "cpu/kernels.h"
#include "cpu/ring.h"
#include "cpu/staged.h"
#include "cpu/tuning.h"

namespace ringcomm::cpu {

namespace {

bool reduces(Op op) { return op == Op::kAllReduce || op == Op::kReduceScatter || op == Op::kReduce; }
bool rooted(Op op) { return op == Op::kBroadcast || op == Op::kReduce || op == Op::kGather || op == Op::kScatter; }

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

// What all ranks must agree on: the elements of the message, or of one part; uneven parts in total.
std::uint64_t agreed_count(const Call& call, int world_size) {
  if (call.op == Op::kAllToAll && uneven_all_to_all(call)) return kUneven;
  if (call.op == Op::kReduceScatter && !call.input_parts.empty()) return input_parts(call).agreed(world_size);
  if (call.op == Op::kAllGather && !call.output_parts.empty()) return output_parts(call).agreed(world_size);
  const bool parts = call.op == Op::kReduceScatter || call.op == Op::kAllGather;
  return parts ? call.count * world_size : call.count;
}

// A world of one: nothing to send, but avg and premul_sum still say what the result is.
void run_alone(const Call& call) {
  if (call.op == Op::kBarrier) return;
  const Parts input = input_parts(call), output = output_parts(call);
  const std::size_t count = input.contiguous() ? output.count(0) : input.count(0);
  if (!reduces(call.op)) return kernels().copy(output.data(0), input.data(0), count * element_bytes(call.dtype), false);
  const void* sources[] = {input.data(0)};
  void* outputs[] = {output.data(0)};
  kernels().reduce({call.dtype, call.reduce_op, sources, 1, &call.factor, 1, outputs, 1, count, false});
}

bool may_be_direct(const Call& call, std::size_t nbytes) {
  const bool has_form = call.op == Op::kAllReduce || call.op == Op::kReduceScatter || call.op == Op::kAllGather ||
                        call.op == Op::kAllToAll || call.op == Op::kBroadcast;
  if (!has_form || call.algorithm == Algorithm::kOneshot) return false;
  const bool one_sided = call.op == Op::kReduceScatter || call.op == Op::kBroadcast;
  if (one_sided && call.algorithm == Algorithm::kAuto && nbytes >= tuning::kStagedBytes) return false;
  return nbytes >= tuning::kVisibleBytes;
}

}  // namespace

void check_call(const Call& call, int rank, int world_size) {
  const bool peer_op = call.op == Op::kSend || call.op == Op::kRecv;
  if ((rooted(call.op) || peer_op) && (call.root < (call.op == Op::kRecv ? kAnySource : 0) || call.root >= world_size))
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

void Collectives::run(const Call& call) {
  group_.check_abort(call);
  if (group_.world_size() == 1) return run_alone(call);
  Stage stage(group_, progress_, call, agreed_count(call, group_.world_size()));
  try {
    stage.finish(run_connected(stage));
  } catch (const std::exception& error) {  // a call cannot be left half done: the tickets of the ranks would differ
    if (!group_.aborted()) group_.abort(concat(name(call.op), ": rank ", group_.rank(), " failed: ", error.what()));
    throw;
  }
}

// Returns the tickets it took.
std::uint64_t Collectives::run_connected(Stage& stage) {
  const Call& call = stage.call();
  if (call.algorithm == Algorithm::kRing && call.op != Op::kBarrier) return ring_collective(stage);
  const std::uint64_t count = agreed_count(call, group_.world_size());
  const bool uneven = count & kUneven;
  if (uneven || !may_be_direct(call, count * element_bytes(call.dtype))) return run_staged(stage, 0);
  announce_buffers(stage, heap_);
  return direct_collective(stage) ? 2 : 1 + run_staged(stage, 1);
}

std::uint64_t Collectives::run_staged(Stage& stage, std::uint64_t first) {
  const Call& call = stage.call();
  switch (call.op) {
    case Op::kAllReduce: {
      const bool small = call.count * element_bytes(call.dtype) <= tuning::kOneshotBytes;
      const bool oneshot = call.algorithm == Algorithm::kOneshot ||
                           (call.algorithm == Algorithm::kAuto && (small || group_.world_size() == 2));
      return oneshot ? staged_oneshot_all_reduce(stage, first) : staged_two_phase_reduce(stage, first);
    }
    case Op::kReduce:
      return staged_two_phase_reduce(stage, first);
    case Op::kReduceScatter:
      return staged_reduce_scatter(stage, first);
    case Op::kAllGather:
    case Op::kGather:
      return staged_gather(stage, first);
    case Op::kBroadcast:
      return staged_broadcast(stage, first);
    case Op::kScatter:
      return staged_scatter(stage, first);
    case Op::kAllToAll:
      return staged_all_to_all(stage, first);
    default:
      return staged_barrier(stage, first);
  }
}

}  // namespace ringcomm::cpu
