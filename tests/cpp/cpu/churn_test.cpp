// Engines that come and go, in every way that they may end: nothing stays behind. Under the address sanitizer memory
// is looked over for leaks too.
#include <dirent.h>

#include <chrono>
#include <fstream>

#include "cpp/ranks.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace ringcomm::test {
namespace {

constexpr int kRounds = kProcesses ? 1000 : 200;  // ThreadSanitizer takes its time

// ---- what may stay behind ------------------------------------------------------------------------------------------

int entries(const char* folder) {
  int count = 0;
  DIR* directory = opendir(folder);
  while (readdir(directory)) ++count;
  closedir(directory);
  return count;
}
int shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:") != std::string::npos;
  return count;
}

struct Holdings {
  int files = entries("/proc/self/fd"), threads = entries("/proc/self/task"), mappings = shared_mappings();
  bool operator==(const Holdings& other) const {
    return files == other.files && threads == other.threads && mappings == other.mappings;
  }
};

// A thread that was joined leaves /proc a moment later.
void require_same(const Holdings& before) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  Holdings after;
  while (!(after == before) && std::chrono::steady_clock::now() < end) {
    usleep(1000);
    after = Holdings();
  }
  require(after == before, concat("files, threads, shared mappings: ", before.files, ' ', before.threads, ' ',
                                  before.mappings, " became ", after.files, ' ', after.threads, ' ', after.mappings));
}

#if defined(__SANITIZE_ADDRESS__)
void require_no_leaks() {
  static volatile std::uintptr_t hidden = 0;  // from the sanitizer, which must find this one
  std::thread([] { hidden = ~reinterpret_cast<std::uintptr_t>(new int[1000]); }).join();
  const bool seen = __lsan_do_recoverable_leak_check() != 0;
  delete[] reinterpret_cast<int*>(~hidden);
  require(seen, "leaks go unseen: run with detect_leaks=1");
  require(__lsan_do_recoverable_leak_check() == 0, "memory was leaked");
}
#else
void require_no_leaks() {}
#endif

// ---- the lives of engines ------------------------------------------------------------------------------------------

enum Ending { kClosed, kAborted, kDestroyed, kInFlight, kNumEndings };

Call call_of(Op op, void* data, std::size_t count, int root = 0) {
  Call call;
  call.op = op;
  call.dtype = DType::kFloat32;
  call.input = call.output = data;
  call.count = count;
  call.root = root;
  return call;
}

void reduce(Engine& engine, float* data, std::size_t count, bool queued) {
  std::fill(data, data + count, 1.f);
  if (queued)
    engine.submit(call_of(Op::kAllReduce, data, count))->wait();
  else
    engine.run(call_of(Op::kAllReduce, data, count));
  for (std::size_t i = 0; i < count; ++i)
    require(data[i] == static_cast<float>(engine.world_size()), "the sum is the number of ranks");
}

void pass_on(Engine& engine) {
  const int rank = engine.rank(), world_size = engine.world_size();
  float sent = static_cast<float>(rank), got = -1;
  const int from = (rank + world_size - 1) % world_size;
  const auto received = engine.submit(call_of(Op::kRecv, &got, 1, from));
  engine.run(call_of(Op::kSend, &sent, 1, (rank + 1) % world_size));
  received->wait();
  require(got == static_cast<float>(from), "the message is that of the rank before");
}

void live(Engine& engine, Ending ending, std::vector<std::shared_ptr<Request>>& in_flight) {
  static float never[2];  // for what is in flight until the end
  std::vector<float> data(5000);
  auto* visible = static_cast<float*>(engine.allocate(data.size() * sizeof data[0]));
  reduce(engine, data.data(), 100, false);
  reduce(engine, visible, data.size(), false);
  reduce(engine, data.data(), data.size(), true);
  pass_on(engine);
  engine.release(visible);
  if (ending != kAborted || engine.rank() == 0) engine.run(Call{});
  if (ending == kClosed) engine.close();
  if (ending == kAborted && engine.rank() == 0) engine.abort("that is enough");
  if (ending == kAborted && engine.rank() != 0) {
    try {
      engine.run(Call{});  // rank 0 may end it before the others do
      engine.run(call_of(Op::kRecv, never, 1));
      require(false, "an abort was not noticed");
    } catch (const Error&) {
    }
  }
  if (ending == kInFlight && engine.rank() == 0) {
    in_flight.push_back(engine.submit(Call{}));
    in_flight.push_back(engine.submit(call_of(Op::kRecv, never, 1, 1)));
  }
}

std::vector<std::unique_ptr<Engine>> make_engines(int world_size, const EngineOptions& options = short_timeout()) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < world_size; ++r) engines.push_back(make_cpu_engine(r, world_size, options));
  return engines;
}
std::vector<std::string> handles_of(const std::vector<std::unique_ptr<Engine>>& engines) {
  std::vector<std::string> handles;
  for (const auto& engine : engines) handles.push_back(engine->handle());
  return handles;
}

void a_life(int world_size, Ending ending) {
  std::vector<std::unique_ptr<Engine>> engines = make_engines(world_size);
  const std::vector<std::string> handles = handles_of(engines);
  std::vector<std::shared_ptr<Request>> in_flight;
  std::vector<std::thread> threads;
  for (auto& engine : engines)
    threads.emplace_back([&, each = engine.get()] {
      each->connect(handles);
      live(*each, ending, in_flight);
    });
  for (auto& thread : threads) thread.join();
  engines.clear();
  for (const auto& request : in_flight) require(request->done(), "a request ends with its engine");
}

// Engines that never come to a call: not connected, refused, and alone.
void a_failure(int round) {
  EngineOptions soon = short_timeout();
  soon.timeout_ms = 1;
  const auto engines = make_engines(2, soon);
  std::vector<std::string> handles = handles_of(engines);
  if (round % 4 == 0) return;
  if (round % 4 == 1) handles.pop_back();
  if (round % 4 == 2) handles[1] = handles[0];
  try {
    engines[0]->connect(handles);
    require(false, "a connection without a peer");
  } catch (const Error&) {
  }
}

}  // namespace
}  // namespace ringcomm::test

int main() {
  using namespace ringcomm::test;
  alarm(250);          // a hang ends the program
  a_life(3, kClosed);  // what the process keeps for good is there from now on
  const Holdings before;
  for (int round = 0; round < kRounds; ++round) {
    a_life(2 + round / kNumEndings % 2, static_cast<Ending>(round % kNumEndings));
    if (round % 5 == 0) a_failure(round / 5);
  }
  require_same(before);
  require_no_leaks();
  std::printf("cpu_churn_test passed: %d rounds\n", kRounds);
}
