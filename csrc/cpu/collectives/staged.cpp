#include "cpu/collectives/staged.h"

#include <cstring>

#include "core/call/parts.h"
#include "core/call/signature.h"
#include "core/schedule.h"
#include "cpu/collectives/tuning.h"
#include "cpu/kernels/loops.h"

namespace ringcomm::cpu {

namespace {

// The number of elements of one of `slices` equal slices of a slot.
std::size_t slice_capacity(const SlotStream& slots, std::size_t slot_bytes, int slices) {
  return slot_bytes / slices / kAlignBytes * kAlignBytes / slots.element();
}
std::size_t align_of(const SlotStream& slots) { return kAlignBytes / slots.element(); }

bool streams_output(std::size_t message_bytes) { return message_bytes >= tuning::kStreamOutputBytes; }

// Calls publish(i) for all i < tickets, and consume(i) at most kLag tickets later. Either may do nothing.
template <typename Publish, typename Consume>
std::uint64_t run_tickets(std::uint64_t tickets, const Publish& publish, const Consume& consume) {
  const std::uint64_t lag = smaller(tickets, kLag);
  for (std::uint64_t i = 0; i < tickets + lag; ++i) {
    if (i < tickets) publish(i);
    if (i >= lag) consume(i - lag);
  }
  return tickets;
}

// Returns the elements of a part that window w of `cut` covers.
Slice clip(const WindowCut& cut, std::uint64_t w, std::size_t part_count) {
  const Slice s = cut.slice(0, w);
  return {s.offset, s.offset < part_count ? smaller(s.count, part_count - s.offset) : 0};
}

// Copies this rank's own part of ticket i, which needs no slot.
void keep(const SlotStream& slots, void* output, const void* input, std::uint64_t i, std::size_t nbytes,
          bool streaming) {
  const auto probe = slots.probe(trace::SpanKind::kCopy, slots.rank(), i, nbytes);
  kernels().copy(output, input, nbytes, streaming);
}

// Reduces `count` elements of all ranks' sources into each output.
void reduce_ranks(const SlotStream& slots, const void* const* sources, void* const* outputs, int num_outputs,
                  std::size_t count, bool streaming) {
  const Call& call = slots.call();
  const int ranks = slots.world_size();
  kernels().reduce(
      {call.dtype, call.reduce_op, sources, ranks, slots.factors(), ranks, outputs, num_outputs, count, streaming});
}

}  // namespace

std::uint64_t staged_oneshot_all_reduce(SlotStream& slots, std::uint64_t first) {
  const Call& call = slots.call();
  const int rank = slots.rank(), world_size = slots.world_size();
  const std::size_t element = slots.element();
  const auto* input = static_cast<const char*>(call.input);
  auto* output = static_cast<char*>(call.output);
  const WindowCut cut =
      cut_windows(call.count, 1, slice_capacity(slots, slots.group().slot_bytes(), 1), align_of(slots));
  const bool streaming = call.input != call.output && streams_output(call.count * element);
  const void* sources[kMaxWorldSize];
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        const Slice s = cut.slice(0, w);
        slots.write(first + w, slots.open(first + w, s.count * element), input + s.offset * element, s.count * element);
        slots.publish(first + w);
      },
      [&](std::uint64_t w) {
        const Slice s = cut.slice(0, w);
        slots.await_all(first + w);
        for (int p = 0; p < world_size; ++p)
          sources[p] = p == rank ? input + s.offset * element : slots.slot_of(p, first + w);
        void* const result = output + s.offset * element;
        slots.metered(0, world_size, first + w, s.count * element,
                      [&] { reduce_ranks(slots, sources, &result, 1, s.count, streaming); });
        slots.release(first + w);
      });
}

// A slot holds world_size contributions (one per shard of window i) and one result (this rank's shard of window i -
// lag). Iteration i publishes ticket i and consumes ticket i - lag: the contributions of ticket i - lag are reduced to
// a result, which is sent with ticket i; its results, which belong to window i - 2 lag, are copied to the output.
std::uint64_t staged_two_phase_reduce(SlotStream& slots, std::uint64_t first) {
  const Call& call = slots.call();
  const int rank = slots.rank(), world_size = slots.world_size();
  const std::size_t element = slots.element();
  const auto* input = static_cast<const char*>(call.input);
  auto* output = static_cast<char*>(call.output);
  const bool everyone = call.op == Op::kAllReduce, gathers = everyone || rank == call.root;
  const WindowCut cut = cut_windows(call.count, world_size,
                                    slice_capacity(slots, slots.group().slot_bytes(), world_size + 1), align_of(slots));
  const std::uint64_t windows = larger(1, cut.windows()), lag = smaller(windows, kLag), tickets = windows + lag;
  const std::size_t slice_bytes = cut.slice_elements * element, result_offset = world_size * slice_bytes;
  const bool streaming = call.input != call.output && streams_output(call.count * element);
  const void* sources[kMaxWorldSize];

  const auto contribute = [&](std::uint64_t w, char* slot) {
    for (int p = 0; p < world_size; ++p) {
      const Slice s = cut.slice(p, w);
      if (p != rank) slots.write(first + w, slot + p * slice_bytes, input + s.offset * element, s.count * element);
    }
  };
  const auto reduce = [&](std::uint64_t w, char* slot) {
    const Slice s = cut.slice(rank, w);
    for (int p = 0; p < world_size; ++p)
      sources[p] = p == rank ? input + s.offset * element : slots.slot_of(p, first + w) + rank * slice_bytes;
    void* const outputs[] = {slot + result_offset, gathers ? output + s.offset * element : nullptr};
    const bool streams = streaming || slots.streams(slice_bytes);
    slots.metered(0, world_size, first + w, s.count * element,
                  [&] { reduce_ranks(slots, sources, outputs, gathers ? 2 : 1, s.count, streams); });
  };
  const auto copy_out = [&](std::uint64_t w, std::uint64_t ticket) {
    for (int p = 0; p < world_size; ++p) {
      const Slice s = cut.slice(p, w);
      if (p == rank || !gathers) continue;
      const auto probe = slots.probe(trace::SpanKind::kRead, p, ticket, s.count * element);
      kernels().copy(output + s.offset * element, slots.slot_of(p, ticket) + result_offset, s.count * element,
                     streaming);
    }
  };

  for (std::uint64_t i = 0; i < tickets + lag; ++i) {
    const std::uint64_t behind = i - lag;  // valid from i = lag on
    if (i < tickets) {
      char* slot = slots.open(first + i, (world_size + 1) * slice_bytes);
      if (i < windows) contribute(i, slot);
    }
    if (i >= lag) slots.await_all(first + behind);
    if (i >= lag && behind < windows) reduce(behind, slots.slot(first + i));
    if (i < tickets) slots.publish(first + i);
    if (behind >= lag && i >= lag) copy_out(behind - lag, first + behind);
    if (i >= lag) slots.release(first + behind);
  }
  return tickets;
}

std::uint64_t staged_reduce_scatter(SlotStream& slots, std::uint64_t first) {
  const Call& call = slots.call();
  const int rank = slots.rank(), world_size = slots.world_size();
  const std::size_t element = slots.element();
  const Parts input = input_parts(call);
  auto* output = static_cast<char*>(call.output);
  const WindowCut cut = cut_windows(input.longest(world_size), 1,
                                    slice_capacity(slots, slots.group().slot_bytes(), world_size), align_of(slots));
  const std::size_t slice_bytes = cut.slice_elements * element;
  const bool streaming = streams_output(input.total(world_size) * element);
  const void* sources[kMaxWorldSize];
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        char* slot = slots.open(first + w, world_size * slice_bytes);
        for (int p = 0; p < world_size; ++p) {
          const Slice s = clip(cut, w, input.count(p));
          if (p != rank)
            slots.write(first + w, slot + p * slice_bytes, input.data(p) + s.offset * element, s.count * element);
        }
        slots.publish(first + w);
      },
      [&](std::uint64_t w) {
        const Slice s = clip(cut, w, input.count(rank));
        slots.await_all(first + w);
        for (int p = 0; p < world_size; ++p)
          sources[p] =
              p == rank ? input.data(p) + s.offset * element : slots.slot_of(p, first + w) + rank * slice_bytes;
        void* const result = output + s.offset * element;
        slots.metered(0, world_size, first + w, s.count * element,
                      [&] { reduce_ranks(slots, sources, &result, 1, s.count, streaming); });
        slots.release(first + w);
      });
}

std::uint64_t staged_gather(SlotStream& slots, std::uint64_t first) {
  const Call& call = slots.call();
  const int rank = slots.rank(), world_size = slots.world_size();
  const std::size_t element = slots.element();
  const auto* input = static_cast<const char*>(call.input);
  const Parts output = output_parts(call);
  const bool takes = call.op == Op::kAllGather || rank == call.root;
  const std::size_t longest = call.op == Op::kAllGather ? output.longest(world_size) : call.count;
  const WindowCut cut = cut_windows(longest, 1, slice_capacity(slots, slots.group().slot_bytes(), 1), align_of(slots));
  const bool streaming = streams_output(longest * world_size * element);
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        const Slice s = clip(cut, w, call.count);
        const char* from = input + s.offset * element;
        slots.write(first + w, slots.open(first + w, s.count * element), from, s.count * element);
        slots.publish(first + w);
        if (takes) keep(slots, output.data(rank) + s.offset * element, from, first + w, s.count * element, streaming);
      },
      [&](std::uint64_t w) {
        for (int p = 0; takes && p < world_size; ++p) {
          if (p == rank) continue;
          const Slice s = clip(cut, w, output.count(p));
          slots.await(p, first + w);
          slots.metered(p, p + 1, first + w, s.count * element, [&] {
            kernels().copy(output.data(p) + s.offset * element, slots.slot_of(p, first + w), s.count * element,
                           streaming);
          });
        }
        slots.release(first + w);
      });
}

std::uint64_t staged_broadcast(SlotStream& slots, std::uint64_t first) {
  const Call& call = slots.call();
  const int rank = slots.rank();
  const std::size_t element = slots.element();
  const bool is_root = rank == call.root;
  const auto* input = static_cast<const char*>(call.input);
  auto* output = static_cast<char*>(call.output);
  const WindowCut cut = cut_windows(
      call.count, 1, slice_capacity(slots, tuning::one_way_slice(call.count * element, slots.group().slot_bytes()), 1),
      align_of(slots));
  const bool streaming = streams_output(call.count * element);
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        if (!is_root) return;
        const Slice s = cut.slice(0, w);
        slots.write(first + w, slots.open(first + w, s.count * element), input + s.offset * element, s.count * element);
        slots.publish(first + w);
        keep(slots, output + s.offset * element, input + s.offset * element, first + w, s.count * element, streaming);
      },
      [&](std::uint64_t w) {
        const Slice s = cut.slice(0, w);
        if (!is_root) {
          slots.await(call.root, first + w);
          slots.metered(call.root, call.root + 1, first + w, s.count * element, [&] {
            kernels().copy(output + s.offset * element, slots.slot_of(call.root, first + w), s.count * element,
                           streaming);
          });
        }
        slots.release(first + w);
      });
}

std::uint64_t staged_scatter(SlotStream& slots, std::uint64_t first) {
  const Call& call = slots.call();
  const int rank = slots.rank(), world_size = slots.world_size();
  const std::size_t element = slots.element();
  const bool is_root = rank == call.root;
  const Parts input = input_parts(call);
  auto* output = static_cast<char*>(call.output);
  const WindowCut cut =
      cut_windows(call.count, 1, slice_capacity(slots, slots.group().slot_bytes(), world_size), align_of(slots));
  const std::size_t slice_bytes = cut.slice_elements * element;
  const bool streaming = streams_output(call.count * element);
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        if (!is_root) return;
        const Slice s = cut.slice(0, w);
        char* slot = slots.open(first + w, world_size * slice_bytes);
        for (int p = 0; p < world_size; ++p)
          if (p != rank)
            slots.write(first + w, slot + p * slice_bytes, input.data(p) + s.offset * element, s.count * element);
        slots.publish(first + w);
        keep(slots, output + s.offset * element, input.data(rank) + s.offset * element, first + w, s.count * element,
             streaming);
      },
      [&](std::uint64_t w) {
        const Slice s = cut.slice(0, w);
        if (!is_root) {
          slots.await(call.root, first + w);
          slots.metered(call.root, call.root + 1, first + w, s.count * element, [&] {
            kernels().copy(output + s.offset * element, slots.slot_of(call.root, first + w) + rank * slice_bytes,
                           s.count * element, streaming);
          });
        }
        slots.release(first + w);
      });
}

namespace {

// No single rank knows uneven counts, so every rank publishes what it sends to each rank. Returns the longest part of
// any pair, after checking the peers' counts against those that this rank expects.
std::size_t agree_on_counts(SlotStream& slots, std::uint64_t ticket, const Parts& input, const Parts& output) {
  const int rank = slots.rank(), world_size = slots.world_size();
  std::vector<std::uint64_t> counts(world_size);
  std::size_t longest = 0;
  for (int p = 0; p < world_size; ++p) counts[p] = input.count(p), longest = larger(longest, counts[p]);
  std::memcpy(slots.open(ticket, counts.size() * sizeof counts[0]), counts.data(), counts.size() * sizeof counts[0]);
  slots.publish(ticket);
  slots.await_all(ticket);
  for (int p = 0; p < world_size; ++p) {
    if (p != rank)
      std::memcpy(counts.data(), slots.slot_of(p, ticket), counts.size() * sizeof counts[0]);
    else
      for (int q = 0; q < world_size; ++q) counts[q] = input.count(q);
    for (int q = 0; q < world_size; ++q) longest = larger(longest, counts[q]);
    if (counts[rank] != output.count(p))
      slots.group().fail_group(slots.call(), ErrorCode::kMismatch,
                               other_counts(slots.call().root, rank, output.count(p), p, counts[rank], "elements"));
  }
  slots.release(ticket);
  return longest;
}

}  // namespace

std::uint64_t staged_all_to_all(SlotStream& slots, std::uint64_t first) {
  const Call& call = slots.call();
  const int rank = slots.rank(), world_size = slots.world_size();
  const std::size_t element = slots.element();
  const Parts input = input_parts(call), output = output_parts(call);
  const bool even = !uneven_all_to_all(call);
  const std::size_t longest = even ? call.count : agree_on_counts(slots, first, input, output);
  const std::uint64_t begin = first + (even ? 0 : 1);
  const WindowCut cut =
      cut_windows(longest, 1, slice_capacity(slots, slots.group().slot_bytes(), world_size), align_of(slots));
  const std::size_t slice_bytes = cut.slice_elements * element;
  const bool streaming = streams_output(longest * world_size * element);
  const std::uint64_t tickets = run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        char* slot = slots.open(begin + w, world_size * slice_bytes);
        for (int p = 0; p < world_size; ++p) {
          const Slice s = clip(cut, w, input.count(p));
          if (p != rank)
            slots.write(begin + w, slot + p * slice_bytes, input.data(p) + s.offset * element, s.count * element);
        }
        slots.publish(begin + w);
        const Slice own = clip(cut, w, input.count(rank));
        keep(slots, output.data(rank) + own.offset * element, input.data(rank) + own.offset * element, begin + w,
             own.count * element, streaming);
      },
      [&](std::uint64_t w) {
        for (int p = 0; p < world_size; ++p) {
          if (p == rank) continue;
          const Slice s = clip(cut, w, output.count(p));
          slots.await(p, begin + w);
          slots.metered(p, p + 1, begin + w, s.count * element, [&] {
            kernels().copy(output.data(p) + s.offset * element, slots.slot_of(p, begin + w) + rank * slice_bytes,
                           s.count * element, streaming);
          });
        }
        slots.release(begin + w);
      });
  return begin - first + tickets;
}

std::uint64_t staged_barrier(SlotStream& slots, std::uint64_t first) {
  slots.wait_credit(first);
  slots.publish(first);
  slots.await_all(first);
  return 1;
}

}  // namespace ringcomm::cpu
