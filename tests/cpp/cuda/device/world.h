// Ranks for tests of the CUDA kernels alone: segments, host pages, buffers and arguments in host memory, and launches
// on the emulator, with no engine around. Everything random comes from a seed, which a failing case prints.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/engine.h"
#include "cuda/device/intrinsics.h"
#include "cuda/device/kernels.h"

namespace ringcomm::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  int between(int least, int most) { return least + static_cast<int>(below(most - least + 1)); }
  bool one_in(int n) { return below(n) == 0; }
  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(choices.size())];
  }
  // Nothing, one, odd ones, those around a power of two, anything.
  std::uint64_t count(std::uint64_t most) {
    const std::uint64_t near = (1ull << between(3, 13)) + below(3) - 1;
    const std::uint64_t n = pick<std::uint64_t>({0, 1, 7, 64, near, near, below(most + 1), below(most + 1)});
    return n < most ? n : most;
  }

 private:
  std::uint64_t state_;
};

// Exactly `nbytes` of the heap, `shift` bytes past a line: AddressSanitizer sees the first byte past the end.
class Memory {
 public:
  explicit Memory(std::size_t nbytes, std::size_t shift = 0, int noise = 0xee) : nbytes_(nbytes), shift_(shift) {
    if (posix_memalign(&block_, kLineBytes, shift + nbytes + (shift + nbytes == 0)) != 0) std::abort();
    std::memset(block_, noise, shift + nbytes);
  }
  ~Memory() { std::free(block_); }
  Memory(const Memory&) = delete;
  Memory(Memory&& other) noexcept : block_(other.block_), nbytes_(other.nbytes_), shift_(other.shift_) {
    other.block_ = nullptr;
  }
  char* data() const { return static_cast<char*>(block_) + shift_; }
  std::size_t nbytes() const { return nbytes_; }

 private:
  void* block_ = nullptr;
  std::size_t nbytes_, shift_;
};

// Finite values that make every sum round, of all the bits an integer has.
inline void fill(DType dtype, void* data, std::size_t count, Random& random) {
  dispatch_dtype(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    using Acc = typename Element<T>::Acc;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t bits = random.next();
      T value;
      if constexpr (std::is_floating_point_v<Acc>) {
        value = Element<T>::store(static_cast<Acc>(static_cast<double>(static_cast<std::int64_t>(bits)) * 0x1p-61));
      } else if constexpr (std::is_same_v<T, Bool>) {
        value = {static_cast<std::uint8_t>(bits & 1)};
      } else {
        value = static_cast<T>(bits);
      }
      std::memcpy(static_cast<char*>(data) + i * sizeof(T), &value, sizeof(T));
    }
  });
}

template <typename T>
T at(const void* data, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}
template <typename T>
bool same_bits(T a, T b) {
  using Acc = typename Element<T>::Acc;
  if constexpr (std::is_floating_point_v<Acc>)  // a NaN's payload is not promised
    if (std::isnan(Element<T>::load(a)) && std::isnan(Element<T>::load(b))) return true;
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

inline cuda::Layout small_layout(int world_size, int channels, Random& random) {
  cuda::Layout layout;
  layout.world_size = world_size;
  layout.channels = channels;
  layout.depth = random.between(2, 4);
  layout.p2p_depth = random.between(2, 4);
  layout.p2p_channels = random.between(1, 2);
  layout.slot_bytes = kLineBytes * random.between(1, 16);
  layout.stage_bytes = kLineBytes * world_size * random.between(1, 8);
  layout.packet_bytes = 1920 * random.between(1, 2);
  layout.p2p_slot_bytes = kLineBytes * random.between(1, 16);
  return layout;
}

// One message of a call at all ranks of a launch.
struct Message {
  const void* input[cuda::kMaxLaunchRanks];
  void* output[cuda::kMaxLaunchRanks];
  std::uint64_t count;
};
inline void put(cuda::CallArgs& args, int m, const Message& message) {
  args.counts[m] = message.count;
  for (int y = 0; y < args.num_ranks; ++y) args.buffers(m, y) = {message.input[y], message.output[y]};
}

// How a call is launched.
struct Form {
  int channels = 1;
  int threads = 16;        // of a block; a multiple of kWarp
  bool together = true;    // one grid with the blocks of all ranks, or one grid per rank
  std::uint64_t seed = 1;  // of the schedule
  bool exact = true;       // any deadlock is an error at once; false: let the kernels' own time limits work
  std::int64_t timeout_ms = 600000;
  int absent = -1;  // this rank does not come; needs one grid per rank
};

inline Form random_form(Random& random, int channels, std::initializer_list<int> warps = {1, 2, 2, 3, 4}) {
  Form form;
  form.channels = channels;
  form.threads = cuda::kWarp * random.pick(warps);
  form.together = random.one_in(2);
  form.seed = random.next();
  return form;
}

// The memory of all ranks of one communicator. Survives from call to call, as on a device.
class World {
 public:
  explicit World(const cuda::Layout& layout) : layout_(layout) {
    for (int r = 0; r < layout.world_size; ++r) {
      segments_.emplace_back(layout.segment_bytes(), 0, 0);
      pages_.emplace_back(sizeof(cuda::HostPage), 0, 0);
      tables_.emplace_back(sizeof(cuda::RankTable), 0, 0);
      for (int c = 0; c < layout.channels; ++c) spoil(r, c);
    }
    for (int r = 0; r < layout.world_size; ++r) {
      table(r).host = &page(r);
      for (int p = 0; p < layout.world_size; ++p) table(r).segments[p] = segment(p);
    }
  }

  const cuda::Layout& layout() const { return layout_; }
  int world_size() const { return layout_.world_size; }
  char* segment(int rank) const { return segments_[rank].data(); }
  cuda::HostPage& page(int rank) const { return *reinterpret_cast<cuda::HostPage*>(pages_[rank].data()); }
  const cuda::Status& status(int rank) const { return page(rank).status; }
  // What went wrong first on this rank, as the kernels wrote it.
  cuda::Failure failure(int rank) const { return static_cast<cuda::Failure>(load_acquire(&status(rank).code)); }
  // Where `rank` sees arena number `arena` of `peer`.
  char*& arena(int rank, int peer, int arena) { return table(rank).regions[peer][arena]; }

  cuda::RankArgs rank_args(int rank) {
    cuda::RankArgs args{};
    args.rank = rank;
    args.factor = 1;
    args.segment = segment(rank);
    args.table = &table(rank);
    return args;
  }
  // CallArgs or ExchangeArgs of all ranks, without messages.
  template <typename Args>
  Args call(Op op, DType dtype, Algorithm algorithm, int root, std::uint64_t signed_count) {
    Args args{};
    args.op = op;
    args.dtype = dtype;
    args.algorithm = algorithm;
    args.root = root;
    args.signed_count = signed_count;
    args.layout = layout_;
    args.num_ranks = world_size();
    for (int r = 0; r < world_size(); ++r) args.ranks[r] = rank_args(r);
    if constexpr (std::is_same_v<Args, cuda::CallArgs>)
      for (int r = 0; r < world_size(); ++r) args.ring_order[r] = static_cast<std::int8_t>(r);
    return args;
  }

  // Runs the call on all ranks. False: `error` says what got stuck. Whether the kernels gave up is in failure().
  template <typename Args>
  bool run(cuda::Kernel<Args> kernel, Args args, const Form& form) {
    if (form.together) return run_each(kernel, std::vector<Args>{args}, world_size(), form);
    return run_each(kernel, apart(args), 1, form);
  }
  // Launch r is rank r's.
  template <typename Args>
  bool run_each(cuda::Kernel<Args> kernel, std::vector<Args> launches, int ranks_in_each, const Form& form) {
    emulator::Options options;
    options.seed = form.seed;
    options.exact = form.exact;
    emulator::Simulation simulation(options);
    for (std::size_t i = 0; i < launches.size(); ++i) {
      if (static_cast<int>(i) == form.absent) continue;
      if constexpr (!std::is_same_v<Args, cuda::KnownArgs> && !std::is_same_v<Args, cuda::CopyArgs>)
        launches[i].timeout_ns = static_cast<std::uint64_t>(form.timeout_ms) * 1000000;
      simulation.launch("launch " + std::to_string(i), kernel, dim3(form.channels, ranks_in_each), dim3(form.threads),
                        launches[i]);
    }
    const bool ok = simulation.run();
    error = simulation.error;
    return ok;
  }

  std::string error;

  // Launch r is of rank r alone; the pointers of its peers are unknown there.
  template <typename Args>
  std::vector<Args> apart(const Args& args) const {
    std::vector<Args> launches;
    for (int r = 0; r < world_size(); ++r) launches.push_back(alone(args, r));
    return launches;
  }

 private:
  // What uninitialised memory may hold, where no flags are.
  void spoil(int rank, int channel) {
    char* const at = segment(rank) + layout_.channel_at(channel);
    const std::size_t headers = layout_.depth * sizeof(SlotHeader);
    std::memset(at + layout_.board_at() + headers, 0xdd, layout_.board_bytes() - headers);
    std::memset(at + layout_.stage_at(), 0xdd, layout_.boxes_at() - layout_.stage_at());
  }
  static cuda::CallArgs alone(const cuda::CallArgs& args, int r) {
    cuda::CallArgs one = args;
    one.num_ranks = 1;
    one.ranks[0] = args.ranks[r];
    for (auto& buffers : one.all_buffers) buffers = {};
    for (int m = 0; m < args.num_messages; ++m) one.buffers(m, 0) = args.buffers(m, r);
    return one;
  }
  static cuda::ExchangeArgs alone(const cuda::ExchangeArgs& args, int r) {
    const int w = args.layout.world_size;
    cuda::ExchangeArgs one = args;
    one.num_ranks = 1;
    one.ranks[0] = args.ranks[r];
    for (auto& exchange : one.exchanges) exchange = {};
    for (int p = 0; p < w; ++p) one.exchanges[p] = args.exchanges[r * w + p];
    return one;
  }
  static cuda::CopyArgs alone(cuda::CopyArgs args, int r) {
    for (int i = args.first[r]; i < args.first[r + 1]; ++i) args.copies[i - args.first[r]] = args.copies[i];
    args.first[1] = args.first[r + 1] - args.first[r];
    args.first[0] = 0;
    return args;
  }

  cuda::RankTable& table(int rank) { return *reinterpret_cast<cuda::RankTable*>(tables_[rank].data()); }

  cuda::Layout layout_;
  std::vector<Memory> segments_, pages_, tables_;
};

inline bool failed = false;
// Says once what is wrong with a case; `what` names the seed.
inline bool check(bool ok, const std::string& what) {
  if (ok) return true;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::fflush(stderr);
  failed = true;
  return false;
}

// `name [cases [first seed]]`: runs `one(seed)`; the exit status.
template <typename Case>
int run_cases(const char* what, int cases, std::uint64_t first_seed, const Case& one) {
  int bad = 0;
  for (std::uint64_t seed = first_seed; seed < first_seed + cases; ++seed) {
    const std::string wrong = one(seed);
    if (wrong.empty()) continue;
    check(false, std::string(what) + ", seed " + std::to_string(seed) + ": " + wrong);
    if (++bad == 5) break;
  }
  std::printf("%s: %d cases from seed %llu, %d failed\n", what, cases, static_cast<unsigned long long>(first_seed),
              bad);
  return bad == 0 ? 0 : 1;
}

// The arguments of a test program: [quick | number of cases [first seed]].
struct Arguments {
  bool quick;
  int cases;
  std::uint64_t first_seed;
};
inline Arguments parse_arguments(int argc, char** argv, int usual_cases) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  const int cases = quick ? 60 : argc > 1 ? std::atoi(argv[1]) : usual_cases;
  return {quick, cases, argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1};
}

// ---- all_reduces that go wrong --------------------------------------------------------------------------------------

inline cuda::Kernel<cuda::CallArgs> sum_kernel(Algorithm algorithm) {
  if (algorithm == Algorithm::kOneshot) return cuda::oneshot_kernel(DType::kFloat32, ReduceOp::kSum);
  if (algorithm == Algorithm::kDirect) return cuda::direct_kernel(DType::kFloat32, ReduceOp::kSum);
  return cuda::ring_kernel(DType::kFloat32, ReduceOp::kSum);
}

inline cuda::CallArgs plain_all_reduce(World& world, std::vector<Memory>& buffers, Algorithm algorithm, bool wide,
                                       std::uint64_t count) {
  cuda::CallArgs args = world.call<cuda::CallArgs>(Op::kAllReduce, DType::kFloat32, algorithm, 0, count);
  args.num_messages = 1;
  args.wide_packets = wide;
  args.counts[0] = count;
  for (int r = 0; r < world.world_size(); ++r) {
    buffers.emplace_back(count * sizeof(float), 0, 0);
    args.buffers(0, r) = {buffers.back().data(), buffers.back().data()};
  }
  return args;
}

// One rank does not come: all others give up within the limit, in a wait of these kinds, and at least one names it.
inline std::string one_is_absent(std::uint64_t seed, Algorithm algorithm, std::initializer_list<cuda::WaitKind> kinds,
                                 int most_elements) {
  Random random(seed);
  const int world_size = random.between(2, 4), channels = random.between(1, 2);
  World world(small_layout(world_size, channels, random));
  std::vector<Memory> buffers;
  const auto args = plain_all_reduce(world, buffers, algorithm, random.one_in(2), random.between(1, most_elements));
  Form form = random_form(random, channels);
  form.together = form.exact = false;
  form.timeout_ms = 50;
  form.absent = static_cast<int>(random.below(world_size));
  if (!world.run(sum_kernel(algorithm), args, form)) return world.error;
  bool named = false;
  for (int r = 0; r < world_size; ++r) {
    if (r == form.absent) continue;
    const cuda::Status& status = world.status(r);
    if (world.failure(r) != cuda::Failure::kTimeout && world.failure(r) != cuda::Failure::kAborted)
      return "rank " + std::to_string(r) + " did not give up";
    if (std::find(kinds.begin(), kinds.end(), static_cast<cuda::WaitKind>(status.wait)) == kinds.end())
      return "an odd kind of wait";
    if (status.peer == r || status.peer < 0 || status.peer >= world_size) return "an odd peer";
    if (status.seen >= status.expected) return "it had what it waited for";
    // In the ring the first rank to time out may be one that waits for a neighbour which is there.
    const bool timed_out = algorithm == Algorithm::kRing || world.failure(r) == cuda::Failure::kTimeout;
    named = named || (status.peer == form.absent && timed_out);
  }
  return named ? "" : "no rank named the absent one";
}

// One rank has another count: both counts are in the report, and all ranks return.
inline std::string one_differs(std::uint64_t seed, Algorithm algorithm, std::uint64_t count, std::uint64_t odd_count) {
  Random random(seed);
  const int world_size = random.between(2, 4), channels = random.between(1, 2);
  World world(small_layout(world_size, channels, random));
  std::vector<Memory> buffers;
  const auto args = plain_all_reduce(world, buffers, algorithm, random.one_in(2), count);
  const int odd = static_cast<int>(random.below(world_size));
  std::vector<cuda::CallArgs> launches = world.apart(args);
  launches[odd].signed_count = launches[odd].counts[0] = odd_count;
  Form form = random_form(random, channels);
  form.exact = false;
  if (!world.run_each(sum_kernel(algorithm), launches, 1, form)) return world.error;
  bool found = false;
  for (int r = 0; r < world_size; ++r) {
    if (world.failure(r) == cuda::Failure::kNone) return "rank " + std::to_string(r) + " did not notice";
    if (world.failure(r) != cuda::Failure::kMismatch) continue;
    const cuda::Status& status = world.status(r);
    if (status.mine.count != (r == odd ? odd_count : count) || status.theirs.count != (r == odd ? count : odd_count))
      return "the report has other counts";
    if (r != odd && status.peer != odd) return "the report names another peer";
    found = true;
  }
  return found ? "" : "no rank reported a mismatch";
}

}  // namespace ringcomm::test
