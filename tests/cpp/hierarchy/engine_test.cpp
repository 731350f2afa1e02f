// The engine over hosts: which tree the hosts' sums are added in, and every collective over a transport that is a few
// queues in memory, with ranks as threads.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <tuple>

#include "cpp/ranks.h"
#include "hierarchy/engine.h"
#include "hierarchy/topology.h"

namespace ringcomm::test {
namespace {

using hierarchy::Merge;
using hierarchy::Topology;

std::string text_of(const HostsOfRanks& hosts) {
  std::string text;
  for (const auto& host : hosts) {
    text += "[";
    for (const int rank : host) text += " " + std::to_string(rank);
    text += " ]";
  }
  return text;
}

// ---- trees, as text: (0+1) is rank 0's value and rank 1's ---------------------------------------------------------

std::string sum_of(const std::string& a, const std::string& b) { return "(" + a + "+" + b + ")"; }

std::string balanced_tree(const std::vector<std::string>& leaves, std::size_t first, std::size_t count) {
  if (count == 1) return leaves[first];
  std::size_t left = 1;
  while (2 * left < count) left *= 2;
  return sum_of(balanced_tree(leaves, first, left), balanced_tree(leaves, first + left, count - left));
}
std::string balanced_tree(const std::vector<std::string>& leaves) { return balanced_tree(leaves, 0, leaves.size()); }

std::string tree_of_hosts(const Topology& topology) {
  std::vector<std::string> parts;
  for (int h = 0; h < topology.num_hosts(); ++h) {
    std::vector<std::string> leaves;
    for (const int rank : topology.ranks(h)) leaves.push_back(std::to_string(rank));
    parts.push_back(balanced_tree(leaves));
  }
  for (const Merge& each : topology.tree()) {
    parts[each.into] = sum_of(parts[each.into], parts[each.from]);
    parts[each.from] = "gone";
  }
  return parts[0];
}

std::string tree_of_ranks(int world_size) {
  std::vector<std::string> leaves;
  for (int r = 0; r < world_size; ++r) leaves.push_back(std::to_string(r));
  return balanced_tree(leaves);
}

// Whether some way of adding the hosts' sums gives the tree over ranks: each host's own sum must occur in it.
bool could_be_canonical(const Topology& topology) {
  const std::string wanted = tree_of_ranks(topology.world_size());
  for (int h = 0; h < topology.num_hosts(); ++h) {
    std::vector<std::string> leaves;
    for (const int rank : topology.ranks(h)) leaves.push_back(std::to_string(rank));
    const std::string part = balanced_tree(leaves);
    if (part.size() > 2 && wanted.find(part) == std::string::npos) return false;
  }
  return true;
}

// Ranks on hosts: in runs, or anywhere.
HostsOfRanks random_hosts(std::mt19937& random, int world_size) {
  const int num_hosts = 1 + static_cast<int>(random() % world_size);
  std::vector<int> host_of(world_size);
  for (int& host : host_of) host = static_cast<int>(random() % num_hosts);
  if (random() % 4) std::sort(host_of.begin(), host_of.end());
  HostsOfRanks hosts(num_hosts);
  for (int r = 0; r < world_size; ++r) hosts[host_of[r]].push_back(r);
  hosts.erase(std::remove_if(hosts.begin(), hosts.end(), [](const auto& ranks) { return ranks.empty(); }), hosts.end());
  std::shuffle(hosts.begin(), hosts.end(), random);
  return hosts;
}

void check_rail_ranks(const Topology& topology, const std::string& what) {
  int most = 0;
  for (int h = 0; h < topology.num_hosts(); ++h) {
    most = std::max(most, topology.num_ranks(h));
    int next = 0;
    for (int local = 0; local < topology.num_ranks(h); ++local) {
      require(topology.first_rail(h, local) == next && topology.last_rail(h, local) > next,
              what + ": every local rank has the rails that follow those of the one before");
      for (; next < topology.last_rail(h, local); ++next)
        require(topology.rail_rank(h, next) == topology.ranks(h)[local],
                what + ": a rail has the rank that it belongs to");
    }
    require(next == topology.rails(), what + ": every rail has a rank");
    for (int local = 0; local < topology.num_ranks(h); ++local)
      require(topology.part_rail_rank(h, local) == topology.ranks(h)[local], what + ": a rank has its own part");
  }
  require(topology.rails() == most, what + ": as many rails as the largest host has ranks");
}

void topologies(int trials) {
  std::mt19937 random(1);
  int canonical = 0, several = 0;
  for (int trial = 0; trial < trials; ++trial) {
    const int world_size = 1 + static_cast<int>(random() % 16);
    const HostsOfRanks hosts = random_hosts(random, world_size);
    const Topology topology(static_cast<int>(random() % world_size), hosts);
    const std::string what = text_of(hosts), tree = tree_of_hosts(topology);
    for (int h = 0; h + 1 < topology.num_hosts(); ++h)
      require(topology.ranks(h).front() < topology.ranks(h + 1).front(), what + ": hosts by their lowest ranks");
    for (int r = 0; r < world_size; ++r)
      require(topology.ranks(topology.host_of(r))[topology.local_of(r)] == r, what + ": where a rank is");
    require(topology.canonical() == could_be_canonical(topology), what + ": canonical where it can be");
    if (topology.canonical()) require(tree == tree_of_ranks(world_size), what + " adds as " + tree);
    require(static_cast<int>(topology.tree().size()) == topology.num_hosts() - 1 && tree != "gone",
            what + ": every host is added once");
    if (topology.in_order() == InterHostSchedule::kButterfly) {
      std::vector<std::string> parts;
      for (int h = 0; h < topology.num_hosts(); ++h) parts.push_back(std::to_string(h));
      Topology flat(0, [&] {
        HostsOfRanks single;
        for (int h = 0; h < topology.num_hosts(); ++h) single.push_back({h});
        return single;
      }());
      require(is_power_of_two(topology.num_hosts()) && topology.tree() == flat.tree(),
              what + ": a butterfly adds in the balanced tree over hosts alone");
    }
    check_rail_ranks(topology, what);
    canonical += topology.canonical() && topology.num_hosts() > 1;
    several += topology.num_hosts() > 1;
  }
  require(canonical > trials / 20 && several - canonical > trials / 20, "the hosts tried are of both kinds");
}

void refusals() {
  const std::vector<std::pair<int, HostsOfRanks>> wrong = {
      {0, {{0, 1}, {1}}}, {0, {{0}, {2}}}, {0, {{-1, 0}}}, {2, {{0}, {1}}}, {-1, {{0}, {1}}}};
  for (const auto& [rank, hosts] : wrong) {
    bool refused = false;
    try {
      Topology(rank, hosts);
    } catch (const Error& error) {
      refused = error.code() == ErrorCode::kInvalid;
    }
    require(refused, text_of(hosts) + ": a rank in no place or in two is refused");
  }
}

// ---- a transport in memory
// -------------------------------------------------------------------------------------------------

// What all ranks share: messages by (from, to, channel), in order.
class Mail {
 public:
  void put(int from, int to, int channel, const Message& message) {
    const auto* data = static_cast<const char*>(message.data);
    const std::lock_guard<std::mutex> lock(mutex_);
    boxes_[{from, to, channel}].emplace_back(data, data + message.nbytes);
    came_.notify_all();
  }
  void take(int from, int to, int channel, const Message& message, TransportClock::time_point limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& box = boxes_[{from, to, channel}];
    // By the system's clock: ThreadSanitizer does not know a wait by the steady one.
    const auto end = std::chrono::system_clock::now() + (limit - TransportClock::now());
    if (!came_.wait_until(lock, end, [&] { return !box.empty(); })) throw TransportFailure{from, true, "nothing came"};
    require(box.front().size() == message.nbytes,
            concat("a message from ", from, " to ", to, " on channel ", channel, " has ", box.front().size(),
                   " bytes, expected ", message.nbytes));
    std::memcpy(message.data, box.front().data(), message.nbytes);
    box.pop_front();
  }
  bool empty() const {
    return std::all_of(boxes_.begin(), boxes_.end(), [](const auto& each) { return each.second.empty(); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<std::tuple<int, int, int>, std::deque<std::vector<char>>> boxes_;
};

class MailExchange final : public TransportExchange {
 public:
  MailExchange(Mail& mail, int rank, int channel, std::vector<Round> rounds, TransportClock::time_point limit)
      : mail_(mail), rank_(rank), channel_(channel), rounds_(std::move(rounds)), limit_(limit) {}
  void start(int round) override {
    require(round == started_++, "the rounds of an exchange start in order");
    for (const Message& message : rounds_[round].sends) mail_.put(rank_, message.peer, channel_, message);
  }
  void finish(int round) override {
    require(round == finished_++ && finished_ == started_, "a round ends before the next one starts");
    for (const Message& message : rounds_[round].recvs) mail_.take(message.peer, rank_, channel_, message, limit_);
  }
  ~MailExchange() override { require(finished_ == static_cast<int>(rounds_.size()), "an exchange is finished"); }

 private:
  Mail& mail_;
  const int rank_, channel_;
  const std::vector<Round> rounds_;
  const TransportClock::time_point limit_;
  int started_ = 0, finished_ = 0;
};

class MailTransport final : public Transport {
 public:
  MailTransport(Mail& mail, int rank, std::size_t inline_bytes)
      : mail_(mail), rank_(rank), inline_bytes_(inline_bytes) {}
  const char* kind() const override { return "mail"; }
  std::size_t inline_bytes() const override { return inline_bytes_; }
  std::vector<std::string> swap(const std::vector<CallSignature>& signatures, TransportClock::time_point limit,
                                std::uintptr_t) override {
    std::vector<std::string> theirs;
    for (const CallSignature& each : signatures) {
      require(each.peer != rank_, "a rank exchanges no signature with itself");
      std::string mine = each.mine;
      mail_.put(rank_, each.peer, kSignature, {each.peer, mine.data(), mine.size()});
    }
    for (const CallSignature& each : signatures) {
      theirs.emplace_back(each.mine.size(), '\0');
      mail_.take(each.peer, rank_, kSignature, {each.peer, theirs.back().data(), theirs.back().size()}, limit);
    }
    return theirs;
  }
  std::unique_ptr<TransportExchange> open(int slot, std::vector<Round> rounds, TransportClock::time_point limit,
                                          std::uintptr_t) override {
    for (const Round& round : rounds)
      for (const Message& message : round.sends) sent_bytes_ += message.nbytes;
    return std::make_unique<MailExchange>(mail_, rank_, slot, std::move(rounds), limit);
  }
  std::shared_ptr<Request> message(const Call&, std::int64_t) override {
    fail(ErrorCode::kUnsupported, "no messages here");
  }
  void* allocate(std::size_t nbytes) override {
    ++allocated_;
    return ::operator new(nbytes, std::align_val_t(64));
  }
  void release(void* data) override {
    --allocated_;
    ::operator delete(data, std::align_val_t(64));
  }
  void abort() override {}
  void close() override {}
  std::uint64_t sent_bytes() const override { return sent_bytes_; }
  ~MailTransport() override { require(allocated_ == 0, "what was allocated is released"); }

 private:
  static constexpr int kSignature = -1;
  Mail& mail_;
  const int rank_;
  const std::size_t inline_bytes_;
  std::uint64_t sent_bytes_ = 0;
  int allocated_ = 0;
};

struct Variant {
  std::size_t slice_bytes, inline_bytes;
  bool compressed;
};

// Ranks as threads; `mail` must be empty at the end.
void run_over(const HostsOfRanks& hosts, const Variant& variant, const RankFunction& function) {
  Mail mail;
  const Topology topology(0, hosts);
  const int world_size = topology.world_size();
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < world_size; ++r) {
    hierarchy::Options options;
    options.slice_bytes = variant.slice_bytes;
    options.compressed = variant.compressed;
    for (int h = 0; h < topology.num_hosts(); ++h) options.names.push_back("host" + std::to_string(h));
    auto local = share(make_cpu_engine(topology.local_of(r), topology.num_ranks(topology.host_of(r)), short_timeout()));
    engines.push_back(make_hierarchical_engine(
        r, hosts, local, std::make_shared<MailTransport>(mail, r, variant.inline_bytes), options));
  }
  run_connected(engines, [&](int r) { function(*engines[r]); });
  for (auto& engine : engines) engine->close();
  require(mail.empty(), text_of(hosts) + ": every message was taken");
}

// ---- collectives
// ------------------------------------------------------------------------------------------------------

float value_of(int rank, std::size_t i) {
  return static_cast<float>(static_cast<double>((rank * 7919 + i * 104729) % 100003) / 317.0 - 150);
}

std::vector<float> values(int rank, std::size_t count) {
  std::vector<float> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = value_of(rank, i);
  return all;
}

Call call_of(Op op, const void* input, void* output, std::size_t count) {
  Call call;
  call.op = op;
  call.dtype = DType::kFloat32;
  call.input = input;
  call.output = output;
  call.count = count;
  return call;
}

// A tree of additions over the values of all ranks, as floats.
float added(const Topology& topology, std::size_t i) {
  const auto tree = [&](const auto& self, const std::vector<float>& leaves, std::size_t first, std::size_t n) -> float {
    if (n == 1) return leaves[first];
    std::size_t left = 1;
    while (2 * left < n) left *= 2;
    const float a = self(self, leaves, first, left), b = self(self, leaves, first + left, n - left);
    return a + b;
  };
  if (topology.canonical()) {
    std::vector<float> leaves;
    for (int r = 0; r < topology.world_size(); ++r) leaves.push_back(value_of(r, i));
    return tree(tree, leaves, 0, leaves.size());
  }
  std::vector<float> parts;
  for (int h = 0; h < topology.num_hosts(); ++h) {
    std::vector<float> leaves;
    for (const int rank : topology.ranks(h)) leaves.push_back(value_of(rank, i));
    parts.push_back(tree(tree, leaves, 0, leaves.size()));
  }
  return tree(tree, parts, 0, parts.size());
}

void sums(Engine& engine, const Topology& topology, std::size_t count, const std::string& what) {
  const int me = engine.rank(), world_size = engine.world_size(), root = static_cast<int>(count) % world_size;
  const std::size_t total = count * world_size;
  const std::vector<float> mine = values(me, total);
  const auto check = [&](const std::vector<float>& got, std::size_t first, const char* call) {
    std::size_t i = 0;
    while (i < got.size() && got[i] == added(topology, first + i)) ++i;
    require(i == got.size(), concat(what, ": ", call, " at ", i));
  };
  std::vector<float> data = mine, out(total);
  run(engine, call_of(Op::kAllReduce, data.data(), data.data(), total));
  check(data, 0, "all_reduce in place");
  run(engine, call_of(Op::kAllReduce, mine.data(), out.data(), total));
  check(out, 0, "all_reduce");
  std::vector<float> part(count);
  run(engine, call_of(Op::kReduceScatter, mine.data(), part.data(), count));
  check(part, me * count, "reduce_scatter");
  Call reduce = call_of(Op::kReduce, mine.data(), me == root ? out.data() : nullptr, total);
  reduce.root = root;
  std::fill(out.begin(), out.end(), 0.f);
  run(engine, reduce);
  if (me == root) check(out, 0, "reduce");
  require(mine == values(me, total), what + ": inputs stay as they are");
}

void moves(Engine& engine, std::size_t count, const std::string& what) {
  const int me = engine.rank(), world_size = engine.world_size(), root = static_cast<int>(count + 1) % world_size;
  const std::size_t total = count * world_size;
  const auto piece = [&](int rank, int part) {
    std::vector<float> all = values(rank, total);
    return std::vector<float>(all.begin() + part * count, all.begin() + (part + 1) * count);
  };
  std::vector<float> mine = values(me, total), everyone, crossed, out(total), part(count);
  for (int r = 0; r < world_size; ++r) {
    for (const float x : piece(r, 0)) everyone.push_back(x);
    for (const float x : piece(r, me)) crossed.push_back(x);
  }
  run(engine, call_of(Op::kAllGather, mine.data(), out.data(), count));
  require(out == everyone, what + ": all_gather");
  std::vector<float> sent = me == root ? mine : std::vector<float>(total);
  Call broadcast = call_of(Op::kBroadcast, sent.data(), sent.data(), total);
  broadcast.root = root;
  run(engine, broadcast);
  require(sent == values(root, total), what + ": broadcast");
  Call gather = call_of(Op::kGather, mine.data(), me == root ? out.data() : nullptr, count);
  gather.root = root;
  std::fill(out.begin(), out.end(), 0.f);
  run(engine, gather);
  require(me != root || out == everyone, what + ": gather");
  Call scatter = call_of(Op::kScatter, me == root ? mine.data() : nullptr, part.data(), count);
  scatter.root = root;
  run(engine, scatter);
  require(part == piece(root, me), what + ": scatter");
  run(engine, call_of(Op::kAllToAll, mine.data(), out.data(), count));
  require(out == crossed, what + ": all_to_all");
  run(engine, call_of(Op::kAllToAll, mine.data(), mine.data(), count));
  require(mine == crossed, what + ": all_to_all in place");
}

// Nobody leaves a barrier before everybody has come.
void barriers(Engine& engine, std::atomic<int>& came, const std::string& what) {
  for (int i = 1; i <= 3; ++i) {
    came.fetch_add(1);
    run(engine, Call{});
    require(came.load() >= i * engine.world_size(), what + ": barrier");
    run(engine, Call{});
  }
}

void collectives(const HostsOfRanks& hosts, const Variant& variant, const std::vector<std::size_t>& counts) {
  const Topology topology(0, hosts);
  const std::string what = text_of(hosts) + " in slices of " + std::to_string(variant.slice_bytes);
  std::atomic<int> came{0};
  run_over(hosts, variant, [&](Engine& engine) {
    for (const std::size_t count : counts) {
      sums(engine, topology, count, what);
      moves(engine, count, what);
    }
    barriers(engine, came, what);
  });
}

// Every rank ends with the same bits, near the sum, after half of the bytes.
void compressed(const HostsOfRanks& hosts) {
  const Topology topology(0, hosts);
  const std::size_t count = 5000;
  std::vector<std::vector<float>> results(topology.world_size(), std::vector<float>(count));
  run_over(hosts, {1024, 0, true}, [&](Engine& engine) {
    results[engine.rank()] = values(engine.rank(), count);
    float* const data = results[engine.rank()].data();
    run(engine, call_of(Op::kAllReduce, data, data, count));
  });
  for (const auto& result : results) require(result == results[0], text_of(hosts) + ": the same bits in bfloat16");
  const float most = 150.f * static_cast<float>(topology.world_size() * (topology.num_hosts() + 1)) / 256;
  bool differs = false;
  for (std::size_t i = 0; i < count; ++i) {
    require(std::abs(results[0][i] - added(topology, i)) <= 2 * most, text_of(hosts) + ": near the sum");
    differs = differs || results[0][i] != added(topology, i);
  }
  require(differs, text_of(hosts) + ": went in a smaller type");
}

// Ranks that make different calls are told so, on both hosts.
void mismatch() {
  std::atomic<int> told{0};
  run_over({{0}, {1}}, {0, 0, false}, [&](Engine& engine) {
    std::vector<float> data(100);
    try {
      run(engine, call_of(Op::kAllReduce, data.data(), data.data(), engine.rank() ? 99 : 100));
    } catch (const Error& error) {
      told += error.code() == ErrorCode::kMismatch &&
              std::string(error.what()).find("rank 1 on host host1 made all_reduce #0 of 99") != std::string::npos;
    }
  });
  require(told == 2, "a mismatch is told on both hosts");
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const bool quick = argc > 1 && std::string(argv[1]) == "quick";
  topologies(quick ? 500 : 20000);
  refusals();
  const std::vector<ringcomm::HostsOfRanks> layouts = {
      {{0}, {1}},      {{0, 1}, {2, 3}}, {{0}, {1, 2}, {3}},       {{0, 3}, {1, 2}},
      {{0}, {1}, {2}}, {{0, 1, 2}, {3}}, {{0, 1}, {2, 3}, {4, 5}}, {{0}, {1}, {2}, {3}}};
  for (const auto& hosts : layouts) {
    collectives(hosts, {256, 0, false}, {0, 1, 37, 700});  // many slices
    collectives(hosts, {0, 1024, false}, {1, 100, 20000});
    compressed(hosts);
  }
  mismatch();
  std::mt19937 random(7);
  for (int trial = 0; trial < (quick ? 3 : 30); ++trial) {
    const auto hosts = random_hosts(random, 2 + static_cast<int>(random() % 6));
    if (hosts.size() > 1) collectives(hosts, {128u << random() % 4, random() % 2 * 512, false}, {3, random() % 2000});
  }
  std::printf("hierarchy_engine_test: %ld checks\n", cells.load());
  return 0;
}
