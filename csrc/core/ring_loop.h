// The ring collectives, for every engine. An executor moves the bytes of one rank (a CPU thread, a CUDA block); these
// loops tell it what to move when. They return false as soon as a wait of the executor gives up.
//
//   bool wait_credit(t)   the slot of ticket t to the next rank is free     void publish(t)   the slot is filled
//   bool wait_slice(t)    the slice of ticket t from prev has arrived       void release(t)   the slice has been read
//   void copy_out(t, chunk, window)              slot(t) <- input
//   void keep(chunk, window)                     output <- input (nothing where they are the same memory)
//   void copy_in(t, chunk, window, out)          output <- prev's slot(t); also the outgoing slot, if there is one
//   void combine(t, chunk, window, final, out)   prev's slot(t) (+) input -> output if final; also the outgoing slot
//
// The data received in one step is sent in the next, so it is written straight into the next slot: one pass over memory
// per step, and the input is never written.
#pragma once

#include "core/schedule.h"

namespace ringcomm {

struct NextSend {
  bool any;
  std::uint64_t ticket;
};

RINGCOMM_HD constexpr std::uint64_t ring_tickets(Op op, int world_size, std::size_t windows) {
  return windows * static_cast<std::uint64_t>(last_step(op, world_size) - first_step(op, world_size));
}

// The step that ticket t belongs to.
RINGCOMM_HD constexpr int ring_step_of(Op op, int world_size, std::uint64_t ticket) {
  return first_step(op, world_size) + static_cast<int>(ticket % ring_tickets(op, world_size, 1));
}

template <typename Executor>
RINGCOMM_HD bool ring_start(std::uint64_t ticket, int chunk, std::size_t window, Executor& ex) {
  if (!ex.wait_credit(ticket)) return false;
  ex.copy_out(ticket, chunk, window);
  ex.publish(ticket);
  return true;
}

// One hop: takes ticket `in` from prev, combines or copies it, and passes it on.
template <typename Executor>
RINGCOMM_HD bool ring_hop(std::uint64_t in, int chunk, std::size_t window, bool reduce, bool final, NextSend out,
                          Executor& ex) {
  if (!ex.wait_slice(in)) return false;
  if (out.any && !ex.wait_credit(out.ticket)) return false;
  if (reduce)
    ex.combine(in, chunk, window, final, out);
  else
    ex.copy_in(in, chunk, window, out);
  if (out.any) ex.publish(out.ticket);
  ex.release(in);
  return true;
}

// all_reduce, reduce_scatter or all_gather; W >= 2. Chunk c is combined in rank order c+1, c+2, ..., c.
template <typename Executor>
RINGCOMM_HD bool ring_loop(Op op, int rank, int world_size, std::size_t windows, Executor& ex) {
  const int first = first_step(op, world_size), last = last_step(op, world_size);
  std::uint64_t ticket = 0;
  for (std::size_t window = 0; window < windows; ++window)
    for (int step = first; step < last; ++step, ++ticket) {
      const RingStep s = ring_step(rank, world_size, step);
      if (step == first) {
        if (!ring_start(ticket, s.send_chunk, window, ex)) return false;
        if (op == Op::kAllGather) ex.keep(s.send_chunk, window);
      }
      const NextSend out{step + 1 < last, ticket + 1};
      if (!ring_hop(ticket, s.recv_chunk, window, s.reduce, step + 2 == world_size, out, ex)) return false;
    }
  return true;
}

// The message is not divided (chunk 0) and travels once, from the root to the rank before it. One ticket per window.
template <typename Executor>
RINGCOMM_HD bool ring_broadcast(int root, int rank, int world_size, std::size_t windows, Executor& ex) {
  const int position = ring_distance(root, rank, world_size);
  for (std::size_t window = 0; window < windows; ++window) {
    if (position == 0) {
      if (!ring_start(window, 0, window, ex)) return false;
      ex.keep(0, window);
      ex.release(window);  // no ticket arrives here, but the writers' credit also waits for this rank
    } else if (!ring_hop(window, 0, window, false, true, {position + 1 < world_size, window}, ex)) {
      return false;
    }
  }
  return true;
}

// The message is not divided (chunk 0) and travels once, from the rank after the root to the root, combined on the way
// in rank order root+1, root+2, ..., root. One ticket per window.
template <typename Executor>
RINGCOMM_HD bool ring_reduce(int root, int rank, int world_size, std::size_t windows, Executor& ex) {
  const int position = ring_distance(ring_next(root, world_size), rank, world_size);
  const bool at_root = position + 1 == world_size;
  for (std::size_t window = 0; window < windows; ++window) {
    const bool ok = position == 0 ? ring_start(window, 0, window, ex)
                                  : ring_hop(window, 0, window, true, at_root, {!at_root, window}, ex);
    if (!ok) return false;
    if (position == 0) ex.release(window);
  }
  return true;
}

}  // namespace ringcomm
