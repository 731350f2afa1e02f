#include "cpu/collectives/direct.h"

#include "core/call/parts.h"
#include "core/schedule.h"
#include "cpu/collectives/tuning.h"
#include "cpu/kernels/loops.h"

namespace ringcomm::cpu {

namespace {

constexpr std::size_t kAlignBytes = 64;

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

class Direct {
 public:
  explicit Direct(SlotStream& slots)
      : slots_(slots),
        call_(slots.call()),
        rank_(slots.group().rank()),
        world_size_(slots.group().world_size()),
        element_(element_bytes(call_.dtype)),
        streaming_((call_.op == Op::kAllGather || call_.input != call_.output) &&
                   buffer_bytes(call_, world_size_) >= tuning::kStreamOutputBytes) {}

  void run() {
    switch (call_.op) {
      case Op::kAllReduce:
        return all_reduce();
      case Op::kReduceScatter:
        return reduce_scatter();
      case Op::kAllGather:
        for (int p = 0; p < world_size_; ++p) take(p, p * part_bytes(), 0, part_bytes());
        return;
      case Op::kAllToAll:
        for (int p = 0; p < world_size_; ++p) take(p, p * part_bytes(), rank_ * part_bytes(), part_bytes());
        return;
      case Op::kBroadcast:
        return broadcast();
      default:
        return;
    }
  }

 private:
  std::size_t part_bytes() const { return call_.count * element_; }

  const char* input(int p) const {
    if (p == rank_) return static_cast<const char*>(call_.input);
    return slots_.group().resolve(p, slots_.header_of(p).input);
  }
  char* output(int p) const {
    if (p == rank_) return static_cast<char*>(call_.output);
    return slots_.group().resolve(p, slots_.header_of(p).output);
  }
  void take(int p, std::size_t to, std::size_t from, std::size_t nbytes) {
    const auto probe = slots_.probe(trace::SpanKind::kRead, p, 0, nbytes);
    kernels().copy(static_cast<char*>(call_.output) + to, input(p) + from, nbytes, streaming_);
  }

  // The root copies its shard to every rank, so that its core shares the work; the other ranks copy the rest
  // themselves.
  void broadcast() {
    const Slice own = shard_of(call_.count, world_size_, call_.root, kAlignBytes / element_);
    const std::size_t begin = own.offset * element_, end = begin + own.count * element_;
    const char* source = input(call_.root);
    if (rank_ == call_.root) {
      for (int p = 0; p < world_size_; ++p) {
        const auto probe = slots_.probe(trace::SpanKind::kWrite, p, 0, end - begin);
        kernels().copy(output(p) + begin, source + begin, end - begin, streaming_);
      }
      const auto probe = slots_.probe(trace::SpanKind::kCopy, rank_, 0, part_bytes());
      return kernels().copy(call_.output, source, part_bytes(), streaming_);
    }
    take(call_.root, 0, 0, begin);
    take(call_.root, end, end, part_bytes() - end);
  }

  // Rank r reduces shard r of every rank's input into every rank's output.
  void all_reduce() {
    const Slice shard = shard_of(call_.count, world_size_, rank_, kAlignBytes / element_);
    const void* sources[kMaxWorldSize];
    void* outputs[kMaxWorldSize];
    for (int p = 0; p < world_size_; ++p) sources[p] = input(p) + shard.offset * element_;
    for (int p = 0; p < world_size_; ++p) outputs[p] = output(p) + shard.offset * element_;
    reduce(sources, outputs, world_size_, shard.count);
  }
  void reduce_scatter() {
    const void* sources[kMaxWorldSize];
    void* outputs[] = {call_.output};
    for (int p = 0; p < world_size_; ++p) sources[p] = input(p) + rank_ * part_bytes();
    reduce(sources, outputs, 1, call_.count);
  }
  void reduce(const void* const* sources, void* const* outputs, int num_outputs, std::size_t count) {
    const auto probe = slots_.probe(trace::SpanKind::kReduce, -1, 0, count * element_);
    kernels().reduce({call_.dtype, call_.reduce_op, sources, world_size_, slots_.factors(), world_size_, outputs,
                      num_outputs, count, streaming_});
  }

  SlotStream& slots_;
  const Call& call_;
  const int rank_, world_size_;
  const std::size_t element_;
  const bool streaming_;
};

// While this object exists, this rank may access the peers' buffers, and no peer returns its buffers to its caller.
// Throws if the group was aborted before.
class PeerAccessGuard {
 public:
  PeerAccessGuard(const Group& group, const Call& call) : flag_(&group.control().in_place.value) {
    store_then_look(flag_, 1);
    if (load_after_store(&group.control().abort.value) == 0) return;
    store_release(flag_, 0);
    group.check_abort(call);
  }
  ~PeerAccessGuard() { store_release(flag_, 0); }
  PeerAccessGuard(const PeerAccessGuard&) = delete;

 private:
  Flag* const flag_;
};

bool usable(const Call& call, int rank, const Location& input, const Location& output) {
  return (input.visible || !needs_input(call, rank)) && (output.visible || !needs_output(call));
}

}  // namespace

void publish_buffers(SlotStream& slots, const Heap& heap) {
  const Call& call = slots.call();
  const auto probe = slots.probe(trace::SpanKind::kPublishBuffers, -1, 0);
  const int rank = slots.group().rank();
  const std::size_t nbytes = input_bytes(call, slots.group().world_size());
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
  const Group& group = slots.group();
  const Call& call = slots.call();
  for (int p = 0; p < group.world_size(); ++p) {
    const int peer =
        p == 0 ? group.rank() : (p <= group.rank() ? p - 1 : p);  // this rank first: it need not wait for itself
    if (peer != group.rank()) slots.await(peer, 0);
    const SlotHeader& said = slots.header_of(peer);
    if (!usable(call, peer, said.input, said.output)) return false;
  }
  return true;
}

void direct_collective(SlotStream& slots) {
  {
    const auto probe = slots.probe(trace::SpanKind::kInPlace, -1, 0);
    const PeerAccessGuard guard(slots.group(), slots.call());
    Direct(slots).run();
  }
  const auto probe = slots.probe(trace::SpanKind::kLeave, -1, 1);  // once no peer reads this rank's buffers any more
  slots.wait_credit(1);
  slots.publish(1);
  slots.await_all(1);
}

}  // namespace ringcomm::cpu
