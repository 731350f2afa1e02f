#include "cpu/collectives/runner.h"

#include "core/call/check.h"
#include "core/call/parts.h"
#include "core/error.h"
#include "core/reduce.h"
#include "cpu/collectives/direct.h"
#include "cpu/collectives/ring.h"
#include "cpu/collectives/staged.h"
#include "cpu/collectives/tuning.h"
#include "cpu/kernels/loops.h"

namespace ringcomm::cpu {

namespace {

// With a world size of one nothing is sent, but avg and premul_sum still change the values.
void run_alone(const Call& call) {
  if (call.op == Op::kBarrier) return;
  const Parts input = input_parts(call), output = output_parts(call);
  const std::size_t count = input.contiguous() ? output.count(0) : input.count(0);
  if (!reduces(call.op)) return kernels().copy(output.data(0), input.data(0), count * element_bytes(call.dtype), false);
  const void* sources[] = {input.data(0)};
  void* outputs[] = {output.data(0)};
  kernels().reduce({call.dtype, call.reduce_op, sources, 1, &call.factor, 1, outputs, 1, count, false});
}

bool direct_pays(const Call& call, std::size_t nbytes) {
  const bool has_form = call.op == Op::kAllReduce || call.op == Op::kReduceScatter || call.op == Op::kAllGather ||
                        call.op == Op::kAllToAll || call.op == Op::kBroadcast;
  if (!has_form || call.algorithm == Algorithm::kOneshot) return false;
  const bool one_sided = call.op == Op::kReduceScatter || call.op == Op::kBroadcast;
  if (one_sided && call.algorithm == Algorithm::kAuto && nbytes >= tuning::kStagedBytes) return false;
  return nbytes >= tuning::kVisibleBytes;
}

// Of a call that is not direct.
bool is_oneshot(const Call& call, int world_size) {
  if (call.op != Op::kAllReduce) return false;
  const bool small = call.count * element_bytes(call.dtype) <= tuning::kOneshotBytes;
  return call.algorithm == Algorithm::kOneshot || (call.algorithm == Algorithm::kAuto && (small || world_size == 2));
}

}  // namespace

void Collectives::run(const Call& call) {
  const trace::CallSpan span(group_.origin(), static_cast<std::int64_t>(progress_.sequence), call);
  group_.check_abort(call);
  if (group_.world_size() == 1) {
    ++progress_.sequence;
    return run_alone(call);
  }
  SlotStream slots(group_, progress_, call, agreed_count(call, group_.world_size()));
  try {
    slots.finish(run_connected(slots));
  } catch (const std::exception& error) {  // a call must not stay half done: the ranks' tickets would differ
    end_badly(call, error.what());
    throw;
  }
}

// Aborts the group, and returns once no peer can access the caller's buffers any more. The error may be a consequence
// of a lost rank, whose memory cannot be opened any more; then the lost rank is reported as the cause.
void Collectives::end_badly(const Call& call, const char* what) {
  const auto let_go_of_buffers = [this] {
    if (!group_.wait_peers_idle()) heap_.detach();
  };
  try {
    if (!group_.aborted()) group_.check_lost(call);
  } catch (const Error&) {
    let_go_of_buffers();
    throw;
  }
  if (!group_.aborted())
    group_.abort(concat(name(call.op), ": rank ", group_.rank(), " failed: ", what), ErrorCode::kAborted);
  let_go_of_buffers();
}

void Collectives::note_algorithm(const Call& call, AlgorithmUsed used) const {
  trace::chose(name(used));
  used_.add(call.op, call.algorithm, used);
}

// Returns the number of tickets used.
std::uint64_t Collectives::run_connected(SlotStream& slots) {
  const Call& call = slots.call();
  if (call.algorithm == Algorithm::kRing && call.op != Op::kBarrier) {
    note_algorithm(call, AlgorithmUsed::kRing);
    return ring_collective(slots);
  }
  const std::uint64_t count = agreed_count(call, group_.world_size());
  const bool uneven = count & kUneven;
  if (uneven || !direct_pays(call, count * element_bytes(call.dtype))) return run_staged(slots, 0);
  publish_buffers(slots, heap_);
  if (!buffers_are_visible(slots)) return 1 + run_staged(slots, 1);
  note_algorithm(call, AlgorithmUsed::kDirect);
  direct_collective(slots);
  return 2;
}

std::uint64_t Collectives::run_staged(SlotStream& slots, std::uint64_t first) {
  const Call& call = slots.call();
  const bool oneshot = is_oneshot(call, group_.world_size());
  note_algorithm(call, oneshot ? AlgorithmUsed::kOneshot : AlgorithmUsed::kStaged);
  switch (call.op) {
    case Op::kAllReduce:
      return oneshot ? staged_oneshot_all_reduce(slots, first) : staged_two_phase_reduce(slots, first);
    case Op::kReduce:
      return staged_two_phase_reduce(slots, first);
    case Op::kReduceScatter:
      return staged_reduce_scatter(slots, first);
    case Op::kAllGather:
    case Op::kGather:
      return staged_gather(slots, first);
    case Op::kBroadcast:
      return staged_broadcast(slots, first);
    case Op::kScatter:
      return staged_scatter(slots, first);
    case Op::kAllToAll:
      return staged_all_to_all(slots, first);
    default:
      return staged_barrier(slots, first);
  }
}

}  // namespace ringcomm::cpu
