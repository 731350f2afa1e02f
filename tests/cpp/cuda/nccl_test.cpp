// The transport over NCCL on emulated GPUs, with a fake of NCCL (tests/support/fake_nccl) that waits wherever NCCL may
// wait and says where it is misused. Ranks are threads.
//
//   cuda_nccl_test [quick] [section...]
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>

#include "core/inter_host_schedule.h"
#include "cpp/ranks.h"
#include "hierarchy/transport.h"

namespace ringcomm::test {
namespace {

using std::chrono::milliseconds;

// ---- the fake

std::string library_path() {
  char self[4096] = {};
  require(readlink("/proc/self/exe", self, sizeof self - 1) > 0, "/proc/self/exe");
  const std::string path = self;
  return path.substr(0, path.rfind('/')) + "/fake_nccl/libnccl.so.2";
}
const std::string& path() {
  static const std::string text = library_path();
  return text;
}
template <typename Function>
Function* fake(const char* symbol) {
  static void* const handle = dlopen(path().c_str(), RTLD_NOW | RTLD_LOCAL);
  require(handle != nullptr, handle ? "" : dlerror());
  return reinterpret_cast<Function*>(dlsym(handle, symbol));
}
void fake_set(const char* key, long value) { fake<void(const char*, long)>("fake_nccl_set")(key, value); }
std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1)
    lines.push_back(text.substr(at, end - at));
  return lines;
}
// What `rank` asked of the communicator with this id, in order: "send 2 64, recv 0 64,".
std::vector<std::string> groups_of(const std::string& id, int rank) {
  int number = 0;
  std::memcpy(&number, id.data(), sizeof number);
  const std::string begin = concat("communicator ", number, " rank ", rank, ": ");
  std::vector<std::string> groups;
  for (const std::string& line : lines_of(fake<const char*()>("fake_nccl_calls")()))
    if (line.rfind(begin, 0) == 0 && line.find("finalize") == std::string::npos)
      groups.push_back(line.substr(begin.size()));
  return groups;
}
void end_of_section(const std::string& section) {
  const std::string bad = fake<const char*()>("fake_nccl_violations")();
  require(bad.empty(), section + " misused NCCL: " + bad);
  fake<void()>("fake_nccl_reset")();
}

// ---- ranks

struct Rank {
  int rank;
  Transport& transport;
  cudaStream_t cuda = nullptr;

  Rank(int r, Transport& w) : rank(r), transport(w) { cudaStreamCreateWithFlags(&cuda, cudaStreamNonBlocking); }
  ~Rank() { cudaStreamDestroy(cuda); }
  std::uintptr_t stream() const { return reinterpret_cast<std::uintptr_t>(cuda); }
  void synchronize() const { require(cudaStreamSynchronize(cuda) == cudaSuccess, "cudaStreamSynchronize"); }
};

std::vector<std::string> ids() {
  std::vector<std::string> made;
  for (std::size_t i = 0; i < kNcclIds; ++i) made.push_back(nccl_unique_id(path()));
  return made;
}
NcclOptions options_of(int rank, int world_size, const std::vector<std::string>& unique_ids) {
  NcclOptions options;
  options.path = path();
  options.rank = rank;
  options.world_size = world_size;
  options.unique_ids = unique_ids;
  options.timeout_ms = 20000;
  return options;
}
std::vector<std::string> with_ranks(int world_size, const std::function<void(Rank&)>& function) {
  const std::vector<std::string> unique_ids = ids();
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r)
    threads.emplace_back([&, r] {
      const auto transport = make_nccl_transport(options_of(r, world_size, unique_ids));
      Rank rank(r, *transport);
      function(rank);
      transport->close();
    });
  for (std::thread& thread : threads) thread.join();
  return unique_ids;
}
TransportClock::time_point in(int ms) { return TransportClock::now() + milliseconds(ms); }
template <typename T>
T* device_memory(Transport& transport, std::size_t count) {
  return static_cast<T*>(transport.allocate(count * sizeof(T)));
}

// Holds up a stream until it is opened. One at a time: the emulator has one thread for host functions.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    const auto wait = [](void* gate) {
      Gate& self = *static_cast<Gate*>(gate);
      while (!self.open_.load()) usleep(100);
      self.passed_.store(true);
    };
    cudaLaunchHostFunc(stream, wait, this);
  }
  ~Gate() {
    open();
    while (!passed_.load()) usleep(100);
  }
  void open() { open_.store(true); }

 private:
  std::atomic<bool> open_{false}, passed_{false};
};

// What a transport's failure handler was told.
struct Heard {
  std::mutex mutex;
  std::vector<TransportFailure> failures;

  void listen(Transport& transport, bool aborts = false) {
    transport.on_failure([this, &transport, aborts](const TransportFailure& failure) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        failures.push_back(failure);
      }
      if (aborts) transport.abort();
    });
  }
  std::optional<TransportFailure> await(int limit_ms = 20000) {
    for (const auto end = in(limit_ms); TransportClock::now() < end; usleep(200)) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!failures.empty()) return failures.front();
    }
    return std::nullopt;
  }
};

template <typename Function>
TransportFailure failure_of(const std::string& what, const Function& function) {
  try {
    function();
  } catch (const TransportFailure& failure) {
    return failure;
  }
  require(false, what + " did not fail");
  return {};
}
template <typename Function>
void expect_error(ErrorCode code, const std::string& text, const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    require(error.code() == code && std::string(error.what()).find(text) != std::string::npos,
            concat("expected '", text, "', got ", error.what()));
    return;
  }
  require(false, "expected an error with " + text);
}

// ---- rounds

// An all-reduce of int32 between all ranks by a schedule: `windows` exchanges of one chunk per member, `slots` at once.
class AllReduce {
 public:
  AllReduce(Rank& rank, InterHostSchedule kind, int members, std::size_t chunk, std::size_t windows, int slots)
      : rank_(rank), kind_(kind), members_(members), chunk_(chunk), windows_(windows), slots_(slots) {
    local_ = make_cuda_engine(0, 1, EngineOptions());
    local_->connect({local_->handle()});
    data_ = device_memory<std::int32_t>(rank.transport, windows * members * chunk);
    scratch_ = device_memory<std::int32_t>(rank.transport, slots * members * chunk);
    for (std::size_t i = 0; i < windows * members * chunk; ++i) data_[i] = value(rank.rank, i);
  }
  ~AllReduce() {
    rank_.transport.release(data_);
    rank_.transport.release(scratch_);
  }

  void run() {
    std::vector<Underway> underway(slots_);
    const int rounds = num_rounds(kind_, members_);
    interleave(windows_, rounds, slots_, [&](std::size_t window, int round) {
      Underway& here = underway[window % slots_];
      if (here.exchange) finish(here);
      if (round == 0)
        here.exchange =
            rank_.transport.open(static_cast<int>(window % slots_), rounds_of(window), in(20000), rank_.stream());
      here.exchange->start(round);
      here.window = window;
      here.round = round;
      expected.push_back(text_of(round));
    });
    for (Underway& here : underway)
      if (here.exchange) finish(here);
    rank_.synchronize();
    for (std::size_t i = 0; i < windows_ * members_ * chunk_; ++i) {
      std::int32_t want = 0;
      for (int m = 0; m < members_; ++m) want += value(m, i);
      require(data_[i] == want, concat("element ", i, " of rank ", rank_.rank));
    }
  }

  std::vector<std::string> expected;  // the groups, as the fake writes them

 private:
  struct Underway {
    std::unique_ptr<TransportExchange> exchange;
    std::size_t window = 0;
    int round = 0;  // the last one that was started
  };
  static std::int32_t value(int rank, std::size_t i) { return static_cast<std::int32_t>(1000 * rank + i); }
  std::int32_t* chunk_at(std::size_t window, int chunk) const { return data_ + (window * members_ + chunk) * chunk_; }
  std::size_t nbytes(const Hop& hop) const { return (hop.last - hop.first) * chunk_ * sizeof(std::int32_t); }
  bool reduces(int round) const { return round < reducing_rounds(kind_, members_); }

  std::vector<Round> rounds_of(std::size_t window) const {
    std::vector<Round> rounds(num_rounds(kind_, members_));
    for (std::size_t r = 0; r < rounds.size(); ++r)
      for (int i = 0; i < num_hops(kind_, members_); ++i) {
        const int round = static_cast<int>(r);
        const Hop out = sent(kind_, members_, rank_.rank, round, i);
        const Hop from = received(kind_, members_, rank_.rank, round, i);
        rounds[r].sends.push_back({out.peer, chunk_at(window, out.first), nbytes(out)});
        rounds[r].recvs.push_back(
            {from.peer, reduces(round) ? place(window, i) : chunk_at(window, from.first), nbytes(from)});
      }
    return rounds;
  }
  // Where the parts that come in a reducing round wait to be added: one chunk each, or half of all in one hop.
  std::int32_t* place(std::size_t window, int hop) const {
    return scratch_ + (window % slots_ * members_ + hop) * chunk_;
  }
  std::string text_of(int round) const {
    std::string text;
    for (const bool sends : {true, false})
      for (int i = 0; i < num_hops(kind_, members_); ++i) {
        const Hop hop =
            sends ? sent(kind_, members_, rank_.rank, round, i) : received(kind_, members_, rank_.rank, round, i);
        text += concat(text.empty() ? "" : " ", sends ? "send " : "recv ", hop.peer, ' ', nbytes(hop), ',');
      }
    return text;
  }
  void finish(const Underway& here) {
    here.exchange->finish(here.round);
    if (!reduces(here.round)) return;
    for (int i = 0; i < num_hops(kind_, members_); ++i) {
      const Hop hop = received(kind_, members_, rank_.rank, here.round, i);
      CombineCall combining;
      combining.dtype = DType::kInt32;
      combining.first = place(here.window, i);
      combining.second = combining.output = chunk_at(here.window, hop.first);
      combining.count = (hop.last - hop.first) * chunk_;
      combining.stream = rank_.stream();
      local_->combine(combining);
    }
  }

  Rank& rank_;
  const InterHostSchedule kind_;
  const int members_;
  const std::size_t chunk_, windows_;
  const int slots_;
  std::unique_ptr<Engine> local_;
  std::int32_t *data_, *scratch_;
};

void schedules() {
  for (const InterHostSchedule kind :
       {InterHostSchedule::kRing, InterHostSchedule::kButterfly, InterHostSchedule::kDirect})
    for (int members = 2; members <= 4; ++members) {
      if (kind == InterHostSchedule::kButterfly && !is_power_of_two(members)) continue;
      for (const int slots : {1, 3}) {
        std::vector<std::vector<std::string>> expected(members);
        std::atomic<std::uint64_t> sent{0};
        const auto made = with_ranks(members, [&](Rank& rank) {
          AllReduce call(rank, kind, members, 40, 5, slots);
          call.run();
          expected[rank.rank] = call.expected;
          sent += rank.transport.sent_bytes();
        });
        require(sent.load() == 5ull * 2 * (members - 1) * members * 40 * 4, "bytes sent");
        for (int m = 0; m < members; ++m)
          require(groups_of(made[0], m) == expected[m], concat("groups of rank ", m, " of ", members));
        end_of_section("schedules");
      }
    }
}

// One round with every other rank, `count` elements of int32 from `data` to `data + count`.
Round with_all(const Rank& rank, int world_size, std::int32_t* data, std::size_t count) {
  Round round;
  for (int p = 0; p < world_size; ++p)
    if (p != rank.rank) {
      round.sends.push_back({p, data, count * sizeof(std::int32_t)});
      round.recvs.push_back({p, data + count * (p + 1), count * sizeof(std::int32_t)});
    }
  return round;
}
void exchange(Rank& rank, int world_size, int limit_ms = 20000) {
  std::int32_t* const data = device_memory<std::int32_t>(rank.transport, 100 * (world_size + 1));
  const auto opened = rank.transport.open(0, {with_all(rank, world_size, data, 100)}, in(limit_ms), rank.stream());
  opened->start(0);
  opened->finish(0);
  rank.synchronize();
  rank.transport.release(data);
}

// ---- calls on streams

void streams() {
  with_ranks(2, [](Rank& rank) {
    exchange(rank, 2);
    static std::atomic<int> at{0};
    Rank other(rank.rank, rank.transport);
    Call call;
    call.op = Op::kAllReduce;
    rank.transport.enter(rank.stream());
    std::unique_ptr<Gate> gate;
    if (rank.rank == 0) gate = std::make_unique<Gate>(rank.cuda);
    rank.transport.leave(rank.stream(), call, 20000);
    rank.transport.enter(other.stream());  // behind the call on the first stream
    cudaEvent_t entered;
    cudaEventCreateWithFlags(&entered, cudaEventDisableTiming);
    cudaEventRecord(entered, other.cuda);
    rank.transport.leave(other.stream(), call, 20000);
    usleep(20000);
    if (gate) {
      require(cudaEventQuery(entered) == cudaErrorNotReady, "a call overtook the one before it");
      gate->open();
    }
    other.synchronize();
    require(cudaEventQuery(entered) == cudaSuccess, "the second call");
    cudaEventDestroy(entered);
    ++at;
    while (at.load() % 2) usleep(100);
    exchange(other, 2);
  });
  end_of_section("streams");
}

void asynchronous() {
  with_ranks(2, [](Rank& rank) {
    exchange(rank, 2);
    if (rank.rank == 1) return;
    Call call;
    call.op = Op::kAllReduce;
    Gate gate(rank.cuda);
    const std::uintptr_t forked = rank.transport.fork(rank.stream());
    require(forked != rank.stream(), "an asynchronous call runs on a stream of its own");
    const auto request = rank.transport.join(call, forked);
    std::atomic<int> told{0};
    request->on_done([&](std::exception_ptr error) { told = error ? 2 : 1; });
    usleep(5000);
    require(!request->done() && told == 0, "a call ended before what was ahead of it");
    expect_error(ErrorCode::kTimeout, "still in flight", [&] { request->wait(10); });
    Rank other(rank.rank, rank.transport);
    request->join(other.stream());
    require(cudaStreamQuery(other.cuda) == cudaErrorNotReady, "join makes a stream wait");
    gate.open();
    request->wait(0);
    require(request->done() && request->source() == -1, "the end of a call");
    for (const auto end = in(5000); told == 0 && TransportClock::now() < end;) usleep(200);
    require(told == 1, "the callback of a call");
    other.synchronize();
  });
  end_of_section("asynchronous");
}

void captures() {
  with_ranks(2, [](Rank& rank) {
    Call call;
    call.op = Op::kSend;
    call.root = 1 - rank.rank;
    call.stream = rank.stream();
    cudaStreamBeginCapture(rank.cuda, cudaStreamCaptureModeRelaxed);
    expect_error(ErrorCode::kUnsupported, "capture of a graph", [&] { rank.transport.enter(rank.stream()); });
    expect_error(ErrorCode::kUnsupported, "capture of a graph", [&] { rank.transport.fork(rank.stream()); });
    expect_error(ErrorCode::kUnsupported, "capture of a graph", [&] { rank.transport.message(call, 1000); });
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(rank.cuda, &graph) == cudaSuccess, "a refusal spoils no capture");
    cudaGraphDestroy(graph);
    cudaStreamBeginCapture(rank.cuda, cudaStreamCaptureModeRelaxed);
    require(cudaStreamSynchronize(rank.cuda) != cudaSuccess, "which a capture does not allow");
    expect_error(ErrorCode::kUnsupported, "capture of a graph", [&] { rank.transport.enter(rank.stream()); });
    require(cudaStreamEndCapture(rank.cuda, &graph) != cudaSuccess, "the capture was invalidated");
    exchange(rank, 2);
  });
  end_of_section("captures");
}

// ---- signatures

void signatures() {
  with_ranks(3, [](Rank& rank) {
    Heard heard;
    heard.listen(rank.transport);
    for (int i = 0; i < 20; ++i) {  // more than there is room for at first
      std::vector<CallSignature> same;
      for (int p = 0; p < 3; ++p)
        if (p != rank.rank) same.push_back({p, concat("call ", i, std::string(50, 'x'))});
      require(rank.transport.swap(same, in(20000), rank.stream()).empty(),
              "a device's transport does not wait for signatures");
    }
    exchange(rank, 3);
    require(!heard.await(20), "equal signatures are no failure");
    std::vector<CallSignature> mine;
    for (int p = 0; p < 3; ++p)
      if (p != rank.rank) mine.push_back({p, rank.rank == 2 ? "broadcast" : "allreduce"});
    rank.transport.swap(mine, in(20000), rank.stream());
    const auto failure = heard.await();
    require(failure && !failure->late && failure->mine == mine[0].mine && failure->theirs != failure->mine,
            "different signatures");
    require(rank.rank == 2 ? failure->peer < 2 : failure->peer == 2, "who made another call");
    expect_error(ErrorCode::kSystem, "another call", [&] {
      Call call;
      rank.transport.join(call, rank.stream())->wait(0);
    });
  });
  end_of_section("signatures");
}

// ---- what goes wrong

void nobody_comes() {
  with_ranks(2, [](Rank& rank) {
    if (rank.rank == 1) return;
    const TransportFailure failure = failure_of("a round without a peer", [&] { exchange(rank, 2, 200); });
    require(failure.late && failure.peer == 1, "the first round with a peer that does not come: " + failure.what);
    const TransportFailure past = failure_of("a round past its limit", [&] { exchange(rank, 2, -1); });
    require(past.late, "a limit that has passed");
    rank.transport.abort();
  });
  end_of_section("nobody_comes");
  const auto unique_ids = ids();
  NcclOptions alone = options_of(0, 2, unique_ids);
  alone.timeout_ms = 100;
  expect_error(ErrorCode::kTimeout, "all 2 ranks", [&] { make_nccl_transport(alone); });
  end_of_section("nobody_comes");
}

// The peer has come once, and then no more: that is on the device, where nobody waits on the host.
void stuck() {
  std::atomic<bool> over{false};
  with_ranks(3, [&](Rank& rank) {
    exchange(rank, 3);
    if (rank.rank == 1) {
      while (!over.load()) usleep(200);
      return;
    }
    Heard heard;
    heard.listen(rank.transport, true);
    std::int32_t* const data = device_memory<std::int32_t>(rank.transport, 400);
    Call call;
    call.op = Op::kBroadcast;
    std::unique_ptr<TransportExchange> opened;
    if (rank.rank == 0) {
      rank.transport.enter(rank.stream());
      const Round with_one = {{{1, data, 400}}, {}};
      opened = rank.transport.open(0, {with_one}, in(300), rank.stream());
      opened->start(0);
      opened->finish(0);
      rank.transport.leave(rank.stream(), call, 200);
      const auto request = rank.transport.join(call, rank.stream());
      const auto failure = heard.await();
      require(failure && failure->late && failure->peer == 1, "a transfer that does not end names the peer");
      rank.synchronize();  // the abort ends what is on the device
      require(request->done(), "an abort ends a request");
      expect_error(ErrorCode::kTimeout, "rank 1", [&] { request->wait(0); });
      failure_of("a call after an abort", [&] { exchange(rank, 3); });
      failure_of("signatures after an abort", [&] { rank.transport.swap({{1, "x"}}, in(1000), rank.stream()); });
      rank.transport.abort();
      over = true;
    }
    rank.transport.release(data);
  });
  end_of_section("stuck");
}

void errors() {
  with_ranks(2, [](Rank& rank) {
    exchange(rank, 2);
    if (rank.rank == 1) return;
    for (const char* call : {"send_error", "recv_error", "group_error"}) {
      fake_set((std::string(call) + "_rank").c_str(), 0);
      fake_set(call, 2);
      const TransportFailure failure = failure_of(call, [&] { exchange(rank, 2); });
      require(!failure.late && failure.peer == 1 && failure.what.find("ncclSystemError") != std::string::npos &&
                  failure.what.find(concat(call, " was asked for")) != std::string::npos,
              "what NCCL says: " + failure.what);
    }
    rank.transport.abort();
  });
  end_of_section("errors");
  with_ranks(2, [](Rank& rank) {
    exchange(rank, 2);
    if (rank.rank == 1) return;
    Heard heard;
    heard.listen(rank.transport, true);
    Call call;
    Gate gate(rank.cuda);
    rank.transport.enter(rank.stream());
    rank.transport.leave(rank.stream(), call, 20000);
    fake_set("async_error_rank", 0);
    fake_set("async_error", 6);
    const auto failure = heard.await();
    require(failure && !failure->late && failure->what.find("ncclRemoteError") != std::string::npos,
            "an error that NCCL finds by itself");
    gate.open();
  });
  end_of_section("errors");
  const auto starts = [](int code, const char* text) {
    fake_set("init_error", code);
    expect_error(ErrorCode::kSystem, text, [] { make_nccl_transport(options_of(0, 1, ids())); });
  };
  starts(2, "ncclCommInitRankConfig: rank 0 expected success, got unhandled system error (ncclSystemError)");
  starts(5, "NCCL_MULTI_RANK_GPU_ENABLE=1");
  fake_set("id_error", 2);
  expect_error(ErrorCode::kSystem, "ncclGetUniqueId", [] { ids(); });
  expect_error(ErrorCode::kInvalid, "expected 3 ids, got 1", [] { make_nccl_transport(options_of(0, 1, {"x"})); });
  expect_error(ErrorCode::kInvalid, "128 bytes", [] { make_nccl_transport(options_of(0, 1, {"x", "y", "z"})); });
  end_of_section("errors");
}

// ---- messages

struct Box {
  Rank& rank;
  std::size_t count;
  std::int32_t* data;
  Box(Rank& r, std::size_t n, std::int32_t value)
      : rank(r), count(n), data(device_memory<std::int32_t>(r.transport, n)) {
    for (std::size_t i = 0; i < count; ++i) data[i] = value;
  }
  ~Box() { rank.transport.release(data); }
  bool holds(std::int32_t value) const {
    for (std::size_t i = 0; i < count; ++i)
      if (data[i] != value) return false;
    return true;
  }
  std::shared_ptr<Request> go(Op op, int peer, int limit_ms = 20000) const {
    Call call;
    call.op = op;
    call.dtype = DType::kInt32;
    call.root = peer;
    call.output = data;
    call.input = data;
    call.count = count;
    call.stream = rank.stream();
    return rank.transport.message(call, limit_ms);
  }
};

void messages() {
  const auto made = with_ranks(2, [](Rank& rank) {
    const int peer = 1 - rank.rank;
    for (const int pause_us : {0, 5000}) {  // in one group, and in two
      const Box out(rank, 100000, rank.rank), in(rank, 100000, -1);
      const auto sent = out.go(Op::kSend, peer);
      usleep(pause_us);
      const auto got = in.go(Op::kRecv, peer);
      got->wait(0);
      sent->wait(0);
      require(in.holds(peer) && got->source() == peer && sent->source() == -1, "a message");
    }
    const Box first(rank, 3, 1), second(rank, 5, 2);
    const auto op = rank.rank == 0 ? Op::kSend : Op::kRecv;
    const auto a = first.go(op, peer), b = second.go(op, peer);
    a->join(rank.stream());
    b->join(rank.stream());
    rank.synchronize();
    require(first.holds(1) && second.holds(2), "messages stay in order");
    const Box any(rank, 3, 1);
    expect_error(ErrorCode::kUnsupported, "any rank", [&] { any.go(Op::kRecv, kAnySource); });
    Call tagged;
    tagged.op = Op::kSend;
    tagged.root = peer;
    tagged.tag = 7;
    expect_error(ErrorCode::kUnsupported, "tag 0, got 7", [&] { rank.transport.message(tagged, 1000); });
    require(rank.transport.sent_bytes() == (rank.rank == 0 ? 200008u : 200000u) * 4, "bytes of messages");
  });
  require(groups_of(made[0], 0).empty(), "messages have communicators of their own");
  end_of_section("messages");
  with_ranks(2, [](Rank& rank) {  // what was sent arrives though its sender closes at once
    const Box box(rank, 1000, rank.rank == 0 ? 42 : -1);
    if (rank.rank == 0) {
      box.go(Op::kSend, 1);
      rank.transport.close();
    } else {
      usleep(50000);
      box.go(Op::kRecv, 0)->wait(0);
      require(box.holds(42), "a message of a rank that has closed");
    }
  });
  end_of_section("messages");
}

void lost_messages() {
  std::atomic<bool> over{false};
  with_ranks(2, [&](Rank& rank) {
    if (rank.rank == 1) {
      while (!over.load()) usleep(200);
      return;
    }
    Heard heard;
    heard.listen(rank.transport, true);
    const Box box(rank, 10, 1);
    std::atomic<int> told{0};
    const auto request = box.go(Op::kRecv, 1, 200);
    request->on_done([&](std::exception_ptr error) { told = error ? 2 : 1; });
    expect_error(ErrorCode::kTimeout, "recv: rank 0 expected rank 1 to come in time", [&] { request->wait(0); });
    const auto failure = heard.await();
    require(failure && failure->late && failure->peer == 1, "a message that does not come names the peer");
    for (const auto end = in(5000); told == 0 && TransportClock::now() < end;) usleep(200);
    require(told == 2, "the callback of a message that does not come");
    over = true;
  });
  end_of_section("lost_messages");
}

struct Section {
  const char* name;
  void (*run)();
};
constexpr Section kSections[] = {
    {"schedules", schedules},
    {"streams", streams},
    {"asynchronous", asynchronous},
    {"captures", captures},
    {"signatures", signatures},
    {"nobody_comes", nobody_comes},
    {"stuck", stuck},
    {"errors", errors},
    {"messages", messages},
    {"lost_messages", lost_messages},
};

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const auto asked = [&](const char* name) {
    bool any = false;
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], "quick") == 0) continue;
      any = true;
      if (std::strcmp(argv[i], name) == 0) return true;
    }
    return !any;
  };
  for (const Section& section : kSections) {
    if (!asked(section.name)) continue;
    const auto started = std::chrono::steady_clock::now();
    section.run();
    std::printf("%s: %.2f s\n", section.name,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
    std::fflush(stdout);
  }
  std::printf("%ld checks\n", cells.load());
  return 0;
}
