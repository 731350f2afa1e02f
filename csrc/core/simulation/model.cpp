#include "core/simulation/model.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/simulation/exchange.h"

namespace ringcomm::simulation {

namespace {

constexpr double kMostMessages = 2e10;
constexpr double kMostInRound = 2e8;   // a lower limit for one round, because its messages are stored
constexpr double kFullMessages = 4e6;  // up to this many are simulated one by one, in a tenth of a second
constexpr std::size_t kAlignBytes = 64;

class Simulation {
 public:
  Simulation(const Cluster& cluster, const CollectiveCall& call)
      : cluster_(cluster),
        call_(call),
        hosts_(cluster.hosts),
        rails_(cluster.ranks_per_host),
        folded_(folds()),
        ranks_(folded_ ? rails_ : hosts_ * rails_),
        clock_(ranks_, 0.0),
        posted_(ranks_),
        port_out_(ranks_, 0.0),
        port_in_(ranks_, 0.0),
        inside_bytes_(ranks_, 0),
        messages_(ranks_, 0) {
    const int nics = cluster.shared_nic ? ranks_ / rails_ : ranks_;
    nic_out_.assign(nics, 0.0);
    nic_in_.assign(nics, 0.0);
    between_bytes_.assign(ranks_, 0);
    if (!cluster.start_us.empty()) clock_ = cluster.start_us;
    order_.resize(ranks_);
    std::iota(order_.begin(), order_.end(), 0);
  }

  Prediction run() {
    if (hosts_ > 1 && cluster_.between.agrees) clock_ = agree(cluster_, call_, clock_);
    const std::size_t wave = wave_elements(cluster_, call_);
    for (std::size_t begin = 0; begin == 0 || begin < call_.count; begin += wave) {
      count_ = smaller(wave, call_.count - begin);
      if (call_.flat)
        flat();
      else
        layered();
    }
    return prediction();
  }

 private:
  // ---- folding: one host stands for all -----------------------------------------------------------------------------

  // Where chunks differ in length, folds only if there are too many messages to simulate.
  bool folds() const {
    if (!call_.fold || !cluster_.equal() || call_.collective == Op::kBroadcast) return false;
    const double ranks = 1.0 * hosts_ * rails_;
    const std::size_t wave = wave_elements(cluster_, call_), waves = ceil_div(call_.count, wave);
    const bool whole = waves <= 1 || call_.count % wave == 0;  // else the last wave is shorter
    if (call_.flat) {
      const WindowCut all = cut(call_.count, hosts_ * rails_, cluster_.between);
      // Hosts whose ranks share a link differ at some moments of a direct exchange.
      const bool alike = !cluster_.shared_nic || call_.between != InterHostSchedule::kDirect;
      return (alike && is_even(all)) || ranks * num_messages(call_.between, hosts_ * rails_, all) > kFullMessages;
    }
    const bool to_all = call_.collective == Op::kAllToAll;
    const std::size_t count = smaller(wave, call_.count);
    const auto rail = [&](int number) { return shard_of(count, rails_, number, align()).count; };
    const WindowCut inside = cut(to_all ? count / hosts_ : count, rails_, cluster_.inside),
                    between = to_all ? parts(count) : cut(rail(0), hosts_, cluster_.between);
    const bool even = whole && is_even(inside) && is_even(between) && rail(rails_ - 1) == rail(0);
    const double each =
        num_messages(InterHostSchedule::kDirect, rails_, inside) + num_messages(call_.between, hosts_, between);
    return even || ranks * each * waves > kFullMessages;
  }
  // ---- the exchanges of each collective -----------------------------------------------------------------------------

  void flat() {
    const int all = hosts_ * rails_;
    if (call_.collective == Op::kBroadcast) return chain(GroupKind::kAll, all, count_);
    Exchange e = exchange(GroupKind::kAll, call_.between, all, cluster_.between);
    e.element_bytes[0] = call_.sum_bytes;
    e.element_bytes[1] = call_.result_bytes;
    e.cuts = {cut(count_, all, cluster_.between)};
    take_part(e);
  }

  void layered() {
    const bool reduces = call_.collective == Op::kAllReduce || call_.collective == Op::kReduceScatter;
    switch (call_.collective) {
      case Op::kAllReduce:
        if (hosts_ == 1 && call_.inside == Algorithm::kOneshot) return oneshot();
        inside(true, reduces);
        rails();
        return inside(false, reduces);
      case Op::kReduceScatter:
        inside(true, reduces);
        return rails();
      case Op::kAllGather:
        rails();
        return inside(false, reduces);
      case Op::kBroadcast:
        return broadcast();
      case Op::kAllToAll:
        return hosts_ > 1 ? straight() : inside(false, reduces);
      default:
        fail(
            ErrorCode::kUnsupported,
            "simulate: got a collective without a model, expected all_reduce, reduce_scatter, all_gather, broadcast or "
            "all_to_all");
    }
  }

  void inside(bool first_half, bool reduces, int only_host = -1, int but_host = -1) {
    if (rails_ == 1) return;
    const InterHostSchedule kind = call_.inside == Algorithm::kRing && call_.collective != Op::kAllToAll
                                       ? InterHostSchedule::kRing
                                       : InterHostSchedule::kDirect;
    Exchange e = exchange(GroupKind::kHost, kind, rails_, cluster_.inside);
    e.cuts = {cut(count_, rails_, cluster_.inside)};
    (first_half ? e.last_round : e.first_round) = e.half();
    e.only_host = only_host;
    e.but_host = but_host;
    e.reduces = reduces && first_half;
    if (e.reduces && hosts_ > 1) e.element_bytes[0] = call_.partial_bytes;  // widened before they are summed
    run_exchange(e);
  }

  void rails() {
    if (hosts_ == 1) return;
    Exchange e = exchange(GroupKind::kRail, call_.between, hosts_, cluster_.between);
    e.element_bytes[0] = call_.sum_bytes;
    e.element_bytes[1] = call_.result_bytes;
    for (int rail = 0; rail < rails_; ++rail) {
      const std::size_t count = rail_count(rail);
      const WindowCut whole = cut(count, hosts_, cluster_.between);
      e.cuts.push_back({count, hosts_, rail == 0 ? whole.slice_elements : e.cuts[0].slice_elements});
    }
    take_part(e);
  }

  std::size_t rail_count(int rail) const { return shard_of(count_, rails_, rail, align()).count; }

  // Selects the rounds of an exchange that the collective consists of, and runs them.
  void take_part(Exchange& e) {
    switch (call_.collective) {
      case Op::kReduceScatter:
        e.last_round = e.half();
        break;
      case Op::kAllGather:
      case Op::kAllToAll:  // a direct exchange sends each member as many bytes as a gather of one chunk
        e.first_round = e.half();
        break;
      default:
        break;
    }
    e.reduces = e.first_round < e.half();
    run_exchange(e);
  }

  // Sends every part directly to its destination: first to the other hosts, one part for each of their ranks, then
  // inside.
  void straight() {
    Exchange e = exchange(GroupKind::kRail, InterHostSchedule::kDirect, hosts_, cluster_.between);
    e.timing.slots = rails_;
    e.cuts = {parts(count_)};
    take_part(e);
    count_ = ceil_div(count_, static_cast<std::size_t>(hosts_));
    inside(false, false);
  }
  WindowCut parts(std::size_t count) const {
    const std::size_t each = ceil_div(count, static_cast<std::size_t>(hosts_) * rails_);
    return cut_windows(count, hosts_, larger(1, each), align());
  }

  void oneshot() {
    if (rails_ == 1) return;
    Exchange e = exchange(GroupKind::kHost, InterHostSchedule::kDirect, rails_, cluster_.inside);
    e.cuts = {cut(count_, 1, cluster_.inside)};
    e.last_round = e.half();
    e.reduces = e.whole = true;
    run_exchange(e);
  }

  // The root's host scatters and gathers, every rail is a chain of hosts, and the other hosts gather. With one host: a
  // chain, or the scatter and gather.
  void broadcast() {
    if (hosts_ == 1 && call_.inside == Algorithm::kRing) return chain(GroupKind::kHost, rails_, count_);
    scatter_from_root();
    inside(false, false, call_.root_host);
    if (hosts_ == 1) return;
    chain(GroupKind::kRail, hosts_, count_);
    inside(false, false, -1, call_.root_host);
  }

  Exchange exchange(GroupKind among, InterHostSchedule kind, int members, const LinkClass& timing) const {
    const std::size_t element = call_.element_bytes;
    return {among, kind, members, 0, num_rounds(kind, members), true, false, {}, {element, element}, timing};
  }

  std::size_t align() const { return larger(1, kAlignBytes / call_.element_bytes); }
  WindowCut cut(std::size_t count, int chunks, const LinkClass& link) const {
    if (link.slice_bytes == 0) return cut_windows(count, chunks, count + 1, align());
    const std::size_t least = link.least_slice_bytes ? link.least_slice_bytes : link.slice_bytes;
    return cut_between(count, chunks, {link.slice_bytes, least, link.slots}, call_.element_bytes, align());
  }

  // ---- an exchange -------------------------------------------------------------------------------------------------

  int group_of(const Exchange& e, int id) const {
    return e.among == GroupKind::kHost ? id / rails_ : e.among == GroupKind::kRail ? id - id / rails_ * rails_ : 0;
  }
  int member_of(const Exchange& e, int id) const {
    return e.among == GroupKind::kHost ? id - id / rails_ * rails_ : e.among == GroupKind::kRail ? id / rails_ : id;
  }
  int id_of(const Exchange& e, int group, int member) const {
    return e.among == GroupKind::kHost   ? group * rails_ + member
           : e.among == GroupKind::kRail ? member * rails_ + group
                                         : member;
  }
  // The rank that represents another one when hosts are folded.
  int stand_in(int id) const { return folded_ ? id - id / rails_ * rails_ : id; }

  std::size_t elements(const Exchange& e, int group, const Hop& hop, std::size_t window) const {
    const WindowCut& cut = e.cut(group);
    if (e.whole) return cut.slice(0, window).count;
    const std::size_t begin = cut.slice(hop.first, window).offset;
    if (!folded_) {
      const std::size_t end = cut.slice(hop.last - 1, window).offset + cut.slice_elements;
      return smaller(end, cut.count) - smaller(begin, cut.count);
    }
    const std::size_t start = cut.slice(0, window).offset, left = smaller(start, cut.count);
    const std::size_t in_window = smaller(cut.count - left, cut.slice_elements * cut.chunks);
    return smaller(in_window, cut.slice(0, window).count * (hop.last - hop.first));
  }
  std::size_t nbytes(const Exchange& e, int group, const Hop& hop, std::size_t window, int round) const {
    return elements(e, group, hop, window) * e.element_bytes[round >= e.half()];
  }

  void run_exchange(const Exchange& e) {
    const int hops = num_hops(e.kind, e.members), slots = e.timing.slots;
    const std::size_t windows = e.windows();
    const std::vector<int> ids = participants(e);
    const double messages = 1.0 * windows * (e.last_round - e.first_round) * hops * ids.size();
    if (events_ + messages > kMostMessages || 1.0 * ranks_ * hops > kMostInRound)
      fail(ErrorCode::kInvalid, "simulate: got about ", events_ + messages, " messages to look at, expected at most ",
           kMostMessages, "; ask for fewer hosts, larger slices, or equal hosts, of which one stands for all");
    done_.assign(static_cast<std::size_t>(ranks_) * slots, 0.0);
    interleave(windows, e.last_round - e.first_round, slots, [&](std::size_t window, int at) {
      const std::size_t slot = window % slots;
      const int round = e.first_round + at;
      for (const int id : ids) {
        if (at > 0)
          finish(e, id, window, round - 1, slot);
        else if (window >= static_cast<std::size_t>(slots))
          finish(e, id, window - slots, e.last_round - 1, slot);
        posted_[id] = clock_[id];
      }
      sort_by_time(e, ids);
      if (hops > 1) return exchange_many(e, ids, window, round, slot);
      for (const int id : order_) send(e, id, window, round, slot);
    });
    const std::size_t last = smaller(windows, slots);
    for (std::size_t window = windows - last; window < windows; ++window)
      for (const int id : ids) finish(e, id, window, e.last_round - 1, window % slots);
    copy_twins(e, ids);
  }

  // The rank has received the messages of a round, and combines them.
  void finish(const Exchange& e, int id, std::size_t window, int round, std::size_t slot) {
    double now = std::max(clock_[id], done_[static_cast<std::size_t>(id) * e.timing.slots + slot]);
    if (e.reduces && round < e.half()) {
      std::size_t combined = 0;
      const int group = group_of(e, id), member = member_of(e, id);
      for (int i = 0; i < num_hops(e.kind, e.members); ++i)
        combined += nbytes(e, group, received(e.kind, e.members, member, round, i), window, round);
      now += own_time(id, combined / (e.timing.reduce_gbps * 1e3));
    }
    clock_[id] = now;
  }

  // Sends the one message of a rank in a round.
  void send(const Exchange& e, int id, std::size_t window, int round, std::size_t slot) {
    const Hop hop = sent(e.kind, e.members, member_of(e, id), round, 0);
    const std::size_t n = nbytes(e, group_of(e, id), hop, window, round);
    if (n == 0) return;
    const int to = id_of(e, group_of(e, id), hop.peer);
    const double start = leave(e, id, to, n, round);
    note(e, id, stand_in(to), slot, arrive(id, stand_in(to), crosses(id, to), n, start));
  }

  // Several messages of each rank in a round: they leave in the order of the schedule, and are received in the order of
  // their starts.
  void exchange_many(const Exchange& e, const std::vector<int>& ids, std::size_t window, int round, std::size_t slot) {
    const int hops = num_hops(e.kind, e.members);
    started_.assign(static_cast<std::size_t>(ranks_) * hops, -1.0);
    for (int i = 0; i < hops; ++i)
      for (const int id : order_) {
        const Hop hop = sent(e.kind, e.members, member_of(e, id), round, i);
        const std::size_t n = nbytes(e, group_of(e, id), hop, window, round);
        const int to = id_of(e, group_of(e, id), hop.peer);
        if (n) started_[static_cast<std::size_t>(id) * hops + i] = leave(e, id, to, n, round);
      }
    const bool by_host = cluster_.shared_nic && e.among != GroupKind::kHost;
    for (std::size_t at = 0; at < ids.size(); ++at) {
      if (!by_host || at % rails_ == 0) coming_.clear();
      const int id = ids[at], group = group_of(e, id);
      for (int i = 0; i < hops; ++i) {
        const Hop hop = received(e.kind, e.members, member_of(e, id), round, i);
        const int from = id_of(e, group, hop.peer);
        const double start = started_[static_cast<std::size_t>(stand_in(from)) * hops + i];
        if (start >= 0)
          coming_.push_back({start, nbytes(e, group, hop, window, round), stand_in(from), id, crosses(id, from)});
      }
      if (by_host && (at + 1) % rails_ != 0) continue;
      std::stable_sort(coming_.begin(), coming_.end(),
                       [](const MessageInFlight& a, const MessageInFlight& b) { return a.start < b.start; });
      for (const MessageInFlight& c : coming_)
        note(e, c.from, c.to, slot, arrive(c.from, c.to, c.crosses, c.nbytes, c.start));
    }
  }

  bool crosses(int a, int b) const { return a / rails_ != b / rails_; }

  void note(const Exchange& e, int from, int to, std::size_t slot, const Times& times) {
    double& here = done_[static_cast<std::size_t>(from) * e.timing.slots + slot];
    double& there = done_[static_cast<std::size_t>(to) * e.timing.slots + slot];
    here = std::max(here, times.sent);
    there = std::max(there, times.arrived);
  }

  // Returns when a rank's next message starts.
  double leave(const Exchange& e, int id, int to, std::size_t n, int round) {
    clock_[id] += own_time(id, e.timing.overhead_us);
    const double earliest = round == e.first_round ? posted_[stand_in(to)] : 0.0;
    return depart(id, crosses(id, to), n, std::max(clock_[id], earliest));
  }

  // A message waits for its turn on the sender's link,
  double depart(int from, bool crosses, std::size_t n, double earliest) {
    double& out = crosses ? nic_out_[nic(from)] : port_out_[from];
    const double start = std::max(earliest, out);
    out = start + n / (rate(crosses) * (crosses ? share_of(from) : 1.0));
    (crosses ? between_bytes_[from] : inside_bytes_[from]) += n;
    ++messages_[from];
    ++events_;
    return start;
  }
  // and then on the receiver's.
  Times arrive(int from, int to, bool crosses, std::size_t n, double start) {
    const double latency_us = (crosses ? cluster_.between : cluster_.inside).latency_us;
    const double share = crosses ? std::min(share_of(from), share_of(to)) : 1.0;
    double& in = crosses ? nic_in_[nic(to)] : port_in_[to];
    in = std::max(start + latency_us, in) + n / (rate(crosses) * share);
    return {in - latency_us, in};
  }
  Times transfer(int from, int to, std::size_t n, double earliest) {
    return arrive(from, to, crosses(from, to), n, depart(from, crosses(from, to), n, earliest));
  }

  double rate(bool crosses) const { return (crosses ? cluster_.between : cluster_.inside).bandwidth_gbps * 1e3; }
  int nic(int id) const { return cluster_.shared_nic ? id / rails_ : id; }
  double share_of(int id) const { return cluster_.link_share.empty() ? 1.0 : cluster_.link_share[id / rails_]; }
  double own_time(int id, double us) const { return cluster_.slowdown.empty() ? us : us * cluster_.slowdown[id]; }

  // Ranks that share a link use it in the order in which they reach it.
  void sort_by_time(const Exchange& e, const std::vector<int>& ids) {
    if (order_.size() != ids.size()) order_ = ids;
    if (!cluster_.shared_nic || e.among == GroupKind::kHost || rails_ == 1) return;
    for (int host = 0; host < ranks_ / rails_; ++host) {
      const auto first = order_.begin() + host * rails_;
      std::stable_sort(first, first + rails_, [&](int a, int b) { return clock_[a] < clock_[b]; });
    }
  }

  // ---- equal rails --------------------------------------------------------------------------------------------------

  // Returns the ranks to simulate: a rail whose times all equal another rail's is left out.
  std::vector<int> participants(const Exchange& e) {
    twin_.assign(rails_, -1);
    if (e.among == GroupKind::kRail && !folded_ && !cluster_.shared_nic)
      for (int rail = 1; rail < rails_; ++rail)
        for (int like = 0; like < rail && twin_[rail] < 0; ++like)
          if (twin_[like] < 0 && alike(e, rail, like)) twin_[rail] = like;
    std::vector<int> ids;
    for (int id = 0; id < ranks_; ++id)
      if (e.takes_part(id / rails_) && (e.among != GroupKind::kRail || twin_[group_of(e, id)] < 0)) ids.push_back(id);
    order_ = ids;
    return ids;
  }
  bool alike(const Exchange& e, int rail, int other) const {
    if (e.cut(rail).count != e.cut(other).count) return false;
    for (int host = 0; host < hosts_; ++host) {
      const int a = id_of(e, rail, host), b = id_of(e, other, host);
      if (clock_[a] != clock_[b] || nic_out_[a] != nic_out_[b] || nic_in_[a] != nic_in_[b]) return false;
      if (!cluster_.slowdown.empty() && cluster_.slowdown[a] != cluster_.slowdown[b]) return false;
    }
    return true;
  }
  void copy_twins(const Exchange& e, const std::vector<int>& ids) {
    if (ids.size() == static_cast<std::size_t>(ranks_)) return;
    for (int rail = 0; rail < rails_; ++rail)
      for (int host = 0; twin_[rail] >= 0 && host < hosts_; ++host) {
        const int to = id_of(e, rail, host), from = id_of(e, twin_[rail], host);
        clock_[to] = clock_[from];
        nic_out_[to] = nic_out_[from];
        nic_in_[to] = nic_in_[from];
        between_bytes_[to] = between_bytes_[from];
        messages_[to] = larger(messages_[to], messages_[from]);
      }
  }

  // ---- broadcast ---------------------------------------------------------------------------------------------------

  void scatter_from_root() {
    const int root = call_.root_host * rails_;
    for (int rail = 1; rail < rails_; ++rail) {
      const std::size_t n = rail_count(rail) * call_.element_bytes;
      if (n == 0) continue;
      clock_[root] += own_time(root, cluster_.inside.overhead_us);
      const Times times = transfer(root, root + rail, n, std::max(clock_[root], clock_[root + rail]));
      clock_[root + rail] = times.arrived;
      clock_[root] = std::max(clock_[root], times.sent);
    }
  }

  // Windows of the message go from the root along the ring of members; each travels while the next one follows.
  void chain(GroupKind among, int members, std::size_t message) {
    const bool by_rail = among == GroupKind::kRail;
    const LinkClass& link = among == GroupKind::kHost ? cluster_.inside : cluster_.between;
    const Exchange e{among, InterHostSchedule::kRing, members, 0, 0, false, false, {}, {0, 0}, link};
    const int groups = by_rail ? rails_ : 1;
    const int root = by_rail ? call_.root_host : among == GroupKind::kAll ? call_.root_host * rails_ : 0;
    for (int member = root, at = 0; at + 1 < members; ++at) {
      const int next = ring_next(member, members);
      for (int group = 0; group < groups; ++group)
        pass_on(e, id_of(e, group, member), id_of(e, group, next), cut(by_rail ? rail_count(group) : message, 1, link),
                chain_position(members, member, root) == 0, group);
      member = next;
    }
  }

  // One hop of a chain. arrived_[group][window]: when the window arrived at the sender.
  void pass_on(const Exchange& e, int from, int to, const WindowCut& cut, bool at_root, int group) {
    const std::size_t windows = cut.windows(), slots = e.timing.slots;
    if (arrived_.size() <= static_cast<std::size_t>(group)) arrived_.resize(group + 1);
    std::vector<double>& had = arrived_[group];
    if (at_root) had.assign(windows, clock_[from]);
    std::vector<double> has(windows);
    double now = 0;  // of the sender, which passes a window on while later ones are still arriving
    for (std::size_t w = 0; w < windows; ++w) {
      now = std::max(now, had[w]) + own_time(from, e.timing.overhead_us);
      const double free = w >= slots ? has[w - slots] : clock_[to];
      const std::size_t n = cut.slice(0, w).count * call_.element_bytes;
      const Times times = transfer(from, to, n, std::max(now, free));
      has[w] = times.arrived;
      clock_[from] = std::max(clock_[from], times.sent);
    }
    if (windows) clock_[to] = std::max(clock_[to], has.back());
    had = std::move(has);
  }

  // ---- the result --------------------------------------------------------------------------------------------------

  Prediction prediction() const {
    Prediction found;
    found.time_us = *std::max_element(clock_.begin(), clock_.end());
    found.first_us = *std::min_element(clock_.begin(), clock_.end());
    found.inside_bytes = *std::max_element(inside_bytes_.begin(), inside_bytes_.end());
    found.messages = *std::max_element(messages_.begin(), messages_.end());
    for (int host = 0; host < ranks_ / rails_; ++host) {
      const auto first = between_bytes_.begin() + host * rails_;
      found.between_bytes = larger(found.between_bytes, std::accumulate(first, first + rails_, std::uint64_t{0}));
    }
    found.events = static_cast<std::uint64_t>(events_);
    found.folded = folded_;
    return found;
  }

  const Cluster& cluster_;
  const CollectiveCall& call_;
  const int hosts_, rails_;
  const bool folded_;
  const int ranks_;  // number of simulated ranks
  std::vector<double> clock_, posted_, port_out_, port_in_, nic_out_, nic_in_, done_;
  std::vector<std::uint64_t> inside_bytes_, between_bytes_, messages_;
  std::vector<double> started_;  // by rank and message of a round; below 0: no message
  std::vector<MessageInFlight> coming_;
  std::vector<int> order_, twin_;
  std::vector<std::vector<double>> arrived_;
  std::size_t count_ = 0;  // elements handled at once
  double events_ = 0;
};

}  // namespace

Prediction simulate(const Cluster& cluster, const CollectiveCall& call) {
  check(cluster, call);
  return Simulation(cluster, call).run();
}

}  // namespace ringcomm::simulation
