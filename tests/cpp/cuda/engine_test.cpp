// The cuda engine on an emulated GPU: every collective against the reference, with ranks as threads that share one
// device (launches that know all pointers, and launches that go about it as if they did not), as threads on two devices
// and as processes; then streams, graphs, one thread for all ranks, messages, lists.
//   cuda_engine_test [quick] [names of sections]
#include <condition_variable>
#include <mutex>

#include "cpp/cuda/engine_tools.h"
#include "cpp/engine_matrix.h"

namespace ringcomm::test {
namespace {

// ---- the matrix

void threads_matrix() {
  for (int w : quick ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3, 8})
    run_threads(w, on_own_stream([](Engine& e) { matrix(e, true); }));
}
void processes_matrix() {
  for (int w : quick ? std::vector<int>{2} : std::vector<int>{2, 3})
    run_processes(w, on_own_stream([](Engine& e) { matrix(e, true, false); }));
}
// Two devices with two ranks each: each pair launches for itself, and their blocks wait for each other.
void two_devices() {
  const auto engines = make_ranks(4, short_timeout(), 2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 4; ++r)
    threads.emplace_back([&, r] {
      require(cudaSetDevice(r / 2) == cudaSuccess, "a second device");
      on_own_stream([](Engine& e) { matrix(e, true); })(*engines[r]);
    });
  for (auto& thread : threads) thread.join();
}
void windows() {
  for (int w : {2, 3, 5}) run_threads(w, on_own_stream(many_windows));
}

// ---- streams and graphs

// Every call on a stream of its own, no host in between: the calls of a communicator keep their order.
void several_streams(Engine& engine) {
  const OwnStream first;
  const std::uintptr_t one = stream;
  const OwnStream second;
  std::vector<float> data(1000, static_cast<float>(engine.rank() + 1));
  for (int i = 0; i < 8; ++i) engine.run(all_reduce_of(data, i % 2 ? one : stream));
  engine.synchronize(one);
  float want = static_cast<float>(engine.world_size() * (engine.world_size() + 1) / 2);
  for (int i = 1; i < 8; ++i) want *= static_cast<float>(engine.world_size());
  for (const float x : data) require(x == want, concat("two streams: ", x, " for ", want));
}

// Two threads pass it together.
class Gate {
 public:
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int mine = came_++ / 2;
    if (came_ % 2 == 0) changed_.notify_all();
    changed_.wait(lock, [&] { return came_ >= 2 * (mine + 1); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int came_ = 0;
};

// What a call asks of the runtime and the driver, on both ranks together, once everything has been made: by streams of
// the ranks' own and by the default one, where nobody waits for what is on his own stream already.
void host_calls() {
  constexpr int kTimes = 30;
  const auto engines = make_ranks(2);
  // All ranks call kTimes times; nothing that they do to prepare or to end is counted.
  const auto counted = [&](bool own_stream, const std::function<void(Engine&, const Call&)>& act) {
    Gate gate;
    long before = 0, after = 0;
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r)
      threads.emplace_back([&, r] {
        require(cudaSetDevice(0) == cudaSuccess, "device 0");
        const OwnStream own;
        std::vector<float> data(100, 1.f);
        const Call call = all_reduce_of(data, own_stream ? stream : 0);
        for (int i = 0; i < 3; ++i) act(*engines[r], call);
        gate.pass();
        if (r == 0) before = emulator::calls_so_far();
        gate.pass();
        for (int i = 0; i < kTimes; ++i) {
          act(*engines[r], call);
          gate.pass();
        }
        if (r == 0) after = emulator::calls_so_far();
        gate.pass();
        require(cudaDeviceSynchronize() == cudaSuccess, "the end");
      });
    for (auto& thread : threads) thread.join();
    return (after - before) / kTimes;  // whole: the pool of events may still grow
  };
  const auto run_one = [](Engine& engine, const Call& call) { engine.run(call); };
  const auto submit_and_join = [](Engine& engine, const Call& call) { engine.submit(call)->join(call.stream); };
  const std::pair<const char*, std::pair<long, long>> costs[] = {
      {"run on own streams", {counted(true, run_one), 12}},
      {"run on the default stream", {counted(false, run_one), 8}},
      {"submit and join on own streams", {counted(true, submit_and_join), 17}},
      {"submit and join on the default stream", {counted(false, submit_and_join), 9}}};
  for (const auto& [name, cost] : costs) std::printf("%s: %ld\n", name, cost.first);
  for (const auto& [name, cost] : costs)
    require(cost.first == cost.second, concat(name, ": ", cost.first, " calls of the runtime, not ", cost.second));
}

// Nobody else has a lent stream; what has been given back is lent again, by another engine too.
void lent_streams() {
  const auto engines = make_ranks(2, short_timeout(), 1);
  const std::uintptr_t first = engines[0]->lend_stream(), second = engines[0]->lend_stream();
  require(first && second && first != second, "two lent streams");
  engines[0]->take_back_stream(first);
  require(engines[1]->lend_stream() != first, "a stream of another device");
  require(make_ranks(1)[0]->lend_stream() == first, "a stream that was given back");
}

// Ranks of device 1 whose threads have a context of their own current, as CuPy and green contexts do: it is current
// after each call, and nothing makes a context on the usual device 0.
void contexts() {
  EngineOptions options = short_timeout();
  options.device = 1;
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < 2; ++r) engines.push_back(make_cuda_engine(r, 2, options));
  const std::vector<std::string> handles{engines[0]->handle(), engines[1]->handle()};
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      CUctx_st own{1, false};
      CUcontext primary = nullptr, now = nullptr;
      require(cudaSetDevice(1) == cudaSuccess && cuCtxGetCurrent(&primary) == cudaSuccess, "the primary context");
      const OwnStream mine;
      std::vector<float> data(100, 1.f);
      void* memory = nullptr;
      std::shared_ptr<Request> request;
      std::uintptr_t lane = 0;
      Call message = all_reduce_of(data);
      message.op = r == 0 ? Op::kSend : Op::kRecv;
      message.root = 1 - r;
      (r == 0 ? message.output : const_cast<void*&>(message.input)) = nullptr;
      const std::pair<const char*, std::function<void()>> steps[] = {
          {"connect", [&] { engines[r]->connect(handles); }},
          {"run", [&] { engines[r]->run(all_reduce_of(data)); }},
          {"submit", [&] { request = engines[r]->submit(all_reduce_of(data)); }},
          {"join", [&] { request->join(stream); }},
          {"wait", [&] { request->wait(0); }},
          {"a message", [&] { engines[r]->run(message); }},
          {"allocate", [&] { memory = engines[r]->allocate(100); }},
          {"release", [&] { engines[r]->release(memory); }},
          {"a lent stream", [&] { lane = engines[r]->lend_stream(); }},
          {"a call there", [&] { engines[r]->run(all_reduce_of(data, lane)); }},
          {"synchronize", [&] { engines[r]->synchronize(lane); }},
          {"its return", [&] { engines[r]->take_back_stream(lane); }},
          {"close", [&] { engines[r]->close(); }},
          {"the end", [&] { engines[r].reset(); }}};
      require(cuCtxSetCurrent(&own) == cudaSuccess, "a context of one's own");
      for (const auto& [name, step] : steps) {
        step();
        require(cuCtxGetCurrent(&now) == cudaSuccess && now == &own, concat("the context after ", name));
      }
      require(cuCtxSetCurrent(primary) == cudaSuccess, "the primary context again");
    });
  for (auto& thread : threads) thread.join();
  require(emulator::has_context(1) && !emulator::has_context(0), "a context on device 0");
}

// The second communicator's calls come between those of the first, in another order on every rank's streams.
void two_communicators() {
  const auto a = make_ranks(3), b = make_ranks(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      const OwnStream mine;
      const std::uintptr_t first = stream;
      const OwnStream other;
      std::vector<float> x(5000, 1.f), y(3000, 2.f);
      for (int i = 0; i < 3; ++i) {
        const auto request = a[r]->submit(all_reduce_of(x, first));
        b[r]->run(all_reduce_of(y, stream));
        request->wait();
      }
      b[r]->synchronize(stream);
      require(x[0] == 27.f && y[2999] == 54.f, "two communicators");
    });
  for (auto& thread : threads) thread.join();
}

// One thread drives all ranks, on one stream, eagerly and in a graph that is replayed with other data.
void single_thread() {
  constexpr int kRanks = 3;
  const auto engines = make_ranks(kRanks);
  const OwnStream own;
  std::vector<std::vector<float>> data(kRanks, std::vector<float>(777));
  const auto fill = [&](float value) {
    for (int r = 0; r < kRanks; ++r) data[r].assign(777, value + static_cast<float>(r));
  };
  const auto call_all = [&] {
    std::vector<std::shared_ptr<Request>> requests;
    for (int r = 0; r < kRanks; ++r) requests.push_back(engines[r]->submit(all_reduce_of(data[r])));
    for (const auto& request : requests) request->join(stream);
    Call message;
    message.dtype = DType::kFloat32;
    message.count = 777;
    message.stream = stream;
    message.op = Op::kSend;
    message.root = 2;
    message.input = data[0].data();
    requests.push_back(engines[0]->submit(message));
    message.op = Op::kRecv;
    message.root = kAnySource;
    message.output = data[2].data();
    requests.push_back(engines[2]->submit(message));
    requests.back()->join(stream);
    Call barrier;
    barrier.stream = stream;
    for (int r = 0; r < kRanks; ++r) requests.push_back(engines[r]->submit(barrier));
    return requests;
  };
  const auto check = [&](float want, const char* what) {
    for (int r = 0; r < kRanks; ++r)
      for (const float x : data[r]) require(x == want, concat(what, ": ", x, " for ", want, " at rank ", r));
  };
  fill(1.f);
  for (const auto& request : call_all()) request->wait();
  check(6.f, "one thread");

  cudaGraph_t graph;
  cudaGraphExec_t exec;
  require(cudaStreamBeginCapture(OwnStream::get(), cudaStreamCaptureModeGlobal) == cudaSuccess, "begin capture");
  fill(100.f);
  for (const auto& request : call_all()) {
    require(request->done(), "what is captured counts as done");
    request->wait();
  }
  require(cudaStreamEndCapture(OwnStream::get(), &graph) == cudaSuccess, "end capture");
  require(data[0][0] == 100.f && data[1][776] == 101.f, "nothing has run yet");
  require(cudaGraphInstantiate(&exec, graph) == cudaSuccess, "instantiate");
  for (int i = 0; i < 3; ++i) {
    fill(static_cast<float>(10 * i));
    require(cudaGraphLaunch(exec, OwnStream::get()) == cudaSuccess, "replay");
    require(cudaStreamSynchronize(OwnStream::get()) == cudaSuccess, "the replay ends");
    check(static_cast<float>(30 * i + 3), "replay");
    fill(7.f);  // and between the replays an ordinary call
    for (const auto& request : call_all()) request->wait();
    check(24.f, "between replays");
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

// Graphs where the kernels count their calls, and wait for each other: captured by every process, replayed together.
void graphs_of_processes(Engine& engine) {
  const OwnStream own;
  std::vector<float> data(3000), sum(3000);
  Call call = all_reduce_of(data);
  call.output = sum.data();
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  require(cudaStreamBeginCapture(OwnStream::get(), cudaStreamCaptureModeThreadLocal) == cudaSuccess, "begin capture");
  engine.run(call);
  call.algorithm = Algorithm::kDirect;
  call.input = sum.data();
  engine.run(call);
  require(cudaStreamEndCapture(OwnStream::get(), &graph) == cudaSuccess, "end capture");
  require(cudaGraphInstantiate(&exec, graph) == cudaSuccess, "instantiate");
  const auto w = static_cast<float>(engine.world_size());
  for (int i = 1; i <= 3; ++i) {
    data.assign(3000, static_cast<float>(i));
    require(cudaGraphLaunch(exec, OwnStream::get()) == cudaSuccess, "replay");
    engine.synchronize(stream);
    for (const float x : sum) require(x == static_cast<float>(i) * w * w, concat("replay ", i, ": ", x));
    std::vector<float> other(100, 1.f);
    run(engine, all_reduce_of(other));
    require(other[99] == w, "between replays");
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  engine.close();
}

// ---- sends and receives, lists, packing, memory

void message_orders(Engine& engine) {
  const OwnStream own;
  const int rank = engine.rank();
  std::vector<float> data(64, static_cast<float>(rank)), got(64);
  Call call;
  call.dtype = DType::kFloat32;
  call.count = 64;
  if (rank != 0) {
    call.op = Op::kSend;
    call.root = 0;
    call.tag = rank;
    call.input = data.data();
    run(engine, call);
    call.tag = 9;
    call.count = 32;
    throws(ErrorCode::kMismatch, {"expected 256 bytes of float32 with tag 9", "sent 128 bytes"}, "a wrong size",
           [&] { run(engine, call); });
    call.count = 64;
    call.tag = 10;
    run(engine, call);
    return;
  }
  call.op = Op::kRecv;
  call.output = got.data();
  for (int source : {2, 1}) {
    call.tag = source;
    call.root = source == 2 ? kAnySource : 1;
    require(run(engine, call) == source, "the source of a message");
    require(got[63] == static_cast<float>(source), "a message");
  }
  for (int source : {1, 2}) {
    call.root = source;
    call.tag = 9;
    throws(ErrorCode::kMismatch, {"expected 256 bytes of float32 with tag 9", "sent 128 bytes"}, "a wrong size",
           [&] { run(engine, call); });
    call.tag = 10;
    run(engine, call);
    require(got[0] == static_cast<float>(source), "the message after a wrong one");
  }
}

// Both ends on the default stream, which has one handle on all devices: what follows on it sees the message.
void messages_of_two_devices() {
  const auto engines = make_ranks(2, short_timeout(), 1);
  const auto rank_main = [&](int r) {
    require(cudaSetDevice(r) == cudaSuccess, "a second device");
    Engine& engine = *engines[r];
    std::vector<float> data(5000), seen(data.size());
    for (int i = 1; i <= 40; ++i) {
      data.assign(data.size(), r == 1 ? static_cast<float>(i) : 0.f);
      Call call;
      call.op = r == 1 ? Op::kSend : Op::kRecv;
      call.dtype = DType::kFloat32;
      call.root = 1 - r;
      call.count = data.size();
      call.input = call.output = data.data();
      if (i % 2 == r) usleep(300);  // either comes later, and enqueues the copy
      const auto request = engine.submit(call);
      request->join(0);
      require(cudaSuccess ==
                  cudaMemcpyAsync(seen.data(), data.data(), seen.size() * sizeof(float), cudaMemcpyDefault, nullptr),
              "copying what came");
      if (r == 1)
        require(cudaSuccess == cudaMemsetAsync(data.data(), 0, data.size() * sizeof(float), nullptr),
                "clearing what was sent");
      require(cudaSuccess == cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
      for (const float x : seen) require(x == static_cast<float>(i), concat("message ", i, " of two devices: ", x));
    }
    engine.close();
  };
  std::thread other(rank_main, 1);
  rank_main(0);
  other.join();
}

// A message on the default stream and a sum behind it. The later rank enqueues the copy, which must not wait for the
// sum of the earlier one: that waits for the later rank.
void message_before_a_sum_of_two_devices() {
  const auto engines = make_ranks(2, short_timeout(), 1);
  const auto rank_main = [&](int r) {
    require(cudaSetDevice(r) == cudaSuccess, "a second device");
    Engine& engine = *engines[r];
    std::vector<float> data(5000), sums(3000);
    for (int i = 1; i <= 10; ++i) {
      data.assign(data.size(), r == 1 ? static_cast<float>(i) : 0.f);
      sums.assign(sums.size(), 1.f);
      Call message, sum;
      message.op = r == 1 ? Op::kSend : Op::kRecv;
      sum.op = Op::kAllReduce;
      message.dtype = sum.dtype = DType::kFloat32;
      message.root = 1 - r;
      message.count = data.size();
      message.input = message.output = data.data();
      sum.count = sums.size();
      sum.input = sum.output = sums.data();
      if (i % 2 == r) usleep(5000);
      const auto first = engine.submit(message), second = engine.submit(sum);
      second->wait();
      first->wait();
      require(data[4999] == static_cast<float>(i) && sums[2999] == 2.f, concat("message and sum ", i));
    }
    engine.close();
  };
  std::thread other(rank_main, 1);
  rank_main(0);
  other.join();
}

// Both ranks send more than the links hold before they receive: requests and lists do not wait for each other.
void crossing_messages(Engine& engine) {
  const OwnStream own;
  const int peer = 1 - engine.rank();
  std::vector<float> out(100000, static_cast<float>(engine.rank())), in(100000);
  Call sends, receives;
  sends.op = Op::kSend;
  receives.op = Op::kRecv;
  sends.dtype = receives.dtype = DType::kFloat32;
  sends.root = receives.root = peer;
  sends.count = receives.count = out.size();
  sends.stream = receives.stream = stream;
  sends.input = out.data();
  receives.output = in.data();
  const auto sent = engine.submit(sends), received = engine.submit(receives);
  received->wait();
  require(received->source() == peer && in[99999] == static_cast<float>(peer), "crossing requests");
  sent->wait();
  in.assign(in.size(), -1.f);
  engine.run_list({sends, receives});
  engine.synchronize(stream);
  require(in[99999] == static_cast<float>(peer), "a list of messages");
  engine.close();
}

// Long messages out of memory that the peer sees, into such memory, between two of them: none needs a slot.
void visible_messages(Engine& engine) {
  const OwnStream own;
  const int peer = 1 - engine.rank();
  constexpr std::size_t kCount = 60000;
  auto* const out = static_cast<float*>(engine.allocate(kCount * sizeof(float)));
  auto* const in = static_cast<float*>(engine.allocate(kCount * sizeof(float)));
  std::vector<float> own_out(kCount), own_in(kCount);
  for (int round = 0; round < 6; ++round) {
    float* const source = round % 4 == 3 ? own_out.data() : out;
    float* const target = round % 4 == 1 ? own_in.data() : in;
    for (std::size_t i = 0; i < kCount; ++i) source[i] = static_cast<float>(i + 100000 * engine.rank() + round);
    Call sends, receives;
    sends.op = Op::kSend;
    receives.op = Op::kRecv;
    sends.dtype = receives.dtype = DType::kFloat32;
    sends.root = receives.root = peer;
    sends.count = receives.count = kCount - round;
    sends.stream = receives.stream = stream;
    sends.input = source;
    receives.output = target;
    engine.run_list({sends, receives});
    engine.synchronize(stream);
    for (std::size_t i = 0; i < receives.count; ++i)
      require(target[i] == static_cast<float>(i + 100000 * peer + round), concat("round ", round, ", element ", i));
  }
  engine.release(out);
  engine.release(in);
  engine.close();
}

void lists(Engine& engine) {
  const OwnStream own;
  const int w = engine.world_size(), rank = engine.rank();
  std::vector<std::vector<float>> data;
  std::vector<Call> calls;
  for (int i = 0; i < 37; ++i) data.emplace_back(1 + 7 * i, static_cast<float>(rank + i));
  for (auto& each : data) calls.push_back(all_reduce_of(each));
  std::vector<float> gathered(static_cast<std::size_t>(5 * w)), part(5, static_cast<float>(rank));
  Call gather;
  gather.op = Op::kAllGather;
  gather.dtype = DType::kFloat32;
  gather.input = part.data();
  gather.output = gathered.data();
  gather.count = 5;
  gather.stream = stream;
  calls.push_back(gather);
  engine.run_list(calls);
  engine.synchronize(stream);
  for (int i = 0; i < 37; ++i)
    for (const float x : data[i])
      require(x == static_cast<float>(w * i + w * (w - 1) / 2), concat("list entry ", i, ": ", x));
  for (int p = 0; p < w; ++p) require(gathered[5 * p + 4] == static_cast<float>(p), "the gather of a list");
  engine.close();
}

void packing() {
  const auto engines = make_ranks(1);
  const OwnStream own;
  std::vector<std::vector<float>> tensors;
  std::size_t total = 0;
  for (int i = 0; i < 400; ++i) tensors.emplace_back(i % 17, static_cast<float>(i)), total += i % 17;
  std::vector<BFloat16> bucket(total);
  PackCall pack;
  pack.from = DType::kFloat32;
  pack.to = DType::kBFloat16;
  pack.factor = 0.25;
  pack.stream = stream;
  for (std::size_t i = 0, at = 0; i < tensors.size(); at += tensors[i++].size())
    pack.pieces.push_back({tensors[i].data(), bucket.data() + at, tensors[i].size()});
  engines[0]->pack(pack);
  engines[0]->synchronize(stream);
  std::size_t at = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (std::size_t k = 0; k < tensors[i].size(); ++k, ++at)
      require(bucket[at].raw == narrow(0.25f * static_cast<float>(i), static_cast<BFloat16*>(nullptr)).raw,
              concat("pack: tensor ", i));
  pack.to = DType::kInt8;
  throws(ErrorCode::kUnsupported, {"pack"}, "a cast to integers", [&] { engines[0]->pack(pack); });
  // What is asked of the driver depends on the allocations, not on the pieces.
  constexpr std::size_t kHalf = 32u << 10;
  char* const memory = static_cast<char*>(engines[0]->allocate(2 * kHalf));
  pack.to = DType::kFloat32;
  const auto calls_of = [&](std::size_t pieces) {
    pack.pieces.clear();
    for (std::size_t i = 0; i < pieces; ++i) pack.pieces.push_back({memory + 64 * i, memory + kHalf + 64 * i, 9});
    const long before = emulator::calls_so_far();
    engines[0]->pack(pack);
    return emulator::calls_so_far() - before;
  };
  calls_of(1);  // which asks for what is kept
  const long calls_of_two = calls_of(2), calls_of_many = calls_of(150);
  require(calls_of_many == calls_of_two, concat("pack: ", calls_of_many, " calls of the runtime, not ", calls_of_two));
  engines[0]->synchronize(stream);
  engines[0]->release(memory);
}

void facts() {
  run_threads(2, on_own_stream([](Engine& engine) {
                std::string text;
                for (const auto& [key, value] : engine.describe()) text += key + '=' + value + '\n';
                for (const char* part : {"engine=cuda\n", "ranks=threads\n", "sharing=2 ranks on one device\n",
                                         "order=canonical\n", "ring_order=0 1\n"})
                  require(text.find(part) != std::string::npos, "describe: " + text);
              }));
}

std::vector<Section> sections() {
  return {
      {"threads", threads_matrix, {}},
      {"apart", threads_matrix, kApart},
      {"processes", processes_matrix, {}, true},
      {"two_devices", two_devices, {}},
      {"windows", windows, kApart},
      {"streams", threads(3, several_streams), {}},
      {"streams_apart", threads(3, several_streams), kApart},
      {"communicators", two_communicators, {}},
      {"single_thread", single_thread, {}},
      {"single_thread_apart", single_thread, kApart},
      {"graphs", processes(2, graphs_of_processes), {}, true},
      {"messages", threads(3, message_orders), {}},
      {"messages_of_two_devices", messages_of_two_devices, {}},
      {"message_before_a_sum_of_two_devices", message_before_a_sum_of_two_devices, {}},
      {"crossing", threads(2, crossing_messages), {}},
      {"crossing_processes", processes(2, crossing_messages), {}, true},
      {"visible_processes", processes(2, visible_messages), {}, true},
      {"lists", threads(3, lists), {}},
      {"lists_apart", threads(3, lists), kApart},
      {"packing", packing, {}},
      {"facts", facts, {}},
      {"contexts", contexts, {}},
      {"host_calls", host_calls, {}},
      {"lent_streams", lent_streams, {}},
  };
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  run_sections("cuda_engine_test", sections(), argc, argv);
}
