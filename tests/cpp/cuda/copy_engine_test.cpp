// all_gather and all_to_all by copy engines: results, order among streams, memory that becomes visible, graphs; and
// what the ranks hear when something goes wrong.
//   cuda_copy_engine_test [quick] [names of sections]
#include <csignal>
#include <fstream>

#include "core/call/parts.h"
#include "cpp/cuda/engine_tools.h"

namespace ringcomm::test {
namespace {

// Memory of the device that is the thread's: the communicator's, cudaMalloc's, or the host's, which no peer sees.
enum class From { kEngine, kMalloc, kHost };
class Memory {
 public:
  Memory(Engine& engine, std::size_t count, From from) : engine_(engine), from_(from) {
    if (from == From::kEngine)
      data_ = static_cast<float*>(engine.allocate(count * sizeof(float)));
    else if (from == From::kMalloc)
      require(cudaMalloc(&data_, count * sizeof(float)) == cudaSuccess, "cudaMalloc");
    else
      data_ = static_cast<float*>(std::malloc(count * sizeof(float)));
  }
  ~Memory() {
    if (from_ == From::kEngine)
      engine_.release(data_);
    else if (from_ == From::kMalloc)
      cudaFree(data_);
    else
      std::free(data_);
  }
  Memory(const Memory&) = delete;
  float* get() const { return data_; }

 private:
  Engine& engine_;
  From from_;
  float* data_ = nullptr;
};

std::string described(Engine& engine) {
  for (const auto& [key, value] : engine.describe())
    if (key == "copy_engine") return value;
  return "";
}
long all_copies(Engine& engine) { return std::strtol(described(engine).c_str(), nullptr, 10); }
long by_direct(Engine& engine) {
  const std::string text = described(engine);
  return std::strtol(text.c_str() + text.find(", ") + 2, nullptr, 10);
}

float value_of(int rank, int to, std::size_t i, int round) {
  return static_cast<float>(rank * 1000 + to * 100 + round) + static_cast<float>(i % 1024) / 1024.f;
}

// `count` elements are those that rank `from` has for `to`.
void check(const float* got, std::size_t count, int from, int to, int round, const char* what, int rank) {
  for (std::size_t i = 0; i < count; ++i)
    if (got[i] != value_of(from, to, i, round))
      require(false, concat(what, " at rank ", rank, ", element ", i, " from rank ", from, ": ", got[i]));
}

Call gather_of(const float* in, float* out, std::size_t count) {
  Call call;
  call.op = Op::kAllGather;
  call.dtype = DType::kFloat32;
  call.algorithm = Algorithm::kCopyEngine;
  call.input = in;
  call.output = out;
  call.count = count;
  call.stream = stream;
  return call;
}

// One call of each kind, and its result. `to` of an all_gather is always 0.
void gather(Engine& engine, float* in, float* out, std::size_t count, int round) {
  const int rank = engine.rank();
  for (std::size_t i = 0; i < count; ++i) in[i] = value_of(rank, 0, i, round);
  run(engine, gather_of(in, out, count));
  for (int p = 0; p < engine.world_size(); ++p) check(out + p * count, count, p, 0, round, "all_gather", rank);
}
void exchange(Engine& engine, float* in, float* out, std::size_t count, int round) {
  const int rank = engine.rank(), w = engine.world_size();
  for (int p = 0; p < w; ++p)
    for (std::size_t i = 0; i < count; ++i) in[p * count + i] = value_of(rank, p, i, round);
  Call call = gather_of(in, out, count);
  call.op = Op::kAllToAll;
  run(engine, call);
  for (int p = 0; p < w; ++p) check(out + p * count, count, p, rank, round, "all_to_all", rank);
}
// Rank a sends b (a + 2b) elements.
void uneven(Engine& engine, float* in, float* out, int round) {
  const int rank = engine.rank(), w = engine.world_size();
  const auto count = [](int from, int to) { return static_cast<std::size_t>(to * (from + 2 * to)) * 7; };
  Call call = gather_of(nullptr, nullptr, 0);
  call.op = Op::kAllToAll;
  for (int p = 0; p < w; ++p) {
    for (std::size_t i = 0; i < count(rank, p); ++i) in[i] = value_of(rank, p, i, round);
    call.input_parts.push_back({in, count(rank, p)});
    call.output_parts.push_back({out, count(p, rank)});
    in += count(rank, p) + 3;
    out += count(p, rank) + 5;
  }
  run(engine, call);
  for (int p = 0; p < w; ++p)
    check(static_cast<float*>(call.output_parts[p].data), count(p, rank), p, rank, round, "uneven all_to_all", rank);
}

void results(Engine& engine, From from, bool own_stream = true) {
  const int w = engine.world_size();
  const std::size_t most = 40000;
  const Memory in(engine, most * w, from), out(engine, most * w, from);
  std::unique_ptr<OwnStream> own;
  stream = 0;
  if (own_stream) own = std::make_unique<OwnStream>();
  int round = 0;
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{1000}, most}) {
    gather(engine, in.get(), out.get(), count, ++round);
    exchange(engine, in.get(), out.get(), count, ++round);
    gather(engine, out.get() + engine.rank() * count, out.get(), count, ++round);  // in place
    exchange(engine, in.get(), out.get(), count, ++round);
  }
  uneven(engine, in.get(), out.get(), ++round);
  std::vector<float> sum(100, 1.f);
  run(engine, all_reduce_of(sum));  // between them
  require(sum[99] == static_cast<float>(w), "a sum between copies");
  gather(engine, in.get(), out.get(), 20000, ++round);
}

// In place: everybody goes by direct.
void in_place(Engine& engine, From from) {
  const OwnStream own;
  const int w = engine.world_size(), rank = engine.rank();
  const Memory data(engine, 1000 * w, from);
  for (int p = 0; p < w; ++p)
    for (std::size_t i = 0; i < 1000; ++i) data.get()[p * 1000 + i] = value_of(rank, p, i, 0);
  Call call = gather_of(data.get(), data.get(), 1000);
  call.op = Op::kAllToAll;
  const long before = by_direct(engine);
  run(engine, call);
  require(by_direct(engine) == before + 1, "in place goes by direct");
  for (int p = 0; p < w; ++p) check(data.get() + p * 1000, 1000, p, rank, 0, "all_to_all in place", rank);
}

// Calls one after the other with no host in between, whose inputs the stream writes anew before each.
void order(Engine& engine) {
  const OwnStream own;
  const int w = engine.world_size(), rank = engine.rank();
  const std::size_t count = 30000;
  const int rounds = quick ? 12 : 40;
  const Memory in(engine, count, From::kEngine), out(engine, count * w, From::kEngine);
  const long before = all_copies(engine);
  std::vector<std::vector<float>> values, seen(rounds, std::vector<float>(count * w));
  for (int k = 0; k < rounds; ++k) values.emplace_back(count, value_of(rank, 0, 0, k));
  for (int k = 0; k < rounds; ++k) {
    if (k % 3 == rank % 3)  // this one's stream is late
      require(
          cudaLaunchHostFunc(OwnStream::get(), [](void*) { usleep(2000); }, nullptr) == cudaSuccess, "a late stream");
    require(cudaMemcpyAsync(in.get(), values[k].data(), count * sizeof(float), cudaMemcpyDefault, OwnStream::get()) ==
                cudaSuccess,
            "the input");
    engine.run(gather_of(in.get(), out.get(), count));
    require(cudaMemcpyAsync(seen[k].data(), out.get(), seen[k].size() * sizeof(float), cudaMemcpyDefault,
                            OwnStream::get()) == cudaSuccess,
            "the output");
  }
  engine.synchronize(stream);
  for (int k = 0; k < rounds; ++k)
    for (int p = 0; p < w; ++p)
      for (std::size_t i = 0; i < count; ++i)
        if (const float got = seen[k][p * count + i]; got != value_of(p, 0, 0, k))
          require(false, concat("rank ", rank, ", call ", k, ": ", got, " from rank ", p));
  require(by_direct(engine) == 0 && all_copies(engine) == before + rounds, "all by copies: " + described(engine));
}

// Ordinary memory is visible after a few calls; that of the host never is. Requests, and another stream.
void becomes_visible(Engine& engine) {
  results(engine, From::kMalloc);
  {
    const OwnStream own;
    const Memory in(engine, 40000, From::kMalloc), out(engine, 40000 * engine.world_size(), From::kMalloc);
    for (int k = 0; k < 20; ++k) gather(engine, in.get(), out.get(), 40000, k);
    const long before = by_direct(engine), calls = all_copies(engine);
    for (int k = 0; k < 5; ++k) gather(engine, in.get(), out.get(), 40000, k);
    require(by_direct(engine) == before && all_copies(engine) == calls + 5,
            "visible after a while: " + described(engine));
    const auto request = engine.submit(gather_of(in.get(), out.get(), 40000));
    request->wait();
    const OwnStream other;
    run(engine, gather_of(in.get(), out.get(), 30000));
  }
  const long before = by_direct(engine), calls = all_copies(engine);
  results(engine, From::kHost);
  require(by_direct(engine) - before > 8 && all_copies(engine) > calls, "private memory goes by direct");
  in_place(engine, From::kEngine);
  engine.close();
}

void of_processes(Engine& engine) {
  results(engine, From::kEngine);
  results(engine, From::kEngine, false);
  require(by_direct(engine) == 0, "all by copies: " + described(engine));
  engine.close();
}

// By the tuning file alone.
void tuned() {
  const std::string path = concat("/tmp/ringcomm-tuning-", getpid());
  std::ofstream(path) << "all_gather 2 max copy_engine 0 0\n";
  setenv("RINGCOMM_TUNING", path.c_str(), 1);
  {
    const auto engines = make_ranks(2);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r)
      threads.emplace_back([&, r] {
        const OwnStream own;
        std::vector<float> in(100, static_cast<float>(r)), out(200);
        Call call = gather_of(in.data(), out.data(), 100);
        call.algorithm = Algorithm::kAuto;
        run(*engines[r], call);
        call.op = Op::kAllToAll;
        call.count = 50;
        run(*engines[r], call);
        require(out[99] == 1.f, "a tuned call");
        require(all_copies(*engines[r]) == 1, "the tuning file says when");
      });
    for (auto& thread : threads) thread.join();
  }
  unlink(path.c_str());
}

// One thread drives all ranks, on one stream, eagerly and in a graph that is replayed with other data.
void team_graph() {
  constexpr int kRanks = 3;
  constexpr std::size_t kCount = 777;
  const auto engines = make_ranks(kRanks);
  const OwnStream own;
  std::vector<std::vector<float>> in(kRanks, std::vector<float>(kCount)),
      out(kRanks, std::vector<float>(kRanks * kCount));
  const auto fill = [&](float value) {
    for (int r = 0; r < kRanks; ++r) in[r].assign(kCount, value + static_cast<float>(r));
  };
  const auto call_all = [&] {
    std::vector<std::shared_ptr<Request>> requests;
    for (int r = 0; r < kRanks; ++r)
      requests.push_back(engines[r]->submit(gather_of(in[r].data(), out[r].data(), kCount)));
    return requests;
  };
  const auto check = [&](float want, const char* what) {
    for (int r = 0; r < kRanks; ++r)
      for (int p = 0; p < kRanks; ++p)
        require(out[r][p * kCount + kCount - 1] == want + static_cast<float>(p), concat(what, " at rank ", r));
  };
  fill(1.f);
  for (const auto& request : call_all()) request->wait();
  check(1.f, "one thread");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  require(cudaStreamBeginCapture(OwnStream::get(), cudaStreamCaptureModeGlobal) == cudaSuccess, "begin capture");
  call_all();
  require(cudaStreamEndCapture(OwnStream::get(), &graph) == cudaSuccess, "end capture");
  require(cudaGraphInstantiate(&exec, graph) == cudaSuccess, "instantiate");
  for (int i = 0; i < 3; ++i) {
    fill(static_cast<float>(10 * i));
    require(cudaGraphLaunch(exec, OwnStream::get()) == cudaSuccess, "replay");
    require(cudaStreamSynchronize(OwnStream::get()) == cudaSuccess, "the replay ends");
    check(static_cast<float>(10 * i), "replay");
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

void on_two_devices(int ranks_per_device, const RankFunction& function, EngineOptions options = short_timeout()) {
  const int world_size = 2 * ranks_per_device;
  const auto engines = make_ranks(world_size, options, ranks_per_device);
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r)
    threads.emplace_back([&, r] {
      require(cudaSetDevice(r / ranks_per_device) == cudaSuccess, "a second device");
      function(*engines[r]);
    });
  for (auto& thread : threads) thread.join();
}

// ---- what goes wrong

// A capture is refused before anything is sent, and auto goes by kernels; so do streams that cannot wait for words.
void refusals(Engine& engine, bool able) {
  const OwnStream own;
  const Memory in(engine, 1000, From::kEngine), out(engine, 1000 * engine.world_size(), From::kEngine);
  Call call = gather_of(in.get(), out.get(), 1000);
  if (!able) {
    throws(ErrorCode::kUnsupported, {"all_gather: rank", "copy_engine", "cuStreamBatchMemOp", "on rank 0"},
           "no such device", [&] { engine.run(call); });
  } else {
    cudaGraph_t graph;
    require(cudaStreamBeginCapture(OwnStream::get(), cudaStreamCaptureModeThreadLocal) == cudaSuccess, "begin capture");
    throws(ErrorCode::kUnsupported, {"all_gather: rank", "copy_engine", "a capture into a graph", "on rank 0"},
           "a capture", [&] { engine.run(call); });
    cudaStreamEndCapture(OwnStream::get(), &graph);
    cudaGraphDestroy(graph);
  }
  require(!engine.aborted(), "nothing was sent");
  call.algorithm = Algorithm::kAuto;
  run(engine, call);
  call = all_reduce_of(*std::make_unique<std::vector<float>>(10));
  call.algorithm = Algorithm::kCopyEngine;
  throws(ErrorCode::kUnsupported, {"all_reduce: rank", "only all_gather and all_to_all"}, "a sum by copies",
         [&] { engine.run(call); });
  engine.close();
}

void mismatch(Engine& engine) {
  const OwnStream own;
  const Memory in(engine, 1000, From::kEngine), out(engine, 2000, From::kEngine);
  gather(engine, in.get(), out.get(), 1000, 0);
  const std::size_t count = engine.rank() == 0 ? 99 : 100;
  throws(ErrorCode::kMismatch,
         {"all_gather: rank", "198 x float32, copy_engine", "200 x float32, copy_engine", "same calls"}, "other counts",
         [&] { run(engine, gather_of(in.get(), out.get(), count)); });
  throws(ErrorCode::kMismatch, {"198 x float32"}, "after a mismatch",
         [&] { run(engine, gather_of(in.get(), out.get(), 100)); });
  engine.close();
}

void uneven_mismatch(Engine& engine) {
  const OwnStream own;
  const Memory in(engine, 1000, From::kEngine), out(engine, 1000, From::kEngine);
  Call call = gather_of(nullptr, nullptr, 0);
  call.op = Op::kAllToAll;
  const int rank = engine.rank();
  for (std::size_t p = 0; p < 2; ++p) {
    call.input_parts.push_back({in.get() + 100 * p, 10});
    call.output_parts.push_back({out.get() + 100 * p, rank == 1 && p == 0 ? 11u : 10u});
  }
  try {
    run(engine, call);
    require(false, "parts that differ: no error");
  } catch (const Error& error) {
    const bool told = error.code() == ErrorCode::kMismatch && std::strstr(error.what(), "rank 1 expected 44 bytes");
    require(told || (rank == 0 && ends_communicator(error.code())), error.what());
  }
  engine.close();
}

// A rank calls a kernel where the other calls for copies: both hear of it, the latest when the limit passes.
void other_algorithm(Engine& engine) {
  const OwnStream own;
  const Memory in(engine, 1000, From::kEngine), out(engine, 2000, From::kEngine);
  gather(engine, in.get(), out.get(), 1000, 0);
  Call call = gather_of(in.get(), out.get(), 1000);
  if (engine.rank() == 1) {
    usleep(100000);  // the message of rank 0 has come
    call.algorithm = Algorithm::kDirect;
  }
  try {
    run(engine, call);
    require(false, "another algorithm: no error");
  } catch (const Error& error) {
    require(ends_communicator(error.code()), error.what());
    if (engine.rank() == 1)
      require(error.code() == ErrorCode::kMismatch && std::strstr(error.what(), "2000 x float32, copy_engine") &&
                  std::strstr(error.what(), "2000 x float32, direct"),
              error.what());
  }
  engine.close();
}

void absent(Engine& engine) {
  const OwnStream own;
  const Memory in(engine, 1000, From::kEngine), out(engine, 2000, From::kEngine);
  gather(engine, in.get(), out.get(), 1000, 0);
  if (engine.rank() == 1) {
    usleep(1500000);
    return;
  }
  throws(ErrorCode::kTimeout, {"all_gather: rank 0 expected rank 1 to come to this call within 0.5 s"},
         "an absent rank", [&] { run(engine, gather_of(in.get(), out.get(), 1000)); });
  throws(ErrorCode::kTimeout, {"rank 1"}, "the next call", [&] { run(engine, gather_of(in.get(), out.get(), 1000)); });
}

// The host of rank 1 comes, its stream does not: the stream of rank 0 waits, and is let go. What rank 1 gets of it
// counts for nothing.
void late_stream(Engine& engine) {
  const OwnStream own;
  const Memory in(engine, 1000, From::kEngine), out(engine, 2000, From::kEngine);
  gather(engine, in.get(), out.get(), 1000, 0);
  if (engine.rank() == 1) {
    require(
        cudaLaunchHostFunc(OwnStream::get(), [](void*) { usleep(2000000); }, nullptr) == cudaSuccess, "a late stream");
    const auto request = submit(engine, gather_of(in.get(), out.get(), 1000));
    try {
      request->wait(20000);
      require(false, "a rank that its peer has given up: no error");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kAborted, error.what());
    }
    require(engine.aborted(), "it knows");
  } else {
    const auto request = submit(engine, gather_of(in.get(), out.get(), 1000));
    throws(ErrorCode::kTimeout, {"all_gather: rank 0 expected the stream of rank 1 to come to this call within 0.5 s"},
           "a late stream", [&] { request->wait(); });
    require(cudaStreamSynchronize(OwnStream::get()) == cudaSuccess, "the stream was let go");
  }
  engine.close();
}

// The same, ended by an abort from another thread, long before the limit.
void abort_of_waits(Engine& engine) {
  const OwnStream own;
  const Memory in(engine, 1000, From::kEngine), out(engine, 2000, From::kEngine);
  gather(engine, in.get(), out.get(), 1000, 0);
  if (engine.rank() == 1)
    require(
        cudaLaunchHostFunc(OwnStream::get(), [](void*) { usleep(1000000); }, nullptr) == cudaSuccess, "a late stream");
  const auto request = submit(engine, gather_of(in.get(), out.get(), 1000));
  if (engine.rank() == 0) {
    usleep(50000);
    engine.abort("enough");
    require(cudaStreamSynchronize(OwnStream::get()) == cudaSuccess, "the stream was let go");
  }
  throws(ErrorCode::kAborted, {}, "an abort", [&] { request->wait(); });
  engine.close();
}

// Who waits for an answer on the host hears of an abort, and of a process that has ended.
void abort_of_messages(Engine& engine) {
  const OwnStream own;
  const Memory in(engine, 1000, From::kEngine), out(engine, 2000, From::kEngine);
  if (engine.rank() == 1) {
    usleep(200000);
    engine.abort("enough");
    return;
  }
  throws(ErrorCode::kAborted, {"all_gather: rank 0", "abort"}, "an abort elsewhere",
         [&] { run(engine, gather_of(in.get(), out.get(), 1000)); });
}

void death(bool in_stream) {
  run_processes(
      2,
      [in_stream](Engine& engine) {
        const OwnStream own;
        const Memory in(engine, 1000, From::kEngine), out(engine, 2000, From::kEngine);
        gather(engine, in.get(), out.get(), 1000, 0);
        if (engine.rank() == 1) {
          if (in_stream) {
            require(
                cudaLaunchHostFunc(OwnStream::get(), [](void*) { usleep(9000000); }, nullptr) == cudaSuccess, "late");
            submit(engine, gather_of(in.get(), out.get(), 1000));
          }
          raise(SIGKILL);
        }
        const auto call = [&] { run(engine, gather_of(in.get(), out.get(), 1000)); };
        if (in_stream)
          throws(ErrorCode::kTimeout, {"expected the stream of rank 1"}, "a rank that died after its message", call);
        else
          throws(ErrorCode::kRankLost, {"rank 0 expected rank 1 (process", "has exited"}, "a rank that died", call);
      },
      limit(1500), 1);
}

std::vector<Section> sections() {
  const auto of_threads = [](int w, const RankFunction& function) { return [=] { run_threads(w, function); }; };
  const std::vector<std::pair<const char*, const char*>> none, one{{"RINGCOMM_EMULATED_DEVICES", "1"}};
  return {
      {"threads",
       of_threads(3,
                  [](Engine& e) {
                    results(e, From::kHost);
                    results(e, From::kHost, false);
                    require(by_direct(e) == 0, "all by copies: " + described(e));
                    in_place(e, From::kHost);
                    e.close();
                  }),
       none},
      {"apart", of_threads(3, [](Engine& e) { results(e, From::kHost), in_place(e, From::kHost), e.close(); }), kApart},
      {"private", of_threads(2, [](Engine& e) { results(e, From::kHost), e.close(); }), {{"RINGCOMM_CUDA_APART", "2"}}},
      {"order_threads", of_threads(3, [](Engine& e) { order(e), e.close(); }), none},
      {"tuned", tuned, none},
      {"team_graph", team_graph, none},
      {"two_devices", [] { on_two_devices(1, [](Engine& e) { becomes_visible(e); }); }, none},
      {"two_pairs",
       [] {
         on_two_devices(2, [](Engine& e) {
           results(e, From::kMalloc);
           results(e, From::kMalloc, false);
           require(by_direct(e) == 0, "all by copies: " + described(e));
           order(e), e.close();
         });
       },
       none},
      {"order_devices", [] { on_two_devices(1, [](Engine& e) { order(e), e.close(); }); }, none},
      {"late_stream_devices", [] { on_two_devices(1, late_stream, limit(500)); }, none},
      {"processes", processes(3, of_processes), none, true},
      {"visible_processes", processes(2, becomes_visible), none, true},
      {"order_processes", processes(3, [](Engine& e) { order(e), e.close(); }), none, true},
      {"refused_capture", processes(2, [](Engine& e) { refusals(e, true); }), none, true},
      {"refused_device",
       processes(2, [](Engine& e) { refusals(e, false); }),
       {{"RINGCOMM_EMULATED_NO_MEM_OPS", "1"}},
       true},
      {"mismatch", processes(2, mismatch), none, true},
      {"uneven_mismatch", processes(2, uneven_mismatch), none, true},
      {"other_algorithm", processes(2, other_algorithm, 1500), none, true},
      {"absent", processes(2, absent, 500), none, true},
      {"late_stream", processes(2, late_stream, 500), none, true},
      {"abort_of_waits", processes(2, abort_of_waits), none, true},
      {"abort_of_messages", processes(2, abort_of_messages), none, true},
      {"death", [] { death(false); }, none, true},
      {"death_in_stream", [] { death(true); }, none, true},
  };
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  run_sections("cuda_copy_engine_test", sections(), argc, argv);
}
