// Runs the ring loops (core/ring_loop.h) on a block. The slots of a link lie with the reader: a block combines what
// prev has written into this rank's slot with its own values, and writes the result straight into its slot at next.
//
// No deadlock: order all hops of all ranks by (message, window, ticket), starts before hops. A hop of ticket t needs
// prev's start of t or hop of t - 1. It also needs room for t + 1, which next gives by its hop of t + 1 - depth. With
// depth >= 2, everything that a hop needs comes before it in this order. In reduce and broadcast a ticket moves along a
// line of ranks: a hop needs the same ticket at the rank before, and an earlier ticket at the rank after.
#pragma once

#include "core/ring_loop.h"
#include "cuda/device/link_ends.h"
#include "cuda/device/ring/arithmetic.h"

namespace ringcomm::cuda {

// The facts of the call that all threads of a block share. They lie in shared memory, to leave the registers to the
// data.
struct RingPlan {
  Signature signature;
  char* inbox;  // boards
  char* outbox;
  Flag* credit;        // given to this rank by next
  Flag* thanks;        // given to prev
  u64 received, sent;  // tickets of the links before this message
  u64 count, slice_elements;
  int chunks, message, position, prev, next;
};

template <typename Elements>
class RingBlock {
 public:
  RINGCOMM_DEVICE RingBlock(const Block& block, const CallArgs& args, RingPlan& plan)
      : block_(block), args_(args), plan_(plan), elements_(args), ends_(block) {
    if (block.thread() != 0) return;
    const int world_size = block.world_size();
    plan.signature =
        block.sign(args.signed_op, args.dtype, args.reduce_op, args.algorithm, args.root, args.signed_count);
    plan.received = load_one(&block.state().received);
    plan.sent = load_one(&block.state().sent);
    plan.position = position_of(block.rank());
    plan.prev = args.ring_order[ring_prev(plan.position, world_size)];
    plan.next = args.ring_order[ring_next(plan.position, world_size)];
    plan.inbox = block.of(block.rank()) + block.layout().board_at();
    plan.outbox = block.of(plan.next) + block.layout().board_at();
    plan.credit = block.consumed(block.rank());
    plan.thanks = block.consumed(plan.prev);
  }

  // Runs the messages of the call, one after the other. False: a wait gave up.
  RINGCOMM_DEVICE bool run() {
    const int messages = args_.parts ? 1 : args_.num_messages;
    for (int m = 0; m < messages; ++m)
      if (!run(m)) return false;
    close();
    return true;
  }

  // ---- the executor -------------------------------------------------------------------------------------------------

  RINGCOMM_DEVICE bool wait_credit(u64 t) {
    ends_.await_credit(plan_.credit, plan_.sent + t, block_.layout().depth, plan_.next);
    return ends_.going();
  }
  RINGCOMM_DEVICE bool wait_slice(u64 t) {
    ends_.await_slice(inbox(), plan_.received + t, plan_.prev, WaitKind::kSlice, plan_.signature, !checked_);
    checked_ = true;
    return ends_.going();
  }
  RINGCOMM_DEVICE void publish(u64 t) {
    ends_.publish(outbox(), plan_.sent + t, plan_.signature, !signed_);
    signed_ = true;
  }
  RINGCOMM_DEVICE void release(u64 t) { ends_.release(plan_.thanks, plan_.received + t); }

  RINGCOMM_DEVICE void copy_out(u64 t, int chunk, std::size_t window) {
    if (ends_.ready()) enter(chunk, window, outbox().slot(plan_.sent + t));
  }
  RINGCOMM_DEVICE void keep(int chunk, std::size_t window) {
    char* const to = output(chunk, window);
    if (ends_.works() && (elements_.scales() || input(chunk, window) != to)) enter(chunk, window, to);
  }
  RINGCOMM_DEVICE void copy_in(u64 t, int chunk, std::size_t window, const NextSend& out) {
    if (!ends_.ready()) return;
    const u32 nbytes = count(chunk, window) * elements_.element();
    copy_to_both(ends_.workers(), inbox().slot(plan_.received + t), nbytes, output(chunk, window), slot_of(out));
  }
  // There is a result to store, or data to pass on, or both.
  RINGCOMM_DEVICE void combine(u64 t, int chunk, std::size_t window, bool final, const NextSend& out) {
    if (!ends_.ready()) return;
    char* const slot = slot_of(out);
    char* const to = final ? output(chunk, window) : slot;
    elements_.combine({u32(ends_.workers()), inbox().slot(plan_.received + t), input(chunk, window), to,
                       final ? slot : nullptr, count(chunk, window), world_size(), block_.args().factor},
                      final);
  }

 private:
  // Runs the windows that this channel has of a message.
  RINGCOMM_DEVICE bool run(int message) {
    open(message);
    const u64 channel = block_.channel(), channels = block_.num_channels(), windows = cut().windows();
    const u64 tickets = run_windows(windows > channel ? ceil_div(windows - channel, channels) : 0);
    block_.sync();
    if (block_.thread() == 0) {
      plan_.received += tickets;
      plan_.sent += tickets;
    }
    return ends_.going();
  }
  // The tickets of a link advance even if the call did not use it, because both of its ends count the same tickets.
  RINGCOMM_DEVICE void close() const {
    if (block_.thread() == 0 && RINGCOMM_FAULT != Fault::kTicketsForgotten) {
      store_one(&block_.state().received, plan_.received);
      store_one(&block_.state().sent, plan_.sent);
    }
    block_.finish(plan_.signature);
  }

  RINGCOMM_DEVICE int world_size() const { return block_.world_size(); }
  RINGCOMM_DEVICE int position_of(int rank) const {
    int position = 0;
    while (args_.ring_order[position] != rank) ++position;
    return position;
  }

  // Returns how many tickets it took; going() says whether all waits succeeded.
  RINGCOMM_DEVICE u64 run_windows(u64 windows) {
    constexpr bool kCopies = !Elements::kReduces;
    constexpr Op kRooted = kCopies ? Op::kBroadcast : Op::kReduce;
    if (world_size() == 1) {
      for (u64 w = 0; w < windows; ++w) keep(0, w);
      return 0;
    }
    if (args_.op == kRooted) {
      const int root = position_of(args_.root);
      if constexpr (kCopies)
        ring_broadcast(root, plan_.position, world_size(), windows, *this);
      else
        ring_reduce(root, plan_.position, world_size(), windows, *this);
      return windows;
    }
    // One of two, so that the compiler drops keep() where values are reduced.
    const Op op = kCopies ? Op::kAllGather : args_.op == Op::kAllReduce ? Op::kAllReduce : Op::kReduceScatter;
    ring_loop(op, plan_.position, world_size(), windows, *this);
    return ring_tickets(op, world_size(), windows);
  }

  // ---- where the data lies ------------------------------------------------------------------------------------------
  // all_reduce: chunk c is the union of the c-th slices of all windows. reduce_scatter and all_gather: chunk c is part
  // c; the side with one part has only that one, and the parts may be separate messages. reduce and broadcast: one
  // chunk.

  RINGCOMM_DEVICE void open(int message) {
    if (block_.thread() == 0) {
      const u32 element = elements_.element();
      std::size_t count = count_of(message);
      if (args_.parts)
        for (int m = 0; m < args_.num_messages; ++m) count = larger(count, count_of(m));
      plan_.message = message;
      plan_.count = count;
      plan_.chunks = args_.op == Op::kAllReduce ? world_size() : 1;
      plan_.slice_elements = cut_for_channels(count, plan_.chunks, block_.layout().slot_bytes / element,
                                              kLineBytes / element, kLeastBytes / element, block_.num_channels())
                                 .slice_elements;
    }
    block_.sync();
  }
  RINGCOMM_DEVICE WindowCut cut() const { return {plan_.count, plan_.chunks, plan_.slice_elements}; }
  RINGCOMM_DEVICE Board inbox() const {
    return Board::at(plan_.inbox, block_.layout().depth, block_.layout().slot_bytes);
  }
  RINGCOMM_DEVICE Board outbox() const {
    return Board::at(plan_.outbox, block_.layout().depth, block_.layout().slot_bytes);
  }
  RINGCOMM_DEVICE u64 count_of(int message) const { return args_.counts[message]; }
  RINGCOMM_DEVICE char* slot_of(const NextSend& out) const {
    return out.any ? outbox().slot(plan_.sent + out.ticket) : nullptr;
  }
  RINGCOMM_DEVICE int users_chunk(int chunk) const { return args_.ring_order[chunk]; }
  RINGCOMM_DEVICE int message_of(int users_chunk) const { return args_.parts ? users_chunk : plan_.message; }
  RINGCOMM_DEVICE Slice slice(int chunk, u64 window) const {
    const u64 of_all = window * block_.num_channels() + block_.channel();
    if (plan_.chunks > 1) return cut().slice(users_chunk(chunk), of_all);
    const Slice s = cut().slice(0, of_all);
    if (!args_.parts) return s;
    const u64 count = count_of(users_chunk(chunk));
    return {s.offset, s.offset < count ? smaller(s.count, count - s.offset) : 0};
  }
  RINGCOMM_DEVICE u32 count(int chunk, u64 window) const { return static_cast<u32>(slice(chunk, window).count); }
  RINGCOMM_DEVICE const char* input(int chunk, u64 window) const {
    const int m = message_of(users_chunk(chunk));
    const u64 before = args_.op == Op::kReduceScatter && !args_.parts ? users_chunk(chunk) * count_of(m) : 0;
    return static_cast<const char*>(args_.buffers(m, blockIdx.y).input) +
           (before + slice(chunk, window).offset) * elements_.element();
  }
  RINGCOMM_DEVICE char* output(int chunk, u64 window) const {
    const int m = message_of(block_.rank());  // of parts, only the own one comes out
    const u64 before = args_.op == Op::kAllGather ? users_chunk(chunk) * count_of(m) : 0;
    return static_cast<char*>(args_.buffers(m, blockIdx.y).output) +
           (before + slice(RINGCOMM_FAULT == Fault::kWrongChunk ? position_of(block_.rank()) : chunk, window).offset) *
               elements_.element();
  }
  // Brings this rank's own values into the ring.
  RINGCOMM_DEVICE void enter(int chunk, u64 window, char* to) const {
    elements_.enter({u32(ends_.workers()), nullptr, input(chunk, window), to, nullptr, count(chunk, window), 1,
                     block_.args().factor});
  }

  const Block& block_;
  const CallArgs& args_;
  RingPlan& plan_;
  const Elements elements_;
  LinkEnds ends_;
  bool checked_ = false, signed_ = false;
};

}  // namespace ringcomm::cuda
