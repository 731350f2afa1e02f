#include "cpu/collectives/staged.h"

#include <cstring>

#include "core/call/parts.h"
#include "core/call/signature.h"
#include "core/schedule.h"
#include "cpu/collectives/tuning.h"
#include "cpu/kernels/loops.h"

namespace ringcomm::cpu {

namespace {

constexpr std::size_t kAlignBytes = 64;

// The facts of one staged call, in bytes and elements.
struct Frame {
  explicit Frame(SlotStream& slots)
      : call(slots.call()),
        rank(slots.group().rank()),
        world_size(slots.group().world_size()),
        element(element_bytes(call.dtype)),
        align(kAlignBytes / element) {}

  // The number of elements of one of `slices` equal slices of a slot.
  std::size_t slice_capacity(std::size_t slot_bytes, int slices) const {
    return slot_bytes / slices / kAlignBytes * kAlignBytes / element;
  }

  const Call& call;
  const int rank, world_size;
  const std::size_t element, align;
};

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
  const auto probe = slots.probe(trace::SpanKind::kCopy, slots.group().rank(), i, nbytes);
  kernels().copy(output, input, nbytes, streaming);
}

struct Reducer {
  Reducer(SlotStream& slots, const Frame& frame)
      : args{frame.call.dtype,
             frame.call.reduce_op,
             sources,
             frame.world_size,
             slots.factors(),
             frame.world_size,
             outputs,
             1,
             0,
             false} {}

  void run(std::size_t count, int num_outputs, bool streaming) {
    args.count = count;
    args.num_outputs = num_outputs;
    args.streaming = streaming;
    kernels().reduce(args);
  }

  const void* sources[kMaxWorldSize];
  void* outputs[2];
  ReduceArgs args;
};

}  // namespace

std::uint64_t staged_oneshot_all_reduce(SlotStream& slots, std::uint64_t first) {
  const Frame f(slots);
  const auto* input = static_cast<const char*>(f.call.input);
  auto* output = static_cast<char*>(f.call.output);
  const WindowCut cut = cut_windows(f.call.count, 1, f.slice_capacity(slots.group().slot_bytes(), 1), f.align);
  const bool streaming = f.call.input != f.call.output && streams_output(f.call.count * f.element);
  Reducer reducer(slots, f);
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        const Slice s = cut.slice(0, w);
        slots.write(first + w, slots.open(first + w, s.count * f.element), input + s.offset * f.element,
                    s.count * f.element);
        slots.publish(first + w);
      },
      [&](std::uint64_t w) {
        const Slice s = cut.slice(0, w);
        slots.await_all(first + w);
        for (int p = 0; p < f.world_size; ++p)
          reducer.sources[p] = p == f.rank ? input + s.offset * f.element : slots.slot_of(p, first + w);
        reducer.outputs[0] = output + s.offset * f.element;
        slots.metered(0, f.world_size, first + w, s.count * f.element, [&] { reducer.run(s.count, 1, streaming); });
        slots.release(first + w);
      });
}

// A slot holds world_size contributions (one per shard of window i) and one result (this rank's shard of window i -
// lag). Iteration i publishes ticket i and consumes ticket i - lag: the contributions of ticket i - lag are reduced to
// a result, which is sent with ticket i; its results, which belong to window i - 2 lag, are copied to the output.
std::uint64_t staged_two_phase_reduce(SlotStream& slots, std::uint64_t first) {
  const Frame f(slots);
  const auto* input = static_cast<const char*>(f.call.input);
  auto* output = static_cast<char*>(f.call.output);
  const bool everyone = f.call.op == Op::kAllReduce, gathers = everyone || f.rank == f.call.root;
  const WindowCut cut =
      cut_windows(f.call.count, f.world_size, f.slice_capacity(slots.group().slot_bytes(), f.world_size + 1), f.align);
  const std::uint64_t windows = larger(1, cut.windows()), lag = smaller(windows, kLag), tickets = windows + lag;
  const std::size_t slice_bytes = cut.slice_elements * f.element, result_offset = f.world_size * slice_bytes;
  const bool streaming = f.call.input != f.call.output && streams_output(f.call.count * f.element);
  Reducer reducer(slots, f);

  const auto contribute = [&](std::uint64_t w, char* slot) {
    for (int p = 0; p < f.world_size; ++p) {
      const Slice s = cut.slice(p, w);
      if (p != f.rank)
        slots.write(first + w, slot + p * slice_bytes, input + s.offset * f.element, s.count * f.element);
    }
  };
  const auto reduce = [&](std::uint64_t w, char* slot) {
    const Slice s = cut.slice(f.rank, w);
    for (int p = 0; p < f.world_size; ++p)
      reducer.sources[p] =
          p == f.rank ? input + s.offset * f.element : slots.slot_of(p, first + w) + f.rank * slice_bytes;
    reducer.outputs[0] = slot + result_offset;
    if (gathers) reducer.outputs[1] = output + s.offset * f.element;
    slots.metered(0, f.world_size, first + w, s.count * f.element,
                  [&] { reducer.run(s.count, gathers ? 2 : 1, streaming || slots.streams(slice_bytes)); });
  };
  const auto copy_out = [&](std::uint64_t w, std::uint64_t ticket) {
    for (int p = 0; p < f.world_size; ++p) {
      const Slice s = cut.slice(p, w);
      if (p == f.rank || !gathers) continue;
      const auto probe = slots.probe(trace::SpanKind::kRead, p, ticket, s.count * f.element);
      kernels().copy(output + s.offset * f.element, slots.slot_of(p, ticket) + result_offset, s.count * f.element,
                     streaming);
    }
  };

  for (std::uint64_t i = 0; i < tickets + lag; ++i) {
    const std::uint64_t behind = i - lag;  // valid from i = lag on
    if (i < tickets) {
      char* slot = slots.open(first + i, (f.world_size + 1) * slice_bytes);
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
  const Frame f(slots);
  const Parts input = input_parts(f.call);
  auto* output = static_cast<char*>(f.call.output);
  const WindowCut cut =
      cut_windows(input.longest(f.world_size), 1, f.slice_capacity(slots.group().slot_bytes(), f.world_size), f.align);
  const std::size_t slice_bytes = cut.slice_elements * f.element;
  const bool streaming = streams_output(input.total(f.world_size) * f.element);
  Reducer reducer(slots, f);
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        char* slot = slots.open(first + w, f.world_size * slice_bytes);
        for (int p = 0; p < f.world_size; ++p) {
          const Slice s = clip(cut, w, input.count(p));
          if (p != f.rank)
            slots.write(first + w, slot + p * slice_bytes, input.data(p) + s.offset * f.element, s.count * f.element);
        }
        slots.publish(first + w);
      },
      [&](std::uint64_t w) {
        const Slice s = clip(cut, w, input.count(f.rank));
        slots.await_all(first + w);
        for (int p = 0; p < f.world_size; ++p)
          reducer.sources[p] =
              p == f.rank ? input.data(p) + s.offset * f.element : slots.slot_of(p, first + w) + f.rank * slice_bytes;
        reducer.outputs[0] = output + s.offset * f.element;
        slots.metered(0, f.world_size, first + w, s.count * f.element, [&] { reducer.run(s.count, 1, streaming); });
        slots.release(first + w);
      });
}

std::uint64_t staged_gather(SlotStream& slots, std::uint64_t first) {
  const Frame f(slots);
  const auto* input = static_cast<const char*>(f.call.input);
  const Parts output = output_parts(f.call);
  const bool takes = f.call.op == Op::kAllGather || f.rank == f.call.root;
  const std::size_t longest = f.call.op == Op::kAllGather ? output.longest(f.world_size) : f.call.count;
  const WindowCut cut = cut_windows(longest, 1, f.slice_capacity(slots.group().slot_bytes(), 1), f.align);
  const bool streaming = streams_output(longest * f.world_size * f.element);
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        const Slice s = clip(cut, w, f.call.count);
        const char* from = input + s.offset * f.element;
        slots.write(first + w, slots.open(first + w, s.count * f.element), from, s.count * f.element);
        slots.publish(first + w);
        if (takes)
          keep(slots, output.data(f.rank) + s.offset * f.element, from, first + w, s.count * f.element, streaming);
      },
      [&](std::uint64_t w) {
        for (int p = 0; takes && p < f.world_size; ++p) {
          if (p == f.rank) continue;
          const Slice s = clip(cut, w, output.count(p));
          slots.await(p, first + w);
          slots.metered(p, p + 1, first + w, s.count * f.element, [&] {
            kernels().copy(output.data(p) + s.offset * f.element, slots.slot_of(p, first + w), s.count * f.element,
                           streaming);
          });
        }
        slots.release(first + w);
      });
}

std::uint64_t staged_broadcast(SlotStream& slots, std::uint64_t first) {
  const Frame f(slots);
  const bool is_root = f.rank == f.call.root;
  const auto* input = static_cast<const char*>(f.call.input);
  auto* output = static_cast<char*>(f.call.output);
  const WindowCut cut = cut_windows(
      f.call.count, 1, f.slice_capacity(tuning::one_way_slice(f.call.count * f.element, slots.group().slot_bytes()), 1),
      f.align);
  const bool streaming = streams_output(f.call.count * f.element);
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        if (!is_root) return;
        const Slice s = cut.slice(0, w);
        slots.write(first + w, slots.open(first + w, s.count * f.element), input + s.offset * f.element,
                    s.count * f.element);
        slots.publish(first + w);
        keep(slots, output + s.offset * f.element, input + s.offset * f.element, first + w, s.count * f.element,
             streaming);
      },
      [&](std::uint64_t w) {
        const Slice s = cut.slice(0, w);
        if (!is_root) {
          slots.await(f.call.root, first + w);
          slots.metered(f.call.root, f.call.root + 1, first + w, s.count * f.element, [&] {
            kernels().copy(output + s.offset * f.element, slots.slot_of(f.call.root, first + w), s.count * f.element,
                           streaming);
          });
        }
        slots.release(first + w);
      });
}

std::uint64_t staged_scatter(SlotStream& slots, std::uint64_t first) {
  const Frame f(slots);
  const bool is_root = f.rank == f.call.root;
  const Parts input = input_parts(f.call);
  auto* output = static_cast<char*>(f.call.output);
  const WindowCut cut =
      cut_windows(f.call.count, 1, f.slice_capacity(slots.group().slot_bytes(), f.world_size), f.align);
  const std::size_t slice_bytes = cut.slice_elements * f.element;
  const bool streaming = streams_output(f.call.count * f.element);
  return run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        if (!is_root) return;
        const Slice s = cut.slice(0, w);
        char* slot = slots.open(first + w, f.world_size * slice_bytes);
        for (int p = 0; p < f.world_size; ++p)
          if (p != f.rank)
            slots.write(first + w, slot + p * slice_bytes, input.data(p) + s.offset * f.element, s.count * f.element);
        slots.publish(first + w);
        keep(slots, output + s.offset * f.element, input.data(f.rank) + s.offset * f.element, first + w,
             s.count * f.element, streaming);
      },
      [&](std::uint64_t w) {
        const Slice s = cut.slice(0, w);
        if (!is_root) {
          slots.await(f.call.root, first + w);
          slots.metered(f.call.root, f.call.root + 1, first + w, s.count * f.element, [&] {
            kernels().copy(output + s.offset * f.element, slots.slot_of(f.call.root, first + w) + f.rank * slice_bytes,
                           s.count * f.element, streaming);
          });
        }
        slots.release(first + w);
      });
}

namespace {

// No single rank knows uneven counts, so every rank publishes what it sends to each rank. Returns the longest part of
// any pair, after checking the peers' counts against those that this rank expects.
std::size_t agree_on_counts(SlotStream& slots, std::uint64_t ticket, const Frame& f, const Parts& input,
                            const Parts& output) {
  std::vector<std::uint64_t> counts(f.world_size);
  std::size_t longest = 0;
  for (int p = 0; p < f.world_size; ++p) counts[p] = input.count(p), longest = larger(longest, counts[p]);
  std::memcpy(slots.open(ticket, counts.size() * sizeof counts[0]), counts.data(), counts.size() * sizeof counts[0]);
  slots.publish(ticket);
  slots.await_all(ticket);
  for (int p = 0; p < f.world_size; ++p) {
    if (p != f.rank)
      std::memcpy(counts.data(), slots.slot_of(p, ticket), counts.size() * sizeof counts[0]);
    else
      for (int q = 0; q < f.world_size; ++q) counts[q] = input.count(q);
    for (int q = 0; q < f.world_size; ++q) longest = larger(longest, counts[q]);
    if (counts[f.rank] != output.count(p))
      slots.group().fail_group(f.call, ErrorCode::kMismatch,
                               other_counts(f.call.root, f.rank, output.count(p), p, counts[f.rank], "elements"));
  }
  slots.release(ticket);
  return longest;
}

}  // namespace

std::uint64_t staged_all_to_all(SlotStream& slots, std::uint64_t first) {
  const Frame f(slots);
  const Parts input = input_parts(f.call), output = output_parts(f.call);
  const bool even = !uneven_all_to_all(f.call);
  const std::size_t longest = even ? f.call.count : agree_on_counts(slots, first, f, input, output);
  const std::uint64_t begin = first + (even ? 0 : 1);
  const WindowCut cut = cut_windows(longest, 1, f.slice_capacity(slots.group().slot_bytes(), f.world_size), f.align);
  const std::size_t slice_bytes = cut.slice_elements * f.element;
  const bool streaming = streams_output(longest * f.world_size * f.element);
  const std::uint64_t tickets = run_tickets(
      larger(1, cut.windows()),
      [&](std::uint64_t w) {
        char* slot = slots.open(begin + w, f.world_size * slice_bytes);
        for (int p = 0; p < f.world_size; ++p) {
          const Slice s = clip(cut, w, input.count(p));
          if (p != f.rank)
            slots.write(begin + w, slot + p * slice_bytes, input.data(p) + s.offset * f.element, s.count * f.element);
        }
        slots.publish(begin + w);
        const Slice own = clip(cut, w, input.count(f.rank));
        keep(slots, output.data(f.rank) + own.offset * f.element, input.data(f.rank) + own.offset * f.element,
             begin + w, own.count * f.element, streaming);
      },
      [&](std::uint64_t w) {
        for (int p = 0; p < f.world_size; ++p) {
          if (p == f.rank) continue;
          const Slice s = clip(cut, w, output.count(p));
          slots.await(p, begin + w);
          slots.metered(p, p + 1, begin + w, s.count * f.element, [&] {
            kernels().copy(output.data(p) + s.offset * f.element, slots.slot_of(p, begin + w) + f.rank * slice_bytes,
                           s.count * f.element, streaming);
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
