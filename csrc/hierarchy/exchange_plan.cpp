#include "hierarchy/exchange_plan.h"

#include <algorithm>

#include "core/call/parts.h"
#include "runtime/observe/trace.h"

namespace ringcomm::hierarchy {

namespace {

// `joined`: merges neighbouring memory into one message. Both ends must merge the same messages, which memory addresses
// tell only where both have the same memory layout.
void add(std::vector<Message>& messages, int peer, void* data, std::size_t nbytes, bool joined = false) {
  if (nbytes == 0) return;
  if (joined && !messages.empty()) {
    Message& last = messages.back();
    if (last.peer == peer && static_cast<char*>(last.data) + last.nbytes == data) {
      last.nbytes += nbytes;
      return;
    }
  }
  messages.push_back({peer, data, nbytes});
}

}  // namespace

Chunks Chunks::whole(void* data, std::size_t count, int hosts, std::size_t slice_elements, std::size_t element) {
  Chunks chunks;
  chunks.parts_ = {{data, count}};
  chunks.cut_ = {count, hosts, slice_elements};
  chunks.element_ = element;
  return chunks;
}

Chunks Chunks::pieces(std::vector<Part> parts, std::size_t slice_elements, std::size_t element) {
  Chunks chunks;
  std::size_t longest = 0;
  for (const Part& part : parts) longest = larger(longest, part.count);
  chunks.parts_ = std::move(parts);
  chunks.cut_ = {longest, 1, slice_elements};
  chunks.element_ = element;
  return chunks;
}

Part Chunks::at(int chunk, std::size_t window) const {
  const bool whole = cut_.chunks > 1;
  const Part& part = whole ? parts_[0] : parts_[chunk];
  const Slice slice = cut_.slice(whole ? chunk : 0, window);
  const std::size_t count = slice.offset < part.count ? smaller(slice.count, part.count - slice.offset) : 0;
  return {static_cast<char*>(part.data) + slice.offset * element_, count};
}

namespace {

// Builds the plan of one window: every round's messages and the local steps before and after them.
class Builder {
 public:
  Builder(const Topology& topology, const Rail& rail, std::size_t window, char* scratch, std::uintptr_t stream)
      : topology_(topology),
        rail_(rail),
        window_(window),
        scratch_(scratch),
        stream_(stream),
        hosts_(topology.num_hosts()),
        me_(topology.host()),
        half_(reducing_rounds(rail.schedule, hosts_)),
        sum_wire_(rail.types.of(rail.types.sum)),
        result_wire_(rail.types.of(rail.types.result)) {}

  ExchangePlan build() {
    if (rail_.gathers && packs_results())
      for (int c = 0; c < hosts_; ++c) packed_.push_back(take(result(c).count, result_wire_));
    ExchangePlan plan;
    if (rail_.reduces) {
      for (int round = 0; round < half_; ++round) plan.push_back(reducing(round));
      finish(plan.back().after);
    }
    if (rail_.gathers)
      for (int round = half_; round < 2 * half_; ++round) plan.push_back(gathering(round));
    return plan;
  }

 private:
  Part sum(int chunk) const { return rail_.sums.at(chunk, window_); }
  Part result(int chunk) const { return rail_.results.at(chunk, window_); }
  int owned() const { return owned_chunk(rail_.schedule, hosts_, me_); }
  bool packs_sums() const { return sum_wire_ != rail_.types.sum; }
  bool packs_results() const { return result_wire_ != rail_.types.result; }
  bool joins_sums() const { return rail_.sums.in_one_piece() && !packs_sums(); }
  bool joins_results() const { return rail_.results.in_one_piece() && !packs_results(); }

  char* take(std::size_t count, DType type) {
    char* const memory = scratch_;
    scratch_ += aligned(count * element_bytes(type));
    return memory;
  }

  void convert(LocalSteps& steps, DType from, DType to, const void* source, void* target, std::size_t count) const {
    steps.push_back(PackCall{from, to, 1.0, {{source, target, count}}, stream_});
  }

  void combine(LocalSteps& steps, const void* first, const void* second, const Part& output, bool last) const {
    steps.push_back(CombineCall{rail_.types.sum, last ? rail_.op : combine_of(rail_.op), first, second, output.data,
                                output.count, last ? rail_.divisor : 1, stream_});
  }

  void send_sums(ExchangeRound& r, const Hop& hop) {
    for (int c = hop.first; c < hop.last; ++c) {
      const Part part = sum(c);
      void* data = part.data;
      if (packs_sums() && part.count) {
        data = take(part.count, sum_wire_);
        convert(r.before, rail_.types.sum, sum_wire_, part.data, data, part.count);
      }
      add(r.messages.sends, rail_.ranks[hop.peer], data, part.count * element_bytes(sum_wire_), joins_sums());
    }
  }

  // Returns where a peer's part of a chunk will be after the round, in the type of the sums.
  char* receive_sum(ExchangeRound& r, int peer, std::size_t count) {
    char* const arrived = take(count, sum_wire_);
    add(r.messages.recvs, rail_.ranks[peer], arrived, count * element_bytes(sum_wire_), joins_sums());
    if (!packs_sums()) return arrived;
    char* const widened = take(count, rail_.types.sum);
    convert(r.after, sum_wire_, rail_.types.sum, arrived, widened, count);
    return widened;
  }

  ExchangeRound reducing(int round) {
    ExchangeRound r;
    std::vector<char*> parts(hosts_, nullptr);  // direct: every host's part of the chunk that this host owns
    for (int i = 0; i < num_hops(rail_.schedule, hosts_); ++i) {
      send_sums(r, sent(rail_.schedule, hosts_, me_, round, i));
      const Hop hop = received(rail_.schedule, hosts_, me_, round, i);
      for (int c = hop.first; c < hop.last; ++c) {
        const Part mine = sum(c);
        if (mine.count == 0) continue;
        char* const theirs = receive_sum(r, hop.peer, mine.count);
        if (rail_.schedule == InterHostSchedule::kDirect)
          parts[hop.peer] = theirs;
        else if (received_first(rail_.schedule, me_, hop.peer))
          combine(r.after, theirs, mine.data, mine, round + 1 == half_);
        else
          combine(r.after, mine.data, theirs, mine, round + 1 == half_);
      }
    }
    if (rail_.schedule == InterHostSchedule::kDirect) merge(r.after, parts);
    return r;
  }

  // Adds the parts of the owned chunk in the order of the tree; the last sum overwrites this host's part.
  void merge(LocalSteps& steps, std::vector<char*>& parts) {
    const Part mine = sum(owned());
    if (mine.count == 0) return;
    parts[me_] = static_cast<char*>(mine.data);
    const std::vector<Merge>& tree = topology_.tree();
    for (const Merge& each : tree) {
      const bool last = &each == &tree.back();
      char* const output = last ? static_cast<char*>(mine.data) : parts[each.into];
      combine(steps, parts[each.into], parts[each.from], {output, mine.count}, last);
      parts[each.into] = output;
    }
  }

  // The owned chunk is complete: converts it to the result. Where results are gathered in a smaller type, rounds it to
  // that type.
  void finish(LocalSteps& steps) {
    const Part from = sum(owned()), to = result(owned());
    if (from.count == 0) return;
    if (rail_.gathers && packs_results()) {
      char* const packed = packed_[owned()];
      convert(steps, rail_.types.sum, result_wire_, from.data, packed, from.count);
      convert(steps, result_wire_, rail_.types.result, packed, to.data, to.count);
    } else if (from.data != to.data) {
      convert(steps, rail_.types.sum, rail_.types.result, from.data, to.data, from.count);
    }
  }

  ExchangeRound gathering(int round) {
    ExchangeRound r;
    const std::size_t element = element_bytes(result_wire_);
    const auto place = [&](int chunk) { return packs_results() ? packed_[chunk] : result(chunk).data; };
    for (int i = 0; i < num_hops(rail_.schedule, hosts_); ++i) {
      const Hop out = sent(rail_.schedule, hosts_, me_, round, i);
      for (int c = out.first; c < out.last; ++c)
        add(r.messages.sends, rail_.ranks[out.peer], place(c), result(c).count * element, joins_results());
      const Hop in = received(rail_.schedule, hosts_, me_, round, i);
      for (int c = in.first; c < in.last; ++c) {
        const Part part = result(c);
        add(r.messages.recvs, rail_.ranks[in.peer], place(c), part.count * element, joins_results());
        if (packs_results() && part.count)
          convert(r.after, result_wire_, rail_.types.result, packed_[c], part.data, part.count);
      }
    }
    return r;
  }

  const Topology& topology_;
  const Rail& rail_;
  const std::size_t window_;
  char* scratch_;
  const std::uintptr_t stream_;
  const int hosts_, me_, half_;
  const DType sum_wire_, result_wire_;
  std::vector<char*> packed_;  // results in their type on the wire, by chunk
};

}  // namespace

std::size_t scratch_bytes(const Rail& rail) {
  const std::size_t hosts = rail.ranks.size();
  const auto chunk = [&](const Chunks& chunks, DType type) {
    return aligned(chunks.slice_elements() * element_bytes(type));
  };
  const DType sum_wire = rail.types.of(rail.types.sum), result_wire = rail.types.of(rail.types.result);
  std::size_t nbytes = 0;
  if (rail.reduces) {
    nbytes += (hosts - 1) * chunk(rail.sums, sum_wire);
    if (sum_wire != rail.types.sum)
      nbytes += (hosts - 1) * (chunk(rail.sums, sum_wire) + chunk(rail.sums, rail.types.sum));
  }
  if (rail.gathers && result_wire != rail.types.result) nbytes += hosts * chunk(rail.results, result_wire);
  return nbytes;
}

ExchangePlan build_plan(const Topology& topology, const Rail& rail, std::size_t window, char* scratch,
                        std::uintptr_t stream) {
  return Builder(topology, rail, window, scratch, stream).build();
}

ExchangePlan build_chain(const Topology& topology, const std::vector<int>& rail_ranks, int root_host, void* data,
                         std::size_t nbytes) {
  const int hosts = topology.num_hosts(), me = topology.host();
  const int position = chain_position(hosts, me, root_host);
  ExchangePlan plan(2);  // a round to receive, and a round to send
  if (position > 0) add(plan[0].messages.recvs, rail_ranks[ring_prev(me, hosts)], data, nbytes);
  if (position + 1 < hosts) add(plan[1].messages.sends, rail_ranks[ring_next(me, hosts)], data, nbytes);
  return plan;
}

namespace {

void compute(Engine& local, const LocalSteps& steps) {
  for (const auto& step : steps) {
    if (const auto* packing = std::get_if<PackCall>(&step))
      local.pack(*packing);
    else
      local.combine(std::get<CombineCall>(step));
  }
}

// A plan in flight.
class PlanInFlight {
 public:
  PlanInFlight(Engine& local, ExchangePlan plan, std::unique_ptr<TransportExchange> transport, int rail,
               std::size_t window)
      : local_(local),
        plan_(std::move(plan)),
        transport_(std::move(transport)),
        rail_(rail),
        window_(static_cast<std::int64_t>(window)) {}

  void start(int round) {
    traced(trace::SpanKind::kCompute, round, [&] { compute(local_, plan_[round].before); });
    traced(trace::SpanKind::kStartMessages, round, [&] { transport_->start(round); });
  }
  void finish(int round) {
    traced(trace::SpanKind::kWaitMessages, round, [&] { transport_->finish(round); });
    traced(trace::SpanKind::kCompute, round, [&] { compute(local_, plan_[round].after); });
  }

 private:
  template <typename Do>
  void traced(trace::SpanKind kind, int round, const Do& act) const {
    trace::Probe probe(kind, -1, window_);
    probe.at_round(round, rail_);
    act();
  }

  Engine& local_;
  const ExchangePlan plan_;
  const std::unique_ptr<TransportExchange> transport_;
  const int rail_;
  const std::int64_t window_;
};

}  // namespace

void run_plans(Engine& local, Transport& transport, const std::vector<RailPlans>& lists, char* scratch,
               TransportClock::time_point limit, std::uintptr_t stream) {
  std::size_t windows = 0;
  int rounds = 0;
  std::vector<std::vector<std::unique_ptr<PlanInFlight>>> in_flight(lists.size());
  std::vector<char*> memory;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    windows = larger(windows, lists[i].windows);
    rounds = std::max(rounds, lists[i].rounds);
    in_flight[i].resize(kSlots);
    memory.push_back(scratch);
    scratch += kSlots * lists[i].scratch_bytes;
  }
  interleave(windows, rounds, kSlots, [&](std::size_t window, int round) {
    const std::size_t slot = window % kSlots;
    for (std::size_t i = 0; i < lists.size(); ++i) {
      if (window >= lists[i].windows) continue;
      std::unique_ptr<PlanInFlight>& plan = in_flight[i][slot];
      if (round == 0) {
        if (plan) plan->finish(rounds - 1);
        ExchangePlan built = lists[i].build(window, memory[i] + slot * lists[i].scratch_bytes);
        std::vector<Round> messages;
        for (const ExchangeRound& each : built) messages.push_back(each.messages);
        const int place = lists[i].rail * kSlots + static_cast<int>(slot);
        plan = std::make_unique<PlanInFlight>(
            local, std::move(built), transport.open(place, std::move(messages), limit, stream), lists[i].rail, window);
      } else {
        plan->finish(round - 1);
      }
      plan->start(round);
    }
  });
  for (std::size_t slot = 0; slot < kSlots; ++slot)
    for (auto& of_list : in_flight)
      if (of_list[slot]) of_list[slot]->finish(rounds - 1);
}

}  // namespace ringcomm::hierarchy
