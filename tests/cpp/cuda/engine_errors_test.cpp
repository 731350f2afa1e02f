// What goes wrong on the cuda engine, and what the ranks hear of it: a clear error, bounded in time, and a process that
// lives on.
//   cuda_engine_errors_test [names of sections]
#include "cpp/cuda/engine_tools.h"

namespace ringcomm::test {
namespace {

void mismatch() {
  const auto engines = make_ranks(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      const OwnStream own;
      std::vector<float> data(100, 1.f);
      engines[r]->run(all_reduce_of(data));
      require(cudaStreamSynchronize(OwnStream::get()) == cudaSuccess, "the first call ends");
      if (r == 1) data.resize(99);
      throws(ErrorCode::kMismatch, {"all_reduce", "rank 1", "#1", "99", "100", "same calls"}, "mismatch",
             [&] { run(*engines[r], all_reduce_of(data)); });
      throws(ErrorCode::kMismatch, {"all_reduce", "99"}, "after a mismatch",
             [&] { run(*engines[r], all_reduce_of(data)); });
      require(engines[r]->aborted(), "a mismatch ends the communicator");
    });
  for (auto& thread : threads) thread.join();
  run_threads(3, on_own_stream([](Engine& e) {
                std::vector<float> data(100, 1.f);
                run(e, all_reduce_of(data));
                require(data[0] == 3.f, "a new communicator works");
              }));
}

void absent() {
  const auto engines = make_ranks(3, limit(300));
  std::vector<std::thread> threads;
  std::atomic<int> timeouts{0};
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      const OwnStream own;
      std::vector<float> data(100, 1.f);
      try {
        run(*engines[r], all_reduce_of(data));
        require(false, "an absent rank: no error");
      } catch (const Error& error) {
        require(std::strstr(error.what(), "rank 2") && std::strstr(error.what(), "no call from it"), error.what());
        timeouts += error.code() == ErrorCode::kTimeout;
      }
    });
  for (auto& thread : threads) thread.join();
  require(timeouts >= 1, "an absent rank is a timeout");
  const OwnStream own;
  std::vector<float> data(100, 1.f);
  throws(ErrorCode::kTimeout, {"expected rank 2", "within 0.3 s"}, "who comes late",
         [&] { run(*engines[2], all_reduce_of(data)); });
}

// The kernels themselves give up, and the host says so, wherever it looks first.
void absent_process(Engine& engine) {
  const OwnStream own;
  std::vector<float> data(100, 1.f);
  run(engine, all_reduce_of(data));
  require(data[0] == static_cast<float>(engine.world_size()), "the first call");
  if (engine.rank() == 1) {
    usleep(2000000);
    return;
  }
  const auto request = submit(engine, all_reduce_of(data));
  throws(ErrorCode::kTimeout, {"all_reduce: rank", "rank 1", "within 0.5 s"}, "an absent process",
         [&] { request->wait(); });
  require(request->done() && engine.aborted(), "a failure counts as done");
  throws(ErrorCode::kTimeout, {"rank 1"}, "the next call", [&] { run(engine, all_reduce_of(data)); });
}

// The host comes to know of a mismatch between processes through the kernels.
void mismatch_of_processes(Engine& engine) {
  const OwnStream own;
  std::vector<float> data(100 + static_cast<std::size_t>(engine.rank()), 1.f);
  const auto request = submit(engine, all_reduce_of(data));
  try {
    request->wait();
    require(false, "a mismatch of processes: no error");
  } catch (const Error& error) {
    const bool mismatch = error.code() == ErrorCode::kMismatch && std::strstr(error.what(), "100 x float32") &&
                          std::strstr(error.what(), "101 x float32");
    require(mismatch || error.code() == ErrorCode::kAborted, error.what());
  }
}

void aborts() {
  {
    const auto engines = make_ranks(2);
    std::thread waits([&] {
      const OwnStream own;
      std::vector<float> data(100, 1.f);
      throws(ErrorCode::kAborted, {"all_reduce: rank 0", "the user's reason"}, "abort",
             [&] { run(*engines[0], all_reduce_of(data)); });
    });
    usleep(50000);
    engines[1]->abort("the user's reason");
    waits.join();
    require(engines[0]->aborted() && engines[1]->aborted(), "an abort is everybody's");
  }
  {  // one who leaves with a call in flight
    auto engines = make_ranks(2);
    std::vector<float> data(100, 1.f);
    const auto request = engines[0]->submit(all_reduce_of(data, 0));
    engines[0].reset();
    throws(ErrorCode::kAborted, {"went away"}, "a rank that went away",
           [&] { engines[1]->run(all_reduce_of(data, 0)); });
    throws(ErrorCode::kAborted, {}, "its request", [&] { request->wait(); });
  }
  run_threads(2, on_own_stream([](Engine& e) {
                std::vector<float> data(100, 1.f);
                run(e, all_reduce_of(data));
                require(data[0] == 2.f, "a new communicator works");
              }));
}

// A kernel that waits is ended by an abort from another thread, long before its limit.
void abort_of_processes(Engine& engine) {
  const OwnStream own;
  std::vector<float> data(100, 1.f);
  if (engine.rank() == 1) {
    run(engine, all_reduce_of(data));
    usleep(1000000);
    return;
  }
  run(engine, all_reduce_of(data));
  const auto request = submit(engine, all_reduce_of(data));
  throws(ErrorCode::kTimeout, {"still in flight"}, "a short wait", [&] { request->wait(50); });
  std::thread other([&] { engine.abort("enough"); });
  throws(ErrorCode::kAborted, {"enough"}, "abort of a kernel", [&] { request->wait(); });
  other.join();
}

void bad_calls() {
  throws(ErrorCode::kUnsupported, {"at most 32 ranks"}, "too many ranks", [] { make_cuda_engine(0, 33, {}); });
  throws(ErrorCode::kInvalid, {"below 2", "got 5"}, "a missing device", [] {
    EngineOptions options;
    options.device = 5;
    make_cuda_engine(0, 1, options);
  });
  setenv("RINGCOMM_TUNING", "/nowhere/at/all", 1);
  throws(ErrorCode::kInvalid, {"/nowhere/at/all"}, "no tuning file", [] { make_cuda_engine(0, 1, {}); });
  unsetenv("RINGCOMM_TUNING");
  setenv("RINGCOMM_CUDA_THREADS", "9", 1);
  throws(ErrorCode::kInvalid, {"RINGCOMM_CUDA_THREADS", "got 9"}, "odd threads", [] { make_cuda_engine(0, 1, {}); });
  setenv("RINGCOMM_CUDA_THREADS", "8", 1);
  throws(ErrorCode::kInvalid, {"connect"}, "unconnected", [] { make_cuda_engine(0, 1, {})->run({}); });
  const auto engines = make_ranks(1);
  Engine& engine = *engines[0];
  const OwnStream own;
  void* far;
  require(cudaSetDevice(1) == cudaSuccess && cudaMalloc(&far, 400) == cudaSuccess && cudaSetDevice(0) == cudaSuccess,
          "memory elsewhere");
  std::vector<float> data(100, 1.f);
  Call call = all_reduce_of(data);
  call.input = far;
  throws(ErrorCode::kInvalid, {"its input", "device 0", "memory of device 1"}, "memory of another device",
         [&] { engine.run(call); });
  call = all_reduce_of(data);
  call.count -= 1;
  call.output = reinterpret_cast<char*>(data.data()) + 2;
  throws(ErrorCode::kInvalid, {"its output", "multiple of 4 bytes", "float32"}, "half an element",
         [&] { engine.run(call); });
  call = all_reduce_of(data);
  call.output = nullptr;
  throws(ErrorCode::kInvalid, {"null"}, "no memory", [&] { engine.run(call); });
  call = all_reduce_of(data, 2);
  throws(ErrorCode::kUnsupported, {"per-thread"}, "per-thread stream", [&] { engine.run(call); });
  // The driver is asked once for each allocation of a list, so the bad piece comes after good ones.
  void* near;
  require(cudaMalloc(&near, 400) == cudaSuccess, "memory here");
  float *const here = static_cast<float*>(near), *const there = static_cast<float*>(far);
  PackCall packing;
  packing.stream = stream;
  packing.pieces = {{here + 20, here + 10, 5}, {here + 25, here, 5}, {there, there, 0}, {data.data(), here + 50, 50}};
  engine.pack(packing);
  packing.pieces.push_back({there + 3, here + 30, 5});
  throws(ErrorCode::kInvalid, {"pack", "its source", "device 0", "memory of device 1"}, "a source elsewhere",
         [&] { engine.pack(packing); });
  packing.pieces.back() = {here + 3, there + 30, 5};
  throws(ErrorCode::kInvalid, {"pack", "its target", "device 0", "memory of device 1"}, "a target elsewhere",
         [&] { engine.pack(packing); });
  packing.pieces.back() = {reinterpret_cast<char*>(here) + 1, here + 30, 5};
  throws(ErrorCode::kInvalid, {"pack", "its source", "multiple of 4 bytes"}, "a source between two elements",
         [&] { engine.pack(packing); });
  packing.pieces.pop_back();
  engine.synchronize(stream);
  require(cudaFree(near) == cudaSuccess && cudaSetDevice(1) == cudaSuccess, "the memory here is freed");
  void* again;
  require(cudaMalloc(&again, 400) == cudaSuccess && cudaSetDevice(0) == cudaSuccess, "more memory elsewhere");
  packing.pieces = {{data.data(), again, 10}};
  throws(ErrorCode::kInvalid, {"pack", "its target", "memory of device 1"},
         again == near ? "memory elsewhere at the address of freed memory" : "new memory elsewhere",
         [&] { engine.pack(packing); });
  cudaFree(again);
  require(!engine.aborted(), "bad arguments end nothing");
  run(engine, all_reduce_of(data));
  engine.close();
  throws(ErrorCode::kInvalid, {"closed"}, "closed", [&] { engine.run(all_reduce_of(data)); });
  cudaFree(far);
}

void no_driver() {
  throws(ErrorCode::kUnsupported, {"cuda engine: rank 0", "no driver"}, "no driver",
         [] { make_cuda_engine(0, 2, {}); });
}

// Four blocks fit, five ranks don't.
void no_room() {
  run_threads(5, on_own_stream([](Engine& engine) {
                std::vector<float> data(100, 1.f);
                Call call = all_reduce_of(data);
                call.algorithm = Algorithm::kRing;
                throws(ErrorCode::kUnsupported, {"5 ranks", "512 threads", "room for 4"}, "no room",
                       [&] { run(engine, call); });
                require(!engine.aborted(), "nothing was launched");
                run(engine, all_reduce_of(data));  // waits for nobody, and needs no room
                require(data[0] == 5.f, "direct");
              }));
}

void missing_message() {
  const auto engines = make_ranks(2, limit(200));
  std::vector<float> data(64);
  Call call;
  call.op = Op::kSend;
  call.dtype = DType::kFloat32;
  call.root = 1;
  call.tag = 3;
  call.count = 64;
  call.input = data.data();
  throws(ErrorCode::kTimeout, {"send: rank 0", "rank 1 to receive 256 bytes with tag 3", "0.2 s"}, "a send to nobody",
         [&] { engines[0]->run(call); });
  require(engines[1]->aborted(), "a lost message ends the communicator");
}

// Callbacks of requests that fail and of those that end well; a request outlives its engine.
void callbacks() {
  auto engines = make_ranks(2, limit(300));
  std::vector<float> a(10, 1.f), b(10, 2.f);
  std::atomic<int> well{0}, badly{0};
  const auto count = [&](std::exception_ptr error) { ++(error ? badly : well); };
  const auto first = engines[0]->submit(all_reduce_of(a, 0));
  first->on_done(count);
  engines[1]->submit(all_reduce_of(b, 0))->on_done(count);
  first->wait();
  while (well < 2) std::this_thread::yield();
  first->on_done(count);
  require(well == 3 && a[0] == 3.f, "callbacks");
  const auto lonely = engines[0]->submit(all_reduce_of(a, 0));
  lonely->on_done(count);
  while (badly < 1) std::this_thread::yield();
  throws(ErrorCode::kTimeout, {}, "a request that nobody joined", [&] { lonely->wait(); });
  engines.clear();
  first->wait();
  throws(ErrorCode::kTimeout, {}, "after the engine", [&] { lonely->wait(); });
}

std::vector<Section> sections() {
  return {
      {"mismatch", mismatch, {}},
      {"absent", absent, {}},
      {"absent_process", processes(2, absent_process, 500), {}, true},
      {"mismatch_of_processes", processes(2, mismatch_of_processes), {}, true},
      {"aborts", aborts, {}},
      {"abort_of_processes", processes(2, abort_of_processes), {}, true},
      {"bad_calls", bad_calls, {}},
      {"no_driver", no_driver, {{"RINGCOMM_EMULATED_NO_DRIVER", "1"}}},
      {"no_room", no_room, {{"RINGCOMM_EMULATED_SMS", "1"}, {"RINGCOMM_CUDA_THREADS", "512"}}},
      {"missing_message", missing_message, {}},
      {"callbacks", callbacks, {}},
  };
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  run_sections("cuda_engine_errors_test", sections(), argc, argv);
}
