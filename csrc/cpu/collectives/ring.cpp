#include "cpu/collectives/ring.h"

#include <optional>
#include <vector>

#include "core/call/parts.h"
#include "core/reduce.h"
#include "core/ring_loop.h"
#include "cpu/kernels/loops.h"
#include "runtime/observe/trace.h"

namespace ringcomm::cpu {

namespace {

// The layout of a call's chunks in its input and output.
enum class Shape {
  kWhole,    // chunk c is the union of the c-th slices of every window (all_reduce; broadcast and reduce: one chunk)
  kParts,    // chunk c is part c
  kOwnPart,  // only this rank's chunk is present
};

class CpuRing {
 public:
  CpuRing(SlotStream& slots, const WindowCut& cut, Shape input, Shape output)
      : slots_(slots),
        call_(slots.call()),
        rank_(slots.rank()),
        world_size_(slots.world_size()),
        prev_(ring_prev(rank_, world_size_)),
        element_(slots.element()),
        cut_(cut),
        input_shape_(input),
        output_shape_(output),
        input_(input_parts(call_)),
        output_(output_parts(call_)) {
    if (call_.reduce_op == ReduceOp::kPremulSum) premultiply();
  }

  bool wait_credit(std::uint64_t t) {
    if (!step_) trace_step(t);
    slots_.open(t, cut_.slice_elements * element_);
    return true;
  }
  bool wait_slice(std::uint64_t t) {
    if (!step_) trace_step(t);
    slots_.await(prev_, t);
    return true;
  }
  void publish(std::uint64_t t) { slots_.publish(t); }
  void release(std::uint64_t t) {
    slots_.release(t);
    step_.reset();
  }

  void copy_out(std::uint64_t t, int chunk, std::size_t window) {
    to_slot(t, input(chunk, window), nbytes(chunk, window));
  }
  void keep(int chunk, std::size_t window) {
    const auto probe = slots_.probe(trace::SpanKind::kCopy, rank_, window, nbytes(chunk, window));
    kernels().copy(output(chunk, window), input(chunk, window), nbytes(chunk, window), false);
  }
  void copy_in(std::uint64_t t, int chunk, std::size_t window, const NextSend& out) {
    const char* inbox = slots_.slot_of(prev_, t);
    if (out.any) to_slot(out.ticket, inbox, nbytes(chunk, window));
    const auto probe = slots_.probe(trace::SpanKind::kRead, prev_, t, nbytes(chunk, window));
    kernels().copy(output(chunk, window), inbox, nbytes(chunk, window), false);
  }
  void combine(std::uint64_t t, int chunk, std::size_t window, bool final, const NextSend& out) {
    const void* sources[] = {slots_.slot_of(prev_, t), input(chunk, window)};
    void* outputs[2];
    int num_outputs = 0;
    if (final) outputs[num_outputs++] = output(chunk, window);
    if (out.any) outputs[num_outputs++] = slots_.slot(out.ticket);
    const ReduceOp op = final && call_.reduce_op == ReduceOp::kAvg ? ReduceOp::kAvg : combine_of(call_.reduce_op);
    const std::size_t count = nbytes(chunk, window) / element_;
    const auto probe = slots_.probe(trace::SpanKind::kReduce, prev_, t, count * element_);
    kernels().reduce({call_.dtype, op, sources, 2, nullptr, world_size_, outputs, num_outputs, count, false});
  }

 private:
  Slice slice(int chunk, std::size_t window, Shape shape, const Parts& parts) const {
    if (shape == Shape::kWhole) return cut_.slice(chunk, window);
    const Slice s = cut_.slice(0, window);
    const std::size_t count = shape == Shape::kOwnPart ? call_.count : parts.count(chunk);
    return {s.offset, s.offset < count ? smaller(s.count, count - s.offset) : 0};
  }
  char* address(int chunk, std::size_t window, Shape shape, const Parts& parts) const {
    const int part = shape == Shape::kParts ? chunk : 0;
    return parts.data(part) + slice(chunk, window, shape, parts).offset * element_;
  }
  const char* input(int chunk, std::size_t window) const {
    if (!scaled_.empty()) {
      const std::size_t part = input_shape_ == Shape::kParts ? chunk * call_.count : 0;
      return scaled_.data() + (part + slice(chunk, window, input_shape_, input_).offset) * element_;
    }
    return address(chunk, window, input_shape_, input_);
  }
  char* output(int chunk, std::size_t window) const { return address(chunk, window, output_shape_, output_); }
  std::size_t nbytes(int chunk, std::size_t window) const {
    const bool by_input = input_shape_ != Shape::kOwnPart;
    return slice(chunk, window, by_input ? input_shape_ : output_shape_, by_input ? input_ : output_).count * element_;
  }
  void to_slot(std::uint64_t t, const void* data, std::size_t bytes) { slots_.write(t, slots_.slot(t), data, bytes); }

  // A step lasts from its first wait until its ticket is released.
  void trace_step(std::uint64_t t) {
    if (!trace::on()) return;
    step_.emplace(trace::SpanKind::kStep, prev_, slots_.number(t));
    if (rooted(call_.op)) return;  // a chain, whose tickets are no steps of the ring
    const int step = ring_step_of(call_.op, world_size_, t);
    const RingStep s = ring_step(rank_, world_size_, step);
    step_->at_step(step, s.send_chunk, s.recv_chunk);
  }

  // Multiplies this rank's values by the factor once, in the type on the wire, before they enter the ring.
  void premultiply() {
    const std::size_t count = call_.count * (input_shape_ == Shape::kParts ? world_size_ : 1);
    scaled_.resize(count * element_);
    const void* sources[] = {call_.input};
    void* outputs[] = {scaled_.data()};
    kernels().reduce({call_.dtype, ReduceOp::kPremulSum, sources, 1, &call_.factor, 1, outputs, 1, count, false});
  }

  SlotStream& slots_;
  const Call& call_;
  const int rank_, world_size_, prev_;
  const std::size_t element_;
  const WindowCut cut_;
  const Shape input_shape_, output_shape_;
  const Parts input_, output_;
  std::vector<char> scaled_;
  std::optional<trace::Probe> step_;
};

std::uint64_t run_ring(SlotStream& slots, const WindowCut& cut, Shape input, Shape output) {
  CpuRing ring(slots, cut, input, output);
  ring_loop(slots.call().op, slots.rank(), slots.world_size(), cut.windows(), ring);
  return ring_tickets(slots.call().op, slots.world_size(), cut.windows());
}

}  // namespace

std::uint64_t ring_collective(SlotStream& slots) {
  const Call& call = slots.call();
  const int rank = slots.rank(), world_size = slots.world_size();
  const std::size_t align = kAlignBytes / slots.element(), most = slots.group().slot_bytes() / slots.element();
  const WindowCut chunks = cut_windows(call.count, world_size, most, align),
                  whole = cut_windows(call.count, 1, most, align);
  switch (call.op) {
    case Op::kAllReduce:
      return run_ring(slots, chunks, Shape::kWhole, Shape::kWhole);
    case Op::kReduceScatter:
      return run_ring(slots, cut_windows(input_parts(call).longest(world_size), 1, most, align), Shape::kParts,
                      Shape::kOwnPart);
    case Op::kAllGather:
      return run_ring(slots, cut_windows(output_parts(call).longest(world_size), 1, most, align), Shape::kOwnPart,
                      Shape::kParts);
    case Op::kBroadcast: {
      CpuRing ring(slots, whole, Shape::kWhole, Shape::kWhole);
      ring_broadcast(call.root, rank, world_size, whole.windows(), ring);
      return whole.windows();
    }
    case Op::kReduce: {
      CpuRing ring(slots, whole, Shape::kWhole, Shape::kWhole);
      ring_reduce(call.root, rank, world_size, whole.windows(), ring);
      return whole.windows();
    }
    default:
      fail(ErrorCode::kUnsupported, name(call.op), ": rank ", rank,
           " asked for algorithm ring, which all_reduce, reduce_scatter, all_gather, broadcast and reduce have; use "
           "algorithm auto");
  }
}

}  // namespace ringcomm::cpu
