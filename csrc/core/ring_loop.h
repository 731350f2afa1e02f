// The ring collectives, for every engine. An executor moves the bytes of one rank (a CPU thread, a CUDA block);
// ring_walk tells it what to move when. It returns false as soon as a wait of the executor gives up.
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

struct Outgoing {
  bool any;
  std::uint64_t ticket;
};

RINGCOMM_HD constexpr std::uint64_t ring_tickets(Walk walk, int world_size, std::size_t windows) {
  return windows * static_cast<std::uint64_t>(last_step(walk, world_size) - first_step(walk, world_size));
}

// The step of the walk that ticket t belongs to.
RINGCOMM_HD constexpr int ring_step_of(Walk walk, int world_size, std::uint64_t ticket) {
  return first_step(walk, world_size) + static_cast<int>(ticket % ring_tickets(walk, world_size, 1));
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
RINGCOMM_HD bool ring_hop(std::uint64_t in, int chunk, std::size_t window, bool reduce, bool final, Outgoing out,
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

// W >= 2; `root` is that of a line. One loop for all, so that a kernel has the code of a hop once. all_reduce,
// reduce_scatter: chunk c is combined in rank order c+1, c+2, ..., c. reduce: in rank order root+1, root+2, ..., root.
template <typename Executor>
RINGCOMM_HD bool ring_walk(Walk walk, int root, int rank, int world_size, std::size_t windows, Executor& ex) {
  const bool line = is_line(walk), keeps = walk == Walk::kAllGather || walk == Walk::kBroadcast;
  const int position = ring_distance(walk == Walk::kReduce ? ring_next(root, world_size) : root, rank, world_size);
  const int first = first_step(walk, world_size), last = last_step(walk, world_size);
  std::uint64_t ticket = 0;
  for (std::size_t window = 0; window < windows; ++window)
    for (int step = first; step < last; ++step, ++ticket) {
      const RingStep s = line ? RingStep{0, 0, walk == Walk::kReduce} : ring_step(rank, world_size, step);
      if (line ? position == 0 : step == first) {
        if (!ring_start(ticket, s.send_chunk, window, ex)) return false;
        if (keeps) ex.keep(s.send_chunk, window);
        if (line) {
          ex.release(ticket);  // no ticket arrives here, but the others' credit counts this rank too
          continue;
        }
      }
      const bool ends = line ? position + 1 == world_size : step + 1 == last;
      const bool final = line ? ends : step + 2 == world_size;
      if (!ring_hop(ticket, s.recv_chunk, window, s.reduce, final, {!ends, line ? ticket : ticket + 1}, ex))
        return false;
    }
  return true;
}

}  // namespace ringcomm
