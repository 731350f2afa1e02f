#include "cpu/collectives/direct.h"

#include "core/call/parts.h"
#include "core/schedule.h"
#include "core/scope_exit.h"
#include "cpu/collectives/tuning.h"
#include "cpu/kernels/loops.h"

namespace ringcomm::cpu {

namespace {

// Whether the peers access the buffer.
bool needs_input(const Call& call, int rank) { return call.op != Op::kBroadcast || rank == call.root; }
bool needs_output(const Call& call) { return call.op == Op::kAllReduce || call.op == Op::kBroadcast; }

std::size_t input_bytes(const Call& call, int world_size) {
  const bool parts = call.op == Op::kReduceScatter || call.op == Op::kAllToAll;
  return call.count * element_bytes(call.dtype) * (parts ? world_size : 1);
}
// The larger of a rank's two buffers.
std::size_t buffer_bytes(const Call& call, int world_size) {
  return input_bytes(call, world_size) * (call.op == Op::kAllGather ? world_size : 1);
}

bool streams_output(const SlotStream& slots) {
  const Call& call = slots.call();
  return (call.op == Op::kAllGather || call.input != call.output) &&
         buffer_bytes(call, slots.world_size()) >= tuning::kStreamOutputBytes;
}
std::size_t part_bytes(const SlotStream& slots) { return slots.call().count * slots.element(); }

// The buffers of rank p, as this rank accesses them.
const char* input_of(const SlotStream& slots, int p) {
  if (p == slots.rank()) return static_cast<const char*>(slots.call().input);
  return slots.group().resolve(p, slots.header_of(p).input);
}
char* output_of(const SlotStream& slots, int p) {
  if (p == slots.rank()) return static_cast<char*>(slots.call().output);
  return slots.group().resolve(p, slots.header_of(p).output);
}

// Copies `nbytes` of rank p's input, from byte `from` on, into this rank's output, from byte `to` on.
void copy_from(const SlotStream& slots, int p, std::size_t to, std::size_t from, std::size_t nbytes) {
  const auto probe = slots.probe(trace::SpanKind::kRead, p, 0, nbytes);
  kernels().copy(static_cast<char*>(slots.call().output) + to, input_of(slots, p) + from, nbytes,
                 streams_output(slots));
}

// The root copies its shard to every rank, so that its core shares the work; the other ranks copy the rest themselves.
void broadcast(const SlotStream& slots) {
  const Call& call = slots.call();
  const std::size_t element = slots.element(), nbytes = part_bytes(slots);
  const Slice own = shard_of(call.count, slots.world_size(), call.root, kAlignBytes / element);
  const std::size_t begin = own.offset * element, end = begin + own.count * element;
  if (slots.rank() != call.root) {
    copy_from(slots, call.root, 0, 0, begin);
    copy_from(slots, call.root, end, end, nbytes - end);
    return;
  }
  const char* source = input_of(slots, call.root);
  for (int p = 0; p < slots.world_size(); ++p) {
    const auto probe = slots.probe(trace::SpanKind::kWrite, p, 0, end - begin);
    kernels().copy(output_of(slots, p) + begin, source + begin, end - begin, streams_output(slots));
  }
  const auto probe = slots.probe(trace::SpanKind::kCopy, slots.rank(), 0, nbytes);
  kernels().copy(call.output, source, nbytes, streams_output(slots));
}

// Reduces `count` elements of every rank's input, from byte `from` on, into each output.
void reduce(const SlotStream& slots, std::size_t from, void* const* outputs, int num_outputs, std::size_t count) {
  const Call& call = slots.call();
  const int ranks = slots.world_size();
  const void* sources[kMaxWorldSize];
  for (int p = 0; p < ranks; ++p) sources[p] = input_of(slots, p) + from;
  const auto probe = slots.probe(trace::SpanKind::kReduce, -1, 0, count * slots.element());
  kernels().reduce({call.dtype, call.reduce_op, sources, ranks, slots.factors(), ranks, outputs, num_outputs, count,
                    streams_output(slots)});
}

// Rank r reduces shard r of every rank's input into every rank's output.
void all_reduce(const SlotStream& slots) {
  const std::size_t element = slots.element();
  const Slice shard = shard_of(slots.call().count, slots.world_size(), slots.rank(), kAlignBytes / element);
  void* outputs[kMaxWorldSize];
  for (int p = 0; p < slots.world_size(); ++p) outputs[p] = output_of(slots, p) + shard.offset * element;
  reduce(slots, shard.offset * element, outputs, slots.world_size(), shard.count);
}

void run_in_place(const SlotStream& slots) {
  const Call& call = slots.call();
  const std::size_t part = part_bytes(slots), own = slots.rank() * part;
  switch (call.op) {
    case Op::kAllReduce:
      return all_reduce(slots);
    case Op::kReduceScatter:
      return reduce(slots, own, &call.output, 1, call.count);
    case Op::kAllGather:
      for (int p = 0; p < slots.world_size(); ++p) copy_from(slots, p, p * part, 0, part);
      return;
    case Op::kAllToAll:
      for (int p = 0; p < slots.world_size(); ++p) copy_from(slots, p, p * part, own, part);
      return;
    case Op::kBroadcast:
      return broadcast(slots);
    default:
      return;
  }
}

bool usable(const Call& call, int rank, const Location& input, const Location& output) {
  return (input.visible || !needs_input(call, rank)) && (output.visible || !needs_output(call));
}

}  // namespace

void publish_buffers(SlotStream& slots, const Heap& heap) {
  const Call& call = slots.call();
  const auto probe = slots.probe(trace::SpanKind::kPublishBuffers, -1, 0);
  const int rank = slots.rank();
  const std::size_t nbytes = input_bytes(call, slots.world_size());
  // Parts have no single base address; and an all_to_all in place overwrites data that the peers still read.
  const bool unfit = !call.input_parts.empty() || !call.output_parts.empty() ||
                     (call.op == Op::kAllToAll && call.input == call.output);
  Location input{-1, 0, 0}, output{-1, 0, 0};
  if (!unfit && needs_input(call, rank)) input = heap.locate(call.input, nbytes);
  if (!unfit && needs_output(call)) output = heap.locate(call.output, nbytes);
  if (!unfit && !needs_input(call, rank)) input.visible = 1;
  slots.wait_credit(0);
  slots.set_buffers(input, output);
  slots.publish(0);
}

bool buffers_are_visible(SlotStream& slots) {
  const Call& call = slots.call();
  const int rank = slots.rank();
  for (int i = 0; i < slots.world_size(); ++i) {
    const int peer = i == 0 ? rank : (i <= rank ? i - 1 : i);  // this rank first: it need not wait for itself
    if (peer != rank) slots.await(peer, 0);
    const SlotHeader& said = slots.header_of(peer);
    if (!usable(call, peer, said.input, said.output)) return false;
  }
  return true;
}

void direct_collective(SlotStream& slots) {
  {
    const auto probe = slots.probe(trace::SpanKind::kInPlace, -1, 0);
    // While the flag is set this rank may access the peers' buffers: no peer returns its buffers to its caller.
    const Group& group = slots.group();
    Flag* const in_place = &group.control().in_place.value;
    store_then_look(in_place, 1);
    const ScopeExit done([in_place] {
      drain_streaming_stores();  // a peer that sees the flag may give its buffer back
      store_release(in_place, 0);
    });
    if (load_after_store(&group.control().abort.value) != 0) {
      store_release(in_place, 0);  // first: check_abort may wait for the reason
      group.check_abort(slots.call());
    }
    run_in_place(slots);
  }
  const auto probe = slots.probe(trace::SpanKind::kLeave, -1, 1);  // once no peer reads this rank's buffers any more
  slots.wait_credit(1);
  slots.publish(1);
  slots.await_all(1);
}

}  // namespace ringcomm::cpu
